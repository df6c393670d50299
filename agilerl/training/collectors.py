"""Collecting experiences: one completion per prompt, or whole episodes of several turns."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from agilerl.checks import missing_members, require, warn_once
from agilerl.llm_envs.completion_checks import takes_action
from agilerl.llm_envs.dataset import TrainingBatchSampler
from agilerl.llm_envs.episodes import Episodes
from agilerl.llm_envs.vector import SyncMultiTurnVecEnv
from agilerl.training.experience import Experience, Sample
from agilerl.training.protocols import (
    Agent,
    FingerprintedEnv,
    LookaheadEnv,
    SeveralRewardsEnv,
    SingleTurnEnv,
)
from agilerl.training.rollouts import roll_out

if TYPE_CHECKING:
    import numpy as np

    from agilerl.typing import ActionResult, ReasoningPrompts

logger = logging.getLogger(__name__)

SAMPLES_PER_ITERATION = 4
_ORDER = ("rows", "seed", "epoch", "offset")
"""Keys of an environment's ``state_dict()`` that, if present, are the same in every process."""
_LENGTHS = "prompt_lengths"


class ReasoningCollector:
    """Collects from a ``ReasoningGym``; may be shared, each ``collect`` consumes the next batch.

    Args:
        env: The environment. Its next training batch is drawn at once. A resumed run recognises
            its data by ``env.fingerprint()``, or without that method by the prompts' lengths.
    """

    def __init__(self, env: SingleTurnEnv) -> None:
        self.env = env
        self._prompts = env.reset()
        self._data = _data_digest(env)
        self._takes_action = takes_action(env.step)
        self._several_rewards = not missing_members(env, SeveralRewardsEnv)

    @property
    def num_epochs(self) -> int:
        """Completed passes over the training rows."""
        return self.env.num_epochs

    def can_begin(self, count: int) -> bool:
        """More than one where the environment knows its next batches."""
        if count == 1:
            return True
        if missing_members(self.env, LookaheadEnv):
            return False
        (prompts,) = cast(LookaheadEnv, self.env).upcoming(1)
        known = _same_prompts(prompts, self._prompts)
        if not known:
            warn_once(
                logger,
                "upcoming(1) of %s is not the batch that it handed out, so agents roll out one by "
                "one: a wrapper that changes prompts must change those of upcoming too.",
                type(self.env).__name__,
            )
        return known

    def begin(self, agents: Sequence[Agent]) -> list[ReasoningRollout]:
        """A batch for each agent.

        Raises:
            ValueError: If a batch is empty.
        """
        batches = [self._prompts]
        if len(agents) > 1:
            batches = list(cast(LookaheadEnv, self.env).upcoming(len(agents)))
        require(
            all(len(prompts) > 0 for prompts in batches),
            f"{type(self.env).__name__} handed out an empty training batch; it must hold a prompt",
        )
        return [ReasoningRollout(self, prompts) for prompts in batches]

    def collect(self, agent: Agent) -> Experience:
        """Complete the prompts of the batch, a group each, score that, and draw the next batch.

        Args:
            agent: The agent that acts.

        Returns:
            The experience; ``rewards`` is ``(P, G)``.
        """
        (rollout,) = self.begin([agent])
        roll_out(agent, rollout)
        return rollout.finish()

    def score(
        self, prompts: Sequence[ReasoningPrompts], result: ActionResult, generation_seconds: float
    ) -> Experience:
        """Score the completions of the present batch, and draw the next one.

        Raises:
            RuntimeError: If they are of other prompts.
        """
        require(
            _same_prompts(prompts, self._prompts),
            f"{type(self.env).__name__} handed out another batch than upcoming had announced; "
            "make both the same, or leave upcoming out",
            RuntimeError,
        )
        # Read before the step, which moves both on to the next batch.
        questions, answers = list(self.env.questions), list(self.env.answers)
        started = time.perf_counter()
        known = {"action": result} if self._takes_action else {}
        outcome = self.env.step(result.completion_ids, **known)
        seconds = time.perf_counter() - started
        # An environment built with return_raw_completions returns a third element.
        self._prompts, rewards = outcome[0], outcome[1]
        rewards = torch.as_tensor(rewards, dtype=torch.float32)
        named: dict[str, torch.Tensor] = {}
        if self._several_rewards:
            named = dict(cast(SeveralRewardsEnv, self.env).last_rewards)
        completions = self.env.last_completions
        return Experience(
            experiences=(result.completion_ids, result.action_masks, rewards),
            rewards=rewards.detach().cpu(),
            steps=len(result.completion_ids),
            generated_tokens=sum(int(mask.sum()) for mask in result.action_masks),
            generation_seconds=generation_seconds,
            environment_seconds=seconds,
            learn_arguments={"sampling_logps": result.sampling_logps},
            named_rewards=named,
            samples=_first_of_each_group(questions, answers, completions, rewards, named),
        )

    def evaluate(self, agent: Agent) -> np.ndarray:
        """Rewards of the agent on every row of the test split."""
        return agent.test(self.env)

    def facts(self) -> dict[str, Any]:
        """Data, their order, and the position in it."""
        position = self.env.state_dict()
        facts = {name: position[name] for name in _ORDER if name in position}
        facts["data_batch_size_per_gpu"] = getattr(self.env, "data_batch_size_per_gpu", None)
        # The lengths stand for the data of an environment that may hold this process's share only.
        return facts | {name: self._data[name] for name in self._data if name != _LENGTHS}

    def state_dict(self) -> dict[str, Any]:
        """The environment's position in its data, and what identifies these data."""
        return {**self._data, "position": self.env.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position."""
        self.env.load_state_dict(state["position"])
        self._prompts = self.env.reset()


class ReasoningRollout:
    """One batch of prompts, each completed ``group_size`` times."""

    several_turns = False

    def __init__(self, collector: ReasoningCollector, prompts: Sequence[ReasoningPrompts]) -> None:
        self.prompts = self._asked = prompts
        self._collector = collector

    def answer(self, result: ActionResult, seconds: float) -> None:
        """See :class:`agilerl.training.protocols.Rollout`."""
        self._result, self._seconds, self.prompts = result, seconds, []

    def finish(self) -> Experience:
        """See :class:`agilerl.training.protocols.Rollout`."""
        return self._collector.score(self._asked, self._result, self._seconds)


class MultiTurnCollector:
    """Plays one group of episodes per training seed.

    Args:
        env: The collector's own environments.
        order: The training seeds (its rows) and how many groups are played at a time (its
            batches).
    """

    def __init__(self, env: SyncMultiTurnVecEnv, order: TrainingBatchSampler) -> None:
        self.env = env
        self.order = order

    @property
    def num_epochs(self) -> int:
        """Completed passes over the training seeds."""
        return self.order.epoch

    def collect(self, agent: Agent) -> Experience:
        """Play the next seeds, ``agent.group_size`` episodes each.

        Args:
            agent: The agent that plays.

        Returns:
            The experience; ``rewards`` are the episodes' returns, ``(P, G)``.
        """
        (rollout,) = self.begin([agent])
        roll_out(agent, rollout)
        return rollout.finish()

    def can_begin(self, count: int) -> bool:
        """One, because it has one set of environments."""
        return count == 1

    def begin(self, agents: Sequence[Agent]) -> list[EpisodeRollout]:
        """The next seeds, for one agent."""
        (agent,) = agents
        return [EpisodeRollout(self.env, self.order, agent.group_size)]

    def evaluate(self, agent: Agent) -> np.ndarray:
        """Returns of the agent on the evaluation seeds."""
        # The same batches however many seeds the last training batch had.
        self.env.batch_size, self.env.group_size = self.order.batch_size, agent.group_size
        return agent.test(self.env)

    def facts(self) -> dict[str, Any]:
        """The training seeds, their order and the position in it, and the episodes' limits."""
        order = self.order
        return {
            "groups_per_iteration": order.batch_size * order.num_replicas,
            "train_seeds": order.rows,
            "seed": order.seed,
            "epoch": order.epoch,
            "offset": order.offset,
            "max_turns": self.env.max_turns,
            "evaluation_episodes": self.env.evaluation_episodes,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position among the training seeds, and which environments are made already."""
        return {
            "position": {**self.order.state_dict(), "environments": self.env.made_environments()}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Making an environment may draw from the random streams, so those that were made are made
        now, before the streams are restored.
        """
        position = dict(state["position"])
        self.env.make_environments(position.pop("environments", ()))
        self.order.load_state_dict(position)


class EpisodeRollout:
    """The next training seeds, a group of episodes each."""

    several_turns = True

    def __init__(self, env: SyncMultiTurnVecEnv, order: TrainingBatchSampler, group: int) -> None:
        self._env, self._order, self._group, self._seconds = env, order, group, 0.0
        seeds = order.current()
        env.batch_size, env.group_size = len(seeds), group
        self.prompts = env.reset(seeds)

    def answer(self, result: ActionResult, seconds: float) -> None:
        """See :class:`agilerl.training.protocols.Rollout`."""
        self._seconds += seconds
        self.prompts = self._env.step(result.completion_ids, result.sampling_logps)

    def finish(self) -> Experience:
        """See :class:`agilerl.training.protocols.Rollout`."""
        episodes = self._env.episodes()
        self._order.advance()
        learn_arguments: dict[str, Any] = {
            "turn_ids": episodes.turn_ids,
            "sampling_logps": episodes.sampling_logps,
        }
        if len(episodes.trajectory_ids) > len(episodes.turns):
            learn_arguments["trajectory_ids"] = episodes.trajectory_ids
        return Experience(
            experiences=(episodes.token_ids, episodes.action_masks, episodes.rewards),
            rewards=episodes.returns.reshape(-1, self._group),
            steps=int(episodes.turns.sum()),
            generated_tokens=episodes.generated_tokens,
            generation_seconds=self._seconds,
            environment_seconds=episodes.environment_seconds,
            learn_arguments=learn_arguments,
            metrics=_episode_metrics(episodes),
            samples=_first_episodes(episodes, self._group),
        )


def _same_prompts(some: Sequence[ReasoningPrompts], others: Sequence[ReasoningPrompts]) -> bool:
    if some is others:
        return True
    return len(some) == len(others) and all(
        torch.equal(one["input_ids"], other["input_ids"])
        for one, other in zip(some, others, strict=True)
    )


def _data_digest(env: SingleTurnEnv) -> dict[str, str]:
    """What identifies an environment's data, under the name that an error gives it."""
    if not missing_members(env, FingerprintedEnv):
        return {"questions_and_answers": cast(FingerprintedEnv, env).fingerprint()}
    lengths = ",".join(map(str, env.prompt_lengths()))
    return {_LENGTHS: hashlib.sha256(lengths.encode()).hexdigest()[:16]}


def _episode_metrics(episodes: Episodes) -> dict[str, float]:
    return {
        "turns_mean": float(episodes.turns.float().mean()),
        "truncated_share": float(episodes.truncated.float().mean()),
        "failed_episodes": float(episodes.failed.sum()),
    }


def _first_episodes(episodes: Episodes, group_size: int) -> list[Sample]:
    """The first episode of the first groups."""
    firsts = range(0, len(episodes.turns), group_size)
    return [
        Sample(
            question=episodes.first_prompts[i],
            completion=episodes.transcripts[i],
            answer=None,
            reward=float(episodes.returns[i]),
        )
        for i in list(firsts)[:SAMPLES_PER_ITERATION]
    ]


def _first_of_each_group(
    questions: Sequence[str],
    answers: Sequence[Any],
    completions: Sequence[Sequence[str]],
    rewards: torch.Tensor,
    named_rewards: Mapping[str, torch.Tensor],
) -> list[Sample]:
    """The first completion of the first groups: batches are shuffled, so nothing is hand-picked."""
    return [
        Sample(
            question=questions[i],
            completion=completions[i][0],
            answer=answers[i],
            reward=float(rewards[i, 0]),
            rewards={name: _or_none(each[i, 0]) for name, each in named_rewards.items()},
        )
        for i in range(min(SAMPLES_PER_ITERATION, len(questions)))
    ]


def _or_none(reward: torch.Tensor) -> float | None:
    return None if reward.isnan() else float(reward)
