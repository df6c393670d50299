"""Every hyperparameter that may be mutated takes effect in the next iteration of both loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_helpers import RUNS, make_agents, seed_all

from agilerl.algorithms import GRPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo import Mutations
from agilerl.hpo.selection import Selection
from agilerl.llm.generation.hf import HFGenerator

SETTINGS: dict[str, Any] = {
    "beta": 0.01,
    "max_grad_norm": 0.1,
    "adv_clip_range": 100.0,
    "micro_batch_size_per_gpu": 3,
    "batch_size": 3,
    "update_epochs": 2,
}
STEPS = {"reasoning": 3, "multiturn": 10}
"""Of two iterations."""
CAPPED = "importance_weight_capped"


@pytest.fixture(autouse=True, scope="module")
def sampler_is_another() -> Iterator[None]:
    """The generator reports log-probs, which are compared with the trainer's, as vLLM's are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFGenerator, "differs_from_trainer", True)
        yield


class EachStays(Selection):
    """Each member keeps its agent."""

    def parents(self, scores: Any, rng: Any) -> list[int]:
        return list(range(len(scores)))


@dataclass
class Learned:
    """One iteration's ``learn``, as seen from outside."""

    rows: int
    norms: list[float]
    """Of the gradients that the optimizer was given, one per step."""
    forwards: int
    """With gradients."""
    moved: float
    """The largest change of a weight."""
    metrics: dict[str, float]

    def __getitem__(self, metric: str) -> float:
        return self.metrics[metric]


def observed(agent: GRPO) -> list[Learned]:
    """What happens in every ``learn`` of an agent from now on."""
    found: list[Learned] = []
    norms: list[float] = []
    forwards: list[int] = []
    learn = agent.learn

    def note_gradients(*_: Any) -> None:
        gradients = [p.grad for p in agent.engine.parameters if p.grad is not None]
        norms.append(float(torch.cat([g.flatten() for g in gradients]).norm()))

    def note_forward(*_: Any) -> None:
        if torch.is_grad_enabled():
            forwards.append(1)

    def hooked(experiences: Any, **options: Any) -> dict[str, float]:
        norms.clear(), forwards.clear()
        before = [p.detach().clone() for p in agent.engine.parameters]
        metrics = learn(experiences, **options)
        after = [p.detach() for p in agent.engine.parameters]
        moved = [(new - old).abs().max() for new, old in zip(after, before, strict=True)]
        rows = sum(map(len, experiences[0]))
        found.append(Learned(rows, list(norms), len(forwards), float(max(moved)), metrics))
        return metrics

    agent.learn = hooked  # type: ignore[method-assign]
    agent.optimizer.register_step_pre_hook(note_gradients)
    agent.policy.base.decoder.register_forward_pre_hook(note_forward)
    return found


def run(kind: str, path: Path, mutated: dict[str, float], **arguments: Any) -> list[Learned]:
    """Two iterations of an agent; what is mutated moves to the only value in its limits.

    Beside one that is not mutated, which it shares calls of the generator with.
    """
    seed_all()
    agent, other = make_agents(2, **(SETTINGS | arguments))
    found = observed(agent)
    agent.hp_config = HyperparameterConfig(
        **{name: RLParameter(v, v, dtype=type(v)) for name, v in mutated.items()}
    )
    RUNS[kind](
        path, pop=[agent, other], max_steps=STEPS[kind], evo_steps=1, checkpoint_steps=None,
        save_elite=None, elite_path=None,
        tournament=EachStays(2, 1, None),
        mutation=Mutations(0, 0, 0, 0, 0, 1),
    )  # fmt: skip
    assert (agent.mut or "").split(" ")[0] == "".join(mutated)
    agent.clean_up(), other.clean_up()
    assert len(found) == 2
    return found


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Learned]]:
    """Runs without a mutation."""
    return {kind: run(kind, tmp_path_factory.mktemp(kind), {}) for kind in RUNS}


CASES: dict[str, tuple[float, Callable[[Learned, Learned], bool]]] = {
    "lr": (1e-12, lambda new, old: new.moved < 1e-9 < 1e-4 < old.moved),
    "beta": (0.0, lambda new, old: math.isnan(new["mean_kl"]) and old["mean_kl"] > 0),
    "clip_coef": (1e-7, lambda new, old: new["clip_fraction"] > 0.1 + old["clip_fraction"]),
    "group_size": (2, lambda new, old: 3 * new.rows == 2 * old.rows),
    "batch_size": (1, lambda new, old: len(new.norms) == 3 * len(old.norms)),
    "micro_batch_size_per_gpu": (1, lambda new, old: new.forwards > old.forwards),
    "update_epochs": (1, lambda new, old: 2 * len(new.norms) == len(old.norms)),
    "temperature": (0.1, lambda new, old: new["entropy"] < 0.5 * old["entropy"]),
    "max_grad_norm": (1e-5, lambda new, old: max(new.norms) < 1.01e-5 < 1e-3 < max(old.norms)),
    "adv_clip_range": (
        0.01,
        lambda new, old: new["advantage_std"] < 0.011 < 0.1 < old["advantage_std"],
    ),
    "weight_decay": (50.0, lambda new, old: new.moved > 2 * old.moved),
    "entropy_coef": (
        1.0,
        lambda new, old: new["mean_loss"] < old["mean_loss"] - 0.5 * old["entropy"],
    ),
    "vllm_importance_sampling_cap": (
        0.5,
        lambda new, old: (
            (new[CAPPED], old[CAPPED]) == (1, 0) and new["grad_norm"] < 0.7 * old["grad_norm"]
        ),
    ),
}
"""The value that a hyperparameter moves to, and what holds of the next ``learn`` then."""


def test_every_mutable_hyperparameter_is_here() -> None:
    mutable = {name for name, row in GRPO.argument_table().items() if row.mutable}
    assert mutable == CASES.keys()


@pytest.mark.parametrize("kind", list(RUNS))
@pytest.mark.parametrize("name", list(CASES))
def test_a_mutation_takes_effect_in_the_next_iteration(
    name: str, kind: str, without: dict[str, list[Learned]], tmp_path: Path
) -> None:
    value, effect = CASES[name]
    first, second = run(kind, tmp_path, {name: value})
    assert first == without[kind][0]
    assert effect(second, without[kind][1]), (second, without[kind][1])
    # The sampler has the trainer's temperature.
    assert second["importance_weight_mean"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("kind", list(RUNS))
def test_a_band_is_mutated_to_clip_more(kind: str, tmp_path: Path) -> None:
    first, second = run(kind, tmp_path, {"clip_coef": 1e-7}, clip_coef=(0.5, 1.8))
    assert second["clip_fraction"] > 0.1 + first["clip_fraction"]
