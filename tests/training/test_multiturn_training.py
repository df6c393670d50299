"""finetune_llm_multiturn with a real tiny agent: groups, credit, evaluation, limits, failures."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.llm_envs import EnvironmentFailure, SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.llm_envs.seeds import EVALUATION_SEED_START
from agilerl.testing import byte_tokenizer, tiny_model
from agilerl.training.train_llm import finetune_llm_multiturn

TOKENIZER = byte_tokenizer()


class Echo:
    """Three turns; pays the share of answers' bytes that are even, turn by turn."""

    played: ClassVar[list[tuple[int, list[str]]]] = []

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        assert seed is not None
        self.answers: list[str] = []
        self.played.append((seed, self.answers))
        return f"game {seed % 100}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.answers.append(action)
        data = action.encode("utf-8", "replace")
        reward = sum(byte % 2 == 0 for byte in data) / max(len(data), 1)
        return f"turn {len(self.answers)}", reward, len(self.answers) == 3, False, {}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Echo.played = []
    monkeypatch.chdir(tmp_path)


def make_env(env: Callable[[], Any] = Echo, **arguments: Any) -> TokenObservationWrapper:
    return TokenObservationWrapper(env(), TOKENIZER, **({"max_turns": 3} | arguments))


def make_agent(cls: type[GRPO] = GRPO, index: int = 0, **arguments: Any) -> GRPO:
    settings: dict[str, Any] = {
        "actor_network": tiny_model(hidden_size=32, layers=1),
        "pad_token_id": TOKENIZER.pad_token_id,
        "pad_token": TOKENIZER.pad_token,
        "batch_size": 8,
        "group_size": 4,
        "max_output_tokens": 4,
        "max_model_len": 160,
        "lr": 1e-3,
        "gradient_checkpointing": False,
    }
    return cls(**(settings | arguments), index=index)


