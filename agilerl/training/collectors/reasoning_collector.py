"""Collecting from a ``ReasoningGym``: a group of completions of each prompt."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from agilerl.checks import missing_members, require, warn_once
from agilerl.distributed import Ranks
from agilerl.llm_envs.completion_checks import takes_action
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
from agilerl.training.protocols import (
    Agent,
    AppendableEnv,
    EvaluationPlan,
    FailureBoundEnv,
    FailureReportingEnv,
    FingerprintedEnv,
    HeldOutEnv,
    LookaheadEnv,
    SeveralRewardsEnv,
    SingleTurnEnv,
)

if TYPE_CHECKING:
    import numpy as np

    from agilerl.typing import ActionResult, Evaluation, ReasoningPrompts

logger = logging.getLogger(__name__)

_ORDER = ("rows", "seed", "epoch", "offset", "segments")
"""Keys of an environment's ``state_dict()`` that, if present, are the same in every process."""
_LENGTHS = "prompt_lengths"
_FINGERPRINT = "questions_and_answers"


class ReasoningCollector:
    """Collects from a ``ReasoningGym``; may be shared, each ``collect`` consumes the next batch.

    Args:
        env: The environment. Its next training batch is drawn at once. A resumed run recognises
            its data by ``env.fingerprint()``, or without that method by the prompts' lengths.
        sampling: What becomes of groups without variance.
        ranks: The processes that train together: all draw equally many batches.
    """

    unit = "prompts"

    def __init__(
        self,
        env: SingleTurnEnv,
        sampling: DynamicSampling | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.env = env
        self.sampling = sampling or DynamicSampling()
        self._ranks = ranks or Ranks()
        self._prompts = env.reset()
        self._data = _data_digest(env)
        self._takes_action = takes_action(env.step)
        self._several_rewards = not missing_members(env, SeveralRewardsEnv)
        self._reports_failures = not missing_members(env, FailureReportingEnv)
        self._max_failure_share = 1.0
        if not missing_members(env, FailureBoundEnv):
            self._max_failure_share = cast(FailureBoundEnv, env).max_failure_share

    @property
    def num_epochs(self) -> int:
        """Completed passes over the training rows."""
        return self.env.num_epochs

    @property
    def training_prompts(self) -> int | None:
        """How many there are; None if the environment cannot say, as with a stream of rows."""
        try:
            return len(self.env)
        except TypeError:
            return None

    @property
    def evaluates(self) -> bool:
        """Whether the environment has test rows."""
        lacks_it = missing_members(self.env, HeldOutEnv)
        return bool(lacks_it) or cast(HeldOutEnv, self.env).has_test_rows

    def can_begin(self, count: int) -> bool:
        """More than one where the environment knows its next batches, and each agent draws one."""
        if count == 1:
            return True
        if self.sampling.zero_variance == "resample" or missing_members(self.env, LookaheadEnv):
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
        self._require_prompts(batches)
        return [ReasoningRollout(self, prompts, self._ranks) for prompts in batches]

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
        failures, sample_mask = self._failures(rewards)
        learn_arguments: dict[str, Any] = {"sampling_logps": result.sampling_logps}
        if not bool(sample_mask.all()):
            learn_arguments["sample_mask"] = sample_mask
        truncated = result.truncated
        if truncated is not None:
            learn_arguments["truncated"] = truncated
        completions = self.env.last_completions
        return Experience(
            experiences=(result.completion_ids, result.action_masks, rewards),
            rewards=rewards.detach().cpu(),
            steps=len(result.completion_ids),
            generated_tokens=sum(int(mask.sum()) for mask in result.action_masks),
            generation_seconds=generation_seconds,
            environment_seconds=seconds,
            learn_arguments=learn_arguments,
            metrics=truncation_statistics(truncated, sample_mask),
            named_rewards=named,
            sample_mask=sample_mask,
            failed_completions=sum(reason is not None for reason in failures),
            first_failure=next((reason for reason in failures if reason is not None), ""),
            max_failure_share=self._max_failure_share,
            samples=[
                Sample(
                    question=questions[p],
                    completion=completions[p][g],
                    answer=answers[p],
                    reward=float(rewards[p, g]) if sample_mask[p, g] else None,
                    rewards={name: _or_none(each[p, g]) for name, each in named.items()},
                    failure=failures[p * rewards.shape[1] + g],
                    truncated=truncated is not None and bool(truncated[p, g]),
                )
                for p in range(rewards.shape[0])
                for g in range(rewards.shape[1])
            ],
        )

    def pending(self) -> Sequence[ReasoningPrompts]:
        """The prompts of the next batch.

        Raises:
            ValueError: If it is empty.
        """
        self._require_prompts([self._prompts])
        return self._prompts

    def _require_prompts(self, batches: Sequence[Sequence[ReasoningPrompts]]) -> None:
        require(
            all(len(prompts) > 0 for prompts in batches),
            f"{type(self.env).__name__} handed out an empty training batch; it must hold a prompt",
        )

    def _failures(self, rewards: torch.Tensor) -> tuple[list[str | None], torch.Tensor]:
        """Why each of ``P·G`` completions failed, one after the other, and which are kept.

        An environment whose class has the attributes reports nothing where its own ``step`` has
        left them unset.
        """
        failures: list[str | None] = [None] * rewards.numel()
        kept = torch.ones(rewards.shape, dtype=torch.bool)
        if self._reports_failures:
            env = cast(FailureReportingEnv, self.env)
            reported = [reason for group in env.last_failures for reason in group]
            failures = reported if len(reported) == len(failures) else failures
            mask = env.last_sample_mask
            kept = mask.cpu() if mask is not None and mask.shape == kept.shape else kept
        return failures, kept

    def evaluate(self, agent: Agent, plan: EvaluationPlan) -> tuple[np.ndarray, Evaluation]:
        """Rewards of the agent on the rows of the test split."""
        # Environments of the user need not know of these.
        chosen = {} if plan.rows is None else {"rows": plan.rows}
        if plan.samples is None:
            env = WatchedEnv(self.env, plan, **chosen)
            return agent.test(env), env.evaluation
        env = WatchedEnv(self.env, plan, samples=plan.samples, **chosen)
        return agent.test(env, samples=plan.samples), env.evaluation

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

    def with_appended_rows(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`agilerl.training.protocols.Collector`."""
        if self._data.items() <= state.items():
            return dict(state)
        lacking = missing_members(self.env, AppendableEnv)
        require(
            not lacking and _FINGERPRINT in state,
            f"a {type(self.env).__name__} cannot tell whether its rows begin with the saved ones: "
            f"it lacks {' and '.join(lacking) or 'what it was saved with'}",
        )
        env = cast(AppendableEnv, self.env)
        position = env.with_appended_rows(state["position"], state[_FINGERPRINT])
        return {**state, **self._data, "position": position}


class ReasoningRollout(DynamicSamplingRollout):
    """A batch of prompts, or several with resampling, each completed ``group_size`` times."""

    several_turns = False

    def __init__(
        self, collector: ReasoningCollector, prompts: Sequence[ReasoningPrompts], ranks: Ranks
    ) -> None:
        super().__init__(collector.sampling, ranks)
        self.prompts = self._asked = prompts
        self._collector = collector

    def answer(self, result: ActionResult, seconds: float) -> None:
        """See :class:`agilerl.training.protocols.Rollout`."""
        self._result, self._seconds, self.prompts = result, seconds, []

    def collected(self) -> Experience:
        """See :class:`DynamicSamplingRollout`."""
        return self._collector.score(self._asked, self._result, self._seconds)

    def begin(self) -> None:
        """See :class:`DynamicSamplingRollout`."""
        self.prompts = self._asked = self._collector.pending()


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
        return {_FINGERPRINT: cast(FingerprintedEnv, env).fingerprint()}
    lengths = ",".join(map(str, env.prompt_lengths()))
    return {_LENGTHS: hashlib.sha256(lengths.encode()).hexdigest()[:16]}


def _or_none(reward: torch.Tensor) -> float | None:
    return None if reward.isnan() else float(reward)
