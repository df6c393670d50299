"""Collecting whole episodes of several turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from agilerl.checks import missing_members, require
from agilerl.distributed import Ranks
from agilerl.llm.advantages import credited_turns, varying_groups
from agilerl.llm.batch import stack_rows
from agilerl.llm_envs.dataset import TrainingBatchSampler, with_appended_rows
from agilerl.llm_envs.vector.episodes import Episodes
from agilerl.llm_envs.vector.vector_env import SyncMultiTurnVecEnv
from agilerl.training.collectors.dynamic_sampling import (
    DynamicSampling,
    DynamicSamplingRollout,
)
from agilerl.training.collectors.experience import (
    Experience,
    Sample,
    truncation_statistics,
)
from agilerl.training.collectors.rollouts import roll_out
from agilerl.training.evaluation import WatchedEnv
from agilerl.training.protocols import Agent, CreditAssigningAgent, EvaluationPlan

if TYPE_CHECKING:
    import numpy as np

    from agilerl.typing import ActionResult, Evaluation


class MultiTurnCollector:
    """Plays one group of episodes per training seed.

    Args:
        env: The collector's own environments.
        order: The training seeds (its rows) and how many groups are played at a time (its
            batches).
        sampling: What becomes of groups without variance.
        ranks: The processes that train together: all draw equally many batches.
    """

    unit = "turns"

    def __init__(
        self,
        env: SyncMultiTurnVecEnv,
        order: TrainingBatchSampler,
        sampling: DynamicSampling | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.env = env
        self.order = order
        self.sampling = sampling or DynamicSampling()
        self._ranks = ranks or Ranks()

    @property
    def num_epochs(self) -> int:
        """Completed passes over the training seeds."""
        return self.order.epoch

    @property
    def training_prompts(self) -> None:
        """None: steps are turns, and :attr:`order` begins with the run."""

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

    @property
    def evaluates(self) -> bool:
        """Always: evaluation seeds are never trained on."""
        return True

    def can_begin(self, count: int) -> bool:
        """One, because it has one set of environments."""
        return count == 1

    def begin(self, agents: Sequence[Agent]) -> list[EpisodeRollout]:
        """The next seeds, for one agent."""
        (agent,) = agents
        return [EpisodeRollout(self, agent, self._ranks)]

    def evaluate(self, agent: Agent, plan: EvaluationPlan) -> tuple[np.ndarray, Evaluation]:
        """Returns of the agent on the evaluation seeds."""
        # The same batches however many seeds the last training batch had.
        self.env.batch_size, self.env.group_size = self.order.batch_size, agent.group_size
        env = WatchedEnv(self.env, plan)
        if plan.samples is None:
            return agent.test(env), env.evaluation
        return agent.test(env, loop=plan.samples, samples=1), env.evaluation

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

    def with_appended_rows(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`agilerl.training.protocols.Collector`; the first of more seeds are these."""
        position, rows = state["position"], self.order.rows
        require(
            position["rows"] <= rows,
            f"train_seeds={rows} is less than the {position['rows']} saved; it can be raised only",
        )
        return {**state, "position": with_appended_rows(position, rows)}


class EpisodeRollout(DynamicSamplingRollout):
    """The next training seeds, a group of episodes each; with resampling several batches."""

    several_turns = True

    def __init__(self, collector: MultiTurnCollector, agent: Agent, ranks: Ranks) -> None:
        super().__init__(collector.sampling, ranks)
        self._env, self._order, self._agent = collector.env, collector.order, agent
        self._group = agent.group_size
        self.begin()

    def begin(self) -> None:
        """See :class:`DynamicSamplingRollout`."""
        seeds, self._seconds = self._order.current(), 0.0
        self._env.batch_size, self._env.group_size = len(seeds), self._group
        self.prompts = self._env.reset(seeds)

    def answer(self, result: ActionResult, seconds: float) -> None:
        """See :class:`agilerl.training.protocols.Rollout`."""
        self._seconds += seconds
        self.prompts = self._env.step(result.completion_ids, result.sampling_logps)

    def collected(self) -> Experience:
        """See :class:`DynamicSamplingRollout`."""
        episodes = self._env.episodes()
        self._order.advance()
        learn_arguments: dict[str, Any] = {
            "turn_ids": episodes.turn_ids,
            "sampling_logps": episodes.sampling_logps,
            "truncated": episodes.truncated,
        }
        if len(episodes.trajectory_ids) > len(episodes.turns):
            learn_arguments["trajectory_ids"] = episodes.trajectory_ids
        if not bool(episodes.sample_mask.all()):
            learn_arguments["sample_mask"] = episodes.sample_mask
        return Experience(
            experiences=(episodes.token_ids, episodes.action_masks, episodes.rewards),
            rewards=episodes.returns.reshape(-1, self._group),
            steps=int(episodes.turns.sum()),
            generated_tokens=episodes.generated_tokens,
            generation_seconds=self._seconds,
            environment_seconds=episodes.environment_seconds,
            learn_arguments=learn_arguments,
            metrics=_episode_metrics(episodes),
            sample_mask=episodes.sample_mask.reshape(-1, self._group),
            varying=_varying(episodes, self._agent),
            failed_completions=int(episodes.failed.sum()),
            first_failure=next((reason for reason in episodes.failures if reason is not None), ""),
            max_failure_share=self._env.policy.max_failure_share,
            samples=_samples(episodes),
        )


def _varying(episodes: Episodes, agent: Agent) -> torch.Tensor:
    """``(P,)`` bool: groups that have an advantage with the agent's credit assignment."""
    turns = None
    if not missing_members(agent, CreditAssigningAgent):
        turns = credited_turns(
            episodes.rewards,
            stack_rows(episodes.action_masks, False),
            cast(CreditAssigningAgent, agent).advantage_config(),
            stack_rows(episodes.turn_ids, -1),
            episodes.trajectory_ids,
        )
    return varying_groups(episodes.rewards, agent.group_size, episodes.sample_mask, turns)


def _episode_metrics(episodes: Episodes) -> dict[str, float]:
    """Means over the episodes that are kept; ``{}`` without any."""
    kept = episodes.sample_mask
    if not bool(kept.any()):
        return {}
    return {
        "turns_mean": float(episodes.turns[kept].float().mean()),
        **truncation_statistics(episodes.truncated, kept),
    }


def _samples(episodes: Episodes) -> list[Sample]:
    return [
        Sample(
            question=episodes.first_prompts[i],
            completion=episodes.transcripts[i],
            answer=None,
            reward=float(episodes.returns[i]) if episodes.sample_mask[i] else None,
            failure=episodes.failures[i],
            truncated=bool(episodes.truncated[i]),
        )
        for i in range(len(episodes.failures))
    ]