def finetune(pop: list[GRPO], **arguments: Any) -> list[dict[str, str]]:
    """Train for a few iterations and return the rows of ``metrics.csv``."""
    settings: dict[str, Any] = {
        "max_turns": 3,
        "env_factory": make_env,
        "max_steps": 48,
        "evaluation_interval": 2,
        "evaluation_episodes": 5,
        "groups_per_iteration": 2,
        "checkpoint_path": "run",
        "verbose": False,
    }
    trained = finetune_llm_multiturn(pop, **(settings | arguments))
    assert trained is pop
    with (Path((settings | arguments)["checkpoint_path"]) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def training_seeds() -> list[int]:
    return [seed for seed, _ in Echo.played if seed < EVALUATION_SEED_START]


def test_without_bounds_a_run_is_one_pass_over_the_seeds() -> None:
    agent = make_agent()
    rows = finetune([agent], max_steps=None, train_seeds=6, evaluation_interval=100)
    assert [row["steps"] for row in rows] == ["0", "24", "48", "72"]
    assert len(set(training_seeds())) == 6


@pytest.mark.parametrize("cls", [GRPO, GSPO, CISPO])
def test_a_run(cls: type[GRPO]) -> None:
    """2 groups of 4 episodes with 3 turns are 24 steps; 48 are two iterations."""
    agent = make_agent(cls)
    before = {name: p.detach().clone() for name, p in agent.policy.parameters().items()}
    rows = finetune([agent])
    assert [row["steps"] for row in rows] == ["0", "24", "48"]
    assert agent.steps == [0, 48]
    assert len(agent.scores) == 2
    assert [float(row["turns_mean"]) for row in rows[1:]] == [3.0, 3.0]
    assert [float(row["failed_completions"]) for row in rows[1:]] == [0.0, 0.0]
    assert all(float(rows[1][f"{s}_seconds"]) > 0 for s in ("generation", "environment"))
    assert any(not torch.equal(before[n], p) for n, p in agent.policy.parameters().items())
    # One seed per group, four episodes each, none of them an evaluation's.
    seeds = training_seeds()
    assert len(seeds) == 16
    assert all(len(set(seeds[i : i + 4])) == 1 for i in range(0, 16, 4))
    assert len(set(seeds)) == 4
    # The fitness is the mean return of the last evaluation's five episodes.
    last = [answers for seed, answers in Echo.played if seed >= EVALUATION_SEED_START]
    assert len(last) == 10
    assert float(rows[-1]["fitness"]) == agent.fitness[-1]
    lines = Path("run/completions.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 4
    assert samples[0]["question"].endswith("<|im_start|>assistant\n")
    assert samples[0]["completion"].count("<|im_start|>user\nturn ") == 2
    assert json.loads(Path("run/config.json").read_text())["environment"] == "Echo"


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_every_combination_of_credit_and_ratio(credit: str) -> None:
    """From the second epoch on the ratio's level tells the updates apart."""

    def trained(level: str) -> torch.Tensor:
        agent = make_agent(
            importance_sampling_level=level,
            advantage_granularity=credit,
            update_epochs=2,
            lr=1e-2,
            clip_coef=0.01,
        )
        finetune([agent], max_steps=24, checkpoint_path=level)
        return torch.cat([p.detach().flatten() for p in agent.policy.parameters().values()])

    by_level = [trained(level) for level in ("token", "turn", "trajectory")]
    assert all(weights.isfinite().all() for weights in by_level)
    assert not any(torch.equal(by_level[i], by_level[i - 1]) for i in range(3))


def test_credit_per_turn_moves_the_weights_differently() -> None:
    """Same seeds, same first rollouts: only the advantages differ."""

    def trained(credit: str, path: str) -> torch.Tensor:
        agent = make_agent(advantage_granularity=credit)
        finetune([agent], max_steps=24, checkpoint_path=path)
        return torch.cat([p.detach().flatten() for p in agent.policy.parameters().values()])

    assert torch.equal(trained("trajectory", "a"), trained("trajectory", "b"))
    assert not torch.equal(trained("trajectory", "c"), trained("turn", "d"))


def test_members_of_a_population_play_the_same_seeds() -> None:
    pop = [make_agent(index=0), make_agent(index=1, group_size=2)]
    rows = finetune(pop)
    assert [row["agent"] for row in rows] == ["0", "1"] * (len(rows) // 2)
    training = training_seeds()
    first = [training[0], training[4]]
    assert training[8:12] == [first[0], first[0], first[1], first[1]]
    evaluated = [seed for seed, _ in Echo.played if seed >= EVALUATION_SEED_START]
    assert set(evaluated) == {EVALUATION_SEED_START + i for i in range(5)}


def test_the_reference_moves_after_a_pass_over_the_training_seeds() -> None:
    """Four seeds, two per iteration: a pass is two iterations."""

    trackers: list[int] = []

    class Watched(GRPO):
        def set_reference_policy(self, reference_update_tracker: int) -> None:
            trackers.append(reference_update_tracker)
            super().set_reference_policy(reference_update_tracker)

    agent = make_agent(Watched)
    finetune([agent], train_seeds=4, max_steps=None, num_epochs=2)
    assert trackers == [0, 0, 1, 1]
    assert len(agent.scores) == 4
    assert sorted(set(training_seeds())) == [0, 1, 2, 3]


def test_max_wall_seconds_ends_the_run() -> None:
    agent = make_agent()
    finetune([agent], max_steps=10**9, max_wall_seconds=0.01)
    assert len(agent.scores) <= 1
    assert agent.fitness


def test_the_agents_context_is_the_environments() -> None:
    """First prompt and feedback have about 26 tokens each: the third turn does not fit."""
    agent = make_agent(max_model_len=80)
    rows = finetune([agent], max_steps=8)
    assert float(rows[-1]["truncated_share"]) > 0
    assert float(rows[-1]["turns_mean"]) < 3


def test_episodes_that_were_cut_off_are_not_trained_if_so_asked() -> None:
    """All of them are: nothing is left to train."""
    agent = make_agent(max_model_len=80, mask_truncated_completions=True)
    rows = finetune([agent], max_steps=8)
    assert float(rows[-1]["truncated_share"]) == 1.0
    assert float(rows[-1]["grad_norm"]) == 0.0


@pytest.mark.parametrize("cls", [GRPO, GSPO, CISPO])
@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_a_sliding_window_plays_on_and_trains_every_turn(cls: type[GRPO], credit: str) -> None:
    trajectories: list[list[int]] = []

    class Watched(cls):  # type: ignore[misc, valid-type]
        def learn(self, *args: Any, trajectory_ids: Any = None, **kwargs: Any) -> Any:
            trajectories.append(trajectory_ids.tolist())
            return super().learn(*args, trajectory_ids=trajectory_ids, **kwargs)

    agent = make_agent(Watched, max_model_len=80, advantage_granularity=credit)
    rows = finetune([agent], env_factory=lambda: make_env(enable_sliding_window=True))
    assert float(rows[-1]["turns_mean"]) == 3.0
    assert float(rows[-1]["truncated_share"]) == 0.0
    assert float(rows[-1]["grad_norm"]) > 0
    for ids in trajectories:
        assert sorted(set(ids)) == list(range(8))
        assert len(ids) > 8


def test_context_lengths_are_checked_at_the_start() -> None:
    def longer() -> TokenObservationWrapper:
        return make_env(max_model_len=400)

    with pytest.raises(ValueError, match=r"max_model_len=400, but an agent has max_model_len=160"):
        finetune([make_agent()], env_factory=longer)

    def shorter() -> TokenObservationWrapper:
        return make_env(max_model_len=100, max_output_tokens=2)

    with pytest.raises(ValueError, match=r"keeps 2 tokens free .* up to 4 tokens"):
        finetune([make_agent()], env_factory=shorter)
    # The shorter of two agents sets the context, and the other one's answers do not fit into it.
    pop = [make_agent(max_model_len=90), make_agent(index=1, max_output_tokens=None)]
    with pytest.raises(ValueError, match=r"max_model_len=90 .* max_model_len=160"):
        finetune(pop)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "arguments",
    [{"step_timeout": -1.0}, {"max_turns": 4}, {"evaluation_episodes": 0}, {"max_workers": "2"}],
)
def test_what_was_made_is_closed_when_an_argument_is_refused(arguments: dict[str, Any]) -> None:
    made, closed = [], []

    class Closes(TokenObservationWrapper):
        def close(self) -> None:
            closed.append(self)
            super().close()

    def make() -> TokenObservationWrapper:
        made.append(Closes(Echo(), byte_tokenizer(), 3))
        return made[-1]

    with pytest.raises((ValueError, TypeError)):
        finetune([make_agent()], env_factory=make, **arguments)
    assert closed == made


def test_lengths_that_the_environment_leaves_open_are_the_agents() -> None:
    made: list[TokenObservationWrapper] = []

    def factory() -> TokenObservationWrapper:
        made.append(make_env())
        return made[-1]

    finetune([make_agent(max_output_tokens=3)], max_steps=8, env_factory=factory)
    assert {(env.max_model_len, env.max_output_tokens) for env in made} == {(160, 3)}


@pytest.mark.parametrize(("hangs", "on_failure"), [(False, "drop"), (False, -1.0), (True, "drop")])
def test_a_failing_environment_costs_its_episode_and_no_more(hangs: bool, on_failure: Any) -> None:
    release = threading.Event()
    failed: list[int] = []

    class Failing(Echo):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            seed = self.played[-1][0] if not failed else EVALUATION_SEED_START
            if seed < EVALUATION_SEED_START:
                failed.append(seed)
                if hangs:
                    release.wait(30)
                raise OSError("the game server is gone")
            return super().step(action)

    agent = make_agent()
    returns: list[float] = []
    masks: list[Any] = []
    learn = agent.learn

    def watched(experiences: Any, **kwargs: Any) -> dict[str, float]:
        returns.append(float(experiences[2].min()))
        masks.append(kwargs.get("sample_mask"))
        return learn(experiences, **kwargs)

    agent.learn = watched  # type: ignore[method-assign]
    rows = finetune(
        [agent],
        env_factory=lambda: make_env(Failing),
        on_failure=on_failure,
        step_timeout=3.0 if hangs else 60.0,  # also of the steps that do not hang
    )
    release.set()
    assert [float(row["failed_completions"]) for row in rows[1:]] == [1.0, 0.0, 0.0]
    first, *others = Path("run/completions.jsonl").read_text().splitlines()[:2]
    (failure,) = [
        each["failure"] for each in map(json.loads, [first, *others]) if "failure" in each
    ]
    assert ("TimeoutError" if hangs else "OSError: the game server is gone") in failure
    assert masks[1:] == [None, None]
    if on_failure != "drop":
        assert returns[0] == -1.0 < 0.0 <= returns[1]
        assert masks[0] is None
        return
    assert masks[0].shape == (8,)
    assert masks[0].sum() == 7
    # What is left: three turns each.
    assert [float(row["turns_mean"]) for row in rows[1:]] == [3.0, 3.0, 3.0]
    assert float(rows[1]["reward_mean"]) == pytest.approx(agent.scores[0])


def test_environments_that_mostly_fail_end_the_run_by_name() -> None:
    class Gone(Echo):
        def step(self, action: str) -> Any:
            raise OSError("the game server is gone")

    with pytest.raises(EnvironmentFailure, match="the game server is gone"):
        finetune([make_agent()], env_factory=lambda: make_env(Gone))


def test_a_crash_is_not_reinforced() -> None:
    """All lose but one, which crashes: with a reward of 0 that is the best of its group."""

    def moved(on_failure: Any) -> bool:
        crashed: list[int] = []

        class Losing(Echo):
            def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
                seed = next(seed for seed, answers in self.played if answers is self.answers)
                if seed < EVALUATION_SEED_START and not crashed:
                    crashed.append(seed)
                    raise OSError("the game server is gone")
                return "lost", -1.0, True, False, {}

        agent = make_agent(beta=0.0)
        before = {name: p.detach().clone() for name, p in agent.policy.parameters().items()}
        limits = {"groups_per_iteration": 1, "max_steps": 4, "evaluation_episodes": 1}
        factory = lambda: make_env(Losing)  # noqa: E731
        finetune([agent], env_factory=factory, on_failure=on_failure, **limits)
        assert crashed
        after = agent.policy.parameters()
        return any(not torch.equal(after[name], value) for name, value in before.items())

    assert moved(0.0)
    assert not moved("drop")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"env_factory": Echo}, TypeError, "has to be wrapped"),
        ({"env_factory": 3}, TypeError, "env_factory"),
        ({"max_turns": 0}, ValueError, "max_turns is 0; it must be at least 1"),
        (
            {"max_turns": 4},
            ValueError,
            "max_turns=4 was given to finetune_llm_multiturn, but .* with max_turns=3",
        ),
        ({"groups_per_iteration": 0}, ValueError, "groups_per_iteration is 0"),
        ({"train_seeds": 1.5}, TypeError, "train_seeds is 1.5"),
        ({"max_wall_seconds": 0}, ValueError, "max_wall_seconds is 0; it must be above 0"),
        ({"max_wall_seconds": "1 h"}, TypeError, "max_wall_seconds is '1 h'"),
        ({"evaluation_episodes": 0}, ValueError, "evaluation_episodes"),
        ({"step_timeout": -1.0}, ValueError, "step_timeout"),
        ({"resume_from": "run"}, FileNotFoundError, "resume_from='run' holds no complete"),
        ({"pop": []}, ValueError, "pop is empty"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    arguments = dict(arguments)
    with pytest.raises(error, match=says):
        finetune(
            arguments.pop("pop", None) or ([] if says == "pop is empty" else [make_agent()]),
            **arguments,
        )


def test_agents_are_tested_on_fixed_episodes() -> None:
    """A vector environment and a single environment play evaluation seeds, always the same."""
    agent = make_agent()
    vector = SyncMultiTurnVecEnv(make_env, batch_size=3, evaluation_episodes=5)
    returns = agent.test(vector, loop=2)
    assert returns.shape == (10,)
    assert returns.dtype.name == "float32"
    assert returns[:5] == pytest.approx(returns[5:])
    assert agent.fitness == [pytest.approx(returns.mean())]
    seeds = [seed - EVALUATION_SEED_START for seed, _ in Echo.played]
    assert seeds == [0, 1, 2, 3, 4] * 2

    Echo.played.clear()
    single = agent.test(make_env(max_model_len=160), loop=2)
    assert [seed - EVALUATION_SEED_START for seed, _ in Echo.played] == [0, 1]
    assert single.shape == (2,)
    assert len(agent.fitness) == 2
    with pytest.raises(TypeError, match="must be a ReasoningGym, a SyncMultiTurnVecEnv"):
        agent.test(Echo())


def test_training_with_coroutines_messages_and_native_tools() -> None:
    """Their rows are what was seen and sampled, and they are learned from."""

    class Remote(Echo):
        async def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
            text, info = super().reset(seed)
            return [{"role": "system", "content": "Hi"}, {"role": "user", "content": text}], info

        async def step(self, action: str) -> Any:  # type: ignore[override]
            text, *rest = super().step(action)
            return [{"role": "tool", "name": "search", "content": text}], *rest

    def search(query: str) -> str:
        """Finds pages.

        Args:
            query: What to look for.
        """
        return query

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template

    def make() -> TokenObservationWrapper:
        return TokenObservationWrapper(Remote(), tokenizer, max_turns=3, tools=[search])

    agent = make_agent(max_model_len=512)
    before = {name: p.detach().clone() for name, p in agent.policy.parameters().items()}
    rows = finetune([agent], env_factory=make)
    assert [float(row["turns_mean"]) for row in rows[1:]] == [3.0, 3.0]
    assert [float(row["failed_completions"]) for row in rows[1:]] == [0.0, 0.0]
    assert any(not torch.equal(before[n], p) for n, p in agent.policy.parameters().items())
    sample = json.loads((Path("run") / "completions.jsonl").read_text().splitlines()[-1])
    assert '"description": "Finds pages."' in sample["question"]
    assert "<|im_start|>tool\nturn 2<|im_end|>" in sample["completion"]
