"""Collecting whole episodes of several turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agilerl.checks import require
from agilerl.llm_envs.dataset import TrainingBatchSampler, with_appended_rows
from agilerl.llm_envs.vector.episodes import Episodes
from agilerl.llm_envs.vector.vector_env import SyncMultiTurnVecEnv
from agilerl.training.collectors.experience import (
    Experience,
    Sample,
    truncation_statistics,
)
from agilerl.training.collectors.rollouts import roll_out
from agilerl.training.evaluation import WatchedEnv
from agilerl.training.protocols import Agent, EvaluationPlan

if TYPE_CHECKING:
    import numpy as np

    from agilerl.typing import ActionResult, Evaluation


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
        return [EpisodeRollout(self.env, self.order, agent.group_size)]

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
            f"train_seeds is {rows}, and was {position['rows']}; it can be raised, not lowered",
        )
        return {**state, "position": with_appended_rows(position, rows)}


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
            failed_completions=int(episodes.failed.sum()),
            first_failure=next((reason for reason in episodes.failures if reason is not None), ""),
            max_failure_share=self._env.policy.max_failure_share,
            samples=_samples(episodes),
        )


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
