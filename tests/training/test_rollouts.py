"""Agents that act together collect what they would have collected one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from resume_helpers import TOKENIZER, dataset, make_agents, make_gym, seed_all
from training_fakes import FakeGym

from agilerl.algorithms import GRPO
from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm_envs import ReasoningGym, SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.llm_envs.dataset import TrainingBatchSampler
from agilerl.training.collectors.dynamic_sampling import DynamicSampling
from agilerl.training.collectors.experience import Experience
from agilerl.training.collectors.multiturn_collector import MultiTurnCollector
from agilerl.training.collectors.reasoning_collector import ReasoningCollector
from agilerl.training.collectors.rollouts import collect
from agilerl.training.population import Population

Collectors = Callable[[int], Sequence[Any]]


class Echo:
    """Up to three turns; the observation is made of the seed and the action."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.seed, self.turn = seed, 0
        return f"game {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        over = self.turn == 3 or len(action) % 3 == 0
        return f"{self.seed}: {action[:2]!r}", len(set(action)) / 8, over, False, {}


def shared_gym(count: int) -> list[ReasoningCollector]:
    return [ReasoningCollector(make_gym())] * count


def gyms(count: int) -> list[ReasoningCollector]:
    return [ReasoningCollector(make_gym(seed=number)) for number in range(count)]


def games(count: int) -> list[MultiTurnCollector]:
    def env() -> SyncMultiTurnVecEnv:
        return SyncMultiTurnVecEnv(
            lambda: TokenObservationWrapper(Echo(), TOKENIZER, max_turns=3), batch_size=2
        )

    return [MultiTurnCollector(env(), TrainingBatchSampler(4, 2, 1)) for _ in range(count)]


class OddOrEven(Echo):
    """Pays 0 or 1, so that episodes of a group often get the same."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        text, _, over, *others = super().step(action)
        return text, float(over and len(set(action)) % 2), over, *others


RESAMPLE = DynamicSampling("resample", 2)


def resampled_games(count: int) -> list[MultiTurnCollector]:
    def env() -> SyncMultiTurnVecEnv:
        return SyncMultiTurnVecEnv(
            lambda: TokenObservationWrapper(OddOrEven(), TOKENIZER, max_turns=3), 2, max_turns=3
        )

    return [
        MultiTurnCollector(env(), TrainingBatchSampler(6, 2, 2), RESAMPLE) for _ in range(count)
    ]


def resampled_gyms(count: int) -> list[ReasoningCollector]:
    def gym(seed: int) -> ReasoningGym:
        return ReasoningGym(
            *(dataset("train", 5), dataset("test", 1), TOKENIZER),
            lambda completion: float(len(completion) % 2),
            [{"role": "user", "content": "{question}"}],
            data_batch_size_per_gpu=2,
            seed=seed,
        )

    return [ReasoningCollector(gym(number), RESAMPLE) for number in range(count)]


KINDS: dict[str, Collectors] = {
    "shared gym": shared_gym,
    "gyms": gyms,
    "games": games,
    "resampled gyms": resampled_gyms,
    "resampled games": resampled_games,
}


@pytest.fixture
def pop() -> Iterator[list[GRPO]]:
    """Agents with adapters that differ."""
    agents = make_agents(4)
    for agent in agents:
        rng = torch.Generator().manual_seed(agent.index)
        for parameter in agent.policy.parameters().values():
            parameter.data.normal_(0, 0.3, generator=rng)
    yield agents
    for agent in agents:
        agent.clean_up()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many agents each call of a generator served."""
    served: list[int] = []
    complete = HFGenerator.complete

    def counted(self: HFGenerator, requests: Any, *args: Any) -> Any:
        served.append(len(requests))
        return complete(self, requests, *args)

    monkeypatch.setattr(HFGenerator, "complete", counted)
    return served


def rollouts(pop: list[GRPO], collectors: Sequence[Any], iterations: int = 2) -> list[Experience]:
    seed_all()
    for agent in pop:
        agent.rng.manual_seed(agent.index)
    population = Population(pop, collectors)
    return [each for _ in range(iterations) for each in collect(population.members)]


