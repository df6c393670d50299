"""Which hyperparameters change, and how far."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from agilerl.algorithms import GRPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo import Mutations, PerturbOrResample
from agilerl.hpo.mutation import set_hyperparameter
from agilerl.testing import tiny_model

MODEL = tiny_model(hidden_size=16, layers=1, heads=2, key_value_heads=1)


@pytest.fixture(name="make")
def make_agents() -> Iterator[Any]:
    made: list[GRPO] = []

    def make(size: int = 1, **arguments: Any) -> list[GRPO]:
        for index in range(size):
            given = {"pad_token_id": 0, "pad_token": "x", "actor_network": MODEL, "index": index}
            made.append(GRPO(**given, **arguments))
        return made[-size:]

    yield make
    for agent in made:
        agent.clean_up()


def search(**parameters: Any) -> HyperparameterConfig:
    return HyperparameterConfig(**parameters)


def mutations(**changes: Any) -> Mutations:
    given = {"no_mutation": 0.0, "architecture": 0.0, "new_layer_prob": 0.0, "parameters": 0.0,
             "activation": 0.0, "rl_hp": 1.0, "rand_seed": 0}  # fmt: skip
    return Mutations(**(given | changes))


def test_one_hyperparameter_takes_one_step(make: Any) -> None:
    (agent,) = make(lr=1e-4, hp_config=search(lr=RLParameter(1e-6, 1e-2), beta=RLParameter(0, 1)))
    mutations().mutation([agent])
    assert agent.lr in (0.8e-4, pytest.approx(1.2e-4)) or agent.beta in (0.0008, 0.0012)
    assert (agent.lr == 1e-4) != (agent.beta == 0.001)
    assert agent.mut.split()[0] in ("lr", "beta")


def test_what_changed_is_named(make: Any) -> None:
    (agent,) = make(lr=1e-4, hp_config=search(lr=RLParameter(1e-6, 1e-2)))
    found = set()
    for seed in range(8):
        agent.lr = 1e-4
        mutations(rand_seed=seed).mutation([agent])
        found.add(agent.mut)
    assert found == {"lr 0.0001 -> 8e-05", "lr 0.0001 -> 0.00012"}


@pytest.mark.parametrize(("value", "bounds"), [(0.2, (0.15, 0.25)), ((0.8, 1.28), (0.1, 0.3))])
def test_limits_hold(make: Any, value: Any, bounds: tuple[float, float]) -> None:
    (agent,) = make(clip_coef=value, hp_config=search(clip_coef=RLParameter(*bounds)))
    mutate, seen = mutations(), []
    for _ in range(400):
        mutate.mutation([agent])
        clip = agent.clip_coef
        seen.append(clip if isinstance(value, float) else clip[1] - 1)
        if not isinstance(value, float):  # a band keeps its proportions
            assert (1 - clip[0]) / (clip[1] - 1) == pytest.approx(0.2 / 0.28)
    assert min(seen) == pytest.approx(bounds[0])
    assert max(seen) == pytest.approx(bounds[1])


@pytest.mark.parametrize(("value", "bounds"), [((0.0, 5.0), (1.0, 8.0)), ((0.5, 1.7), (0.5, 2.0))])
def test_a_lower_bound_ends_at_0(make: Any, value: Any, bounds: tuple[float, float]) -> None:
    """That of CISPO is 0 from the start, and stays so."""
    (agent,) = make(clip_coef=value, hp_config=search(clip_coef=RLParameter(*bounds)))
    mutate, seen = mutations(), []
    for _ in range(400):
        mutate.mutation([agent])
        seen.append(agent.clip_coef)
    lows, highs = zip(*seen, strict=True)
    assert min(lows) == 0.0
    assert max(lows) == 0.0 or value[0] > 0
    assert min(highs) == pytest.approx(1 + bounds[0])
    assert bounds[1] < max(highs) <= 1 + bounds[1]


def test_shares_of_agents(make: Any) -> None:
    agents = make(4, hp_config=search(lr=RLParameter(1e-9, 1.0)))
    mutate = mutations(no_mutation=0.3, rl_hp=0.1)
    mutated = sum(agent.mut is not None for _ in range(250) for agent in mutate.mutation(agents))
    assert mutated / 1000 == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize("mutate_elite", [True, False])
def test_the_elite_is_mutated_or_not(make: Any, mutate_elite: bool) -> None:
    agents = make(3, hp_config=search(lr=RLParameter(1e-9, 1.0)))
    for agent, fitness in zip(agents, [0.1, 0.5, 0.2], strict=True):
        agent.fitness.append(fitness)
    before = [agent.lr for agent in agents]
    mutations(mutate_elite=mutate_elite).mutation(agents)
    assert [agent.lr != old for agent, old in zip(agents, before, strict=True)] == [
        True, mutate_elite, True,
    ]  # fmt: skip


def test_before_training_each_is_mutated(make: Any) -> None:
    agents = make(3, hp_config=search(lr=RLParameter(1e-9, 1.0)))
    mutations(no_mutation=1.0, rl_hp=0.0).mutation(agents, pre_training_mut=True)
    assert all(agent.mut for agent in agents)


def test_an_agent_without_hyperparameters_stays(make: Any) -> None:
    (agent,) = make()
    mutations().mutation([agent])
    assert agent.mut is None


def test_hooks_are_called(make: Any) -> None:
    (agent,) = make(hp_config=search(lr=RLParameter(1e-9, 1.0)))
    calls: list[str] = []
    agent.register_mutation_hook(lambda: calls.append(agent.mut))
    mutations().mutation([agent])
    assert calls == [agent.mut]


@pytest.mark.parametrize("resample", [0.0, 1.0])
def test_perturb_or_resample_changes_all(make: Any, resample: float) -> None:
    limits = {"lr": RLParameter(1e-6, 1e-2, scale="log"), "beta": RLParameter(0.0001, 0.1)}
    (agent,) = make(lr=1e-4, beta=0.01, hp_config=search(**limits))
    PerturbOrResample(resample).mutate(agent, random.Random(0))
    stepped = agent.lr in (8e-5, pytest.approx(1.2e-4)) and agent.beta in (0.008, 0.012)
    assert stepped == (resample == 0.0)
    assert agent.mut.count(" -> ") == 2


def test_a_batch_stays_divisible(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And moves to another multiple, or it could never leave a small one."""
    (agent,) = make(batch_size=16)

    class Four:
        world_size = 4

    monkeypatch.setattr("agilerl.hpo.mutation.ranks_of", lambda accelerator: Four)
    parameter = RLParameter(8, 22, dtype=int)
    for value, valid in ((19, 20), (13, 12), (22, 20), (16, 16)):
        said = set_hyperparameter(agent, "batch_size", parameter, value)
        assert agent.batch_size == valid
        assert ("multiple of 4 processes" in said) == (value != 16)
    for old, value, valid in ((8, 10, 12), (8, 6, 4), (4, 3, 4), (20, 22, 20)):
        agent.batch_size = old
        set_hyperparameter(agent, "batch_size", RLParameter(3, 22, dtype=int), value)
        assert agent.batch_size == valid
    set_hyperparameter(agent, "batch_size", RLParameter(1, 3, dtype=int), 3)
    assert agent.batch_size == 4, "there is no multiple within these limits"


@pytest.mark.parametrize("name", ["architecture", "new_layer_prob", "parameters", "activation"])
def test_networks_are_not_mutated(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0.1; it must be 0"):
        mutations(**{name: 0.1})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rl_hp": 1.5}, "rl_hp is 1.5"),
        ({"rl_hp": 0.0}, "no_mutation and rl_hp are both 0"),
        ({"mutate_elite": 1}, "mutate_elite is 1"),
    ],
)
def test_bad_values(changes: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        mutations(**changes)


def test_log_scale_is_uniform_in_the_logarithm() -> None:
    rng, parameter = random.Random(0), RLParameter(1e-6, 1e-2, scale="log")
    drawn = [parameter.sample(rng) for _ in range(4000)]
    for decade in range(-6, -2):
        share = sum(10**decade <= value < 10 ** (decade + 1) for value in drawn) / 4000
        assert share == pytest.approx(0.25, abs=0.03)
    counts = [RLParameter(1, 64, dtype=int, scale="log").sample(rng) for _ in range(500)]
    assert {1, 2, 4} <= set(counts) and all(isinstance(value, int) for value in counts)
    for bad in ({"scale": "square"}, {"scale": "log"}):
        with pytest.raises(ValueError, match="scale"):
            RLParameter(0.0, 1.0, **bad)


def test_at_a_limit_a_value_moves_away_and_a_0_that_stays_is_no_mutation(make: Any) -> None:
    parameters = search(lr=RLParameter(1e-4, 1e-3))
    for start, end in ((1e-3, 0.8e-3), (1e-4, 1.2e-4)):
        for seed in range(4):
            (agent,) = make(lr=start, hp_config=parameters)
            mutations(rand_seed=seed).mutation([agent])
            assert agent.lr == pytest.approx(end)
    (agent,) = make(beta=0.0, hp_config=search(beta=RLParameter(0, 1)))
    mutations().mutation([agent])
    assert (agent.beta, agent.mut) == (0, None)