def assert_same(mine: Sequence[Experience], theirs: Sequence[Experience]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        for rows, others in zip(a.experiences[:2], b.experiences[:2], strict=True):
            assert [row.tolist() for row in rows] == [row.tolist() for row in others]
        assert torch.equal(a.rewards, b.rewards)
        assert (a.steps, a.generated_tokens, a.metrics) == (b.steps, b.generated_tokens, b.metrics)
        assert a.samples == b.samples


@pytest.mark.parametrize("kind", list(KINDS))
def test_in_one_call_as_one_by_one(
    kind: str, pop: list[GRPO], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = rollouts(pop, KINDS[kind](4))
    assert calls[0] == 4
    assert 1 not in calls or kind not in ("shared gym", "gyms")  # of others one may go on alone
    states = [agent.rng.get_state() for agent in pop]
    monkeypatch.setattr(HFGenerator, "joint_limits", lambda *_: None)
    calls.clear()
    assert_same(together, rollouts(pop, KINDS[kind](4)))
    assert set(calls) == {1}
    for agent, state in zip(pop, states, strict=True):
        assert torch.equal(agent.rng.get_state(), state)
    if "resampled" in kind:
        assert len({each.metrics["resamples"] for each in together}) > 1, "agents differ"


def test_only_agents_that_sample_alike_act_together(pop: list[GRPO], calls: list[int]) -> None:
    pop[1].temperature = 0.5
    pop[2].group_size = 5  # no matter
    mixed = rollouts(pop, shared_gym(4), iterations=1)
    assert sorted(calls) == [1, 3]
    assert [each.rewards.shape[1] for each in mixed] == [3, 3, 5, 3]
    # Each has still the batch of its turn.
    pop[1].temperature = pop[0].temperature
    questions = [[sample.question for sample in each.samples] for each in mixed]
    alike = rollouts(pop, shared_gym(4), iterations=1)
    assert questions == [[sample.question for sample in each.samples] for each in alike]


def test_no_more_rows_at_a_time_than_one_agent_may_have(pop: list[GRPO], calls: list[int]) -> None:
    for agent in pop:
        agent.hf_generate_chunk_size = 4  # two agents' prompts
    rollouts(pop, gyms(4), iterations=1)
    assert calls == [2, 2]
    calls.clear()
    pop[0].hf_generate_chunk_size = 2  # its own
    rollouts(pop, gyms(4), iterations=1)
    assert calls == [2, 1, 1]


def test_an_environment_that_cannot_look_ahead(pop: list[GRPO], calls: list[int]) -> None:
    class Gym(FakeGym):
        def _prompts(self) -> list[dict[str, Any]]:
            return [{**p, "input_ids": p["input_ids"] - 90} for p in super()._prompts()]

    seen = rollouts(pop, [ReasoningCollector(Gym())] * 4, iterations=1)
    assert calls == [1, 1, 1, 1]
    assert len(seen) == 4
    calls.clear()
    rollouts(pop, [ReasoningCollector(Gym()) for _ in pop], iterations=1)
    assert calls == [4]


def test_a_wrapper_that_changes_prompts_but_not_those_of_upcoming(
    pop: list[GRPO], calls: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    class Hinting:
        """Puts a token before every prompt; delegates the rest."""

        def __init__(self, env: Any) -> None:
            self.env = env

        def __getattr__(self, name: str) -> Any:
            return getattr(self.env, name)

        def reset(self) -> Any:
            return [{**p, "input_ids": p["input_ids"] + 1} for p in self.env.reset()]

    collector = ReasoningCollector(Hinting(make_gym()))
    assert not collector.can_begin(2)
    assert "upcoming(1) of Hinting is not the batch" in caplog.text

    class Wrong(Hinting):
        def reset(self) -> Any:
            return self.env.reset()

        def upcoming(self, count: int) -> Any:
            return self.env.upcoming(1) * count

    with pytest.raises(RuntimeError, match="Wrong handed out another batch than upcoming had"):
        rollouts(pop, [ReasoningCollector(Wrong(make_gym()))] * 4, iterations=1)


def test_an_agent_with_a_way_of_its_own_to_act_acts_alone(
    pop: list[GRPO], calls: list[int]
) -> None:
    class Careful(GRPO):
        def get_action(self, *args: Any, **kwargs: Any) -> Any:
            asked.append(self.index)
            return super().get_action(*args, **kwargs)

    asked: list[int] = []
    pop[1].__class__ = Careful
    rollouts(pop, shared_gym(4), iterations=1)
    assert asked == [1]
    assert sorted(calls) == [1, 3]


def test_an_empty_batch_is_refused(pop: list[GRPO]) -> None:
    gym = FakeGym()
    gym.rows = 0
    with pytest.raises(ValueError, match="FakeGym handed out an empty training batch"):
        rollouts(pop[:1], [ReasoningCollector(gym)], iterations=1)


def test_the_time_of_a_call_is_divided(pop: list[GRPO]) -> None:
    experiences = rollouts(pop, shared_gym(4), iterations=1)
    per_token = [each.generation_seconds / each.generated_tokens for each in experiences]
    assert per_token == pytest.approx([per_token[0]] * 4)
