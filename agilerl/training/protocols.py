"""What the training loop asks of agents, environments and collectors."""

# ruff: noqa: D102  the class docstring says what the one-line methods are

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard

from agilerl.checks import missing_members

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch

    from agilerl.llm.config import AdvantageConfig, SamplingConfig
    from agilerl.training.collectors.experience import Experience
    from agilerl.typing import Act, ActionResult, Evaluation, ExperiencesType


Row: TypeAlias = "dict[str, float]"
"""One agent's numbers of one iteration; ``iteration``, ``agent`` and ``steps`` are always there."""


class Engine(Protocol):
    """Runs an agent's optimizer."""

    @property
    def sharded(self) -> bool:
        """Whether every process holds, and saves, a shard of the optimizer's state."""


class Agent(Protocol):
    """A population member, such as ``GRPO``: what the loop uses of it."""

    @property
    def algo(self) -> str: ...

    @property
    def index(self) -> int: ...

    @property
    def engine(self) -> Engine: ...

    accelerator: Any
    fitness: list[float]
    scores: list[float]
    steps: list[int]
    total_steps: int
    last_checkpoint: str | None
    group_size: int

    def rollout(self) -> AbstractContextManager[Any]: ...

    def get_action(
        self, obs: Any, training: bool = True, repeat_prompts: bool = True
    ) -> ActionResult: ...

    def learn(
        self,
        experiences: ExperiencesType,
        turn_ids: Any = None,
        sampling_logps: Any = None,
        *,
        trajectory_ids: Any = None,
        sample_mask: Any = None,
        truncated: Any = None,
    ) -> dict[str, float]: ...

    def test(self, env: Any, loop: int = 1, *, samples: int | None = None) -> np.ndarray: ...

    def sampling_config(self, training: bool = True) -> SamplingConfig: ...

    def set_reference_policy(self, reference_update_tracker: int) -> None: ...

    def saved_arguments(self) -> dict[str, Any]: ...

    def save_checkpoint(
        self, path: str | Path, lora_only: bool = True, save_optimizer: bool = True
    ) -> None: ...


class CreditAssigningAgent(Protocol):
    """One that says how it makes advantages of rewards; others do so per trajectory."""

    def advantage_config(self) -> AdvantageConfig: ...


class SingleTurnEnv(Protocol):
    """A dataset environment, such as ``ReasoningGym``."""

    @property
    def name(self) -> str: ...

    @property
    def num_epochs(self) -> int: ...

    @property
    def questions(self) -> Sequence[str]: ...

    @property
    def answers(self) -> Sequence[Any]: ...

    @property
    def last_completions(self) -> list[list[str]]: ...

    def prompt_lengths(self) -> Sequence[int]: ...

    def reset(self) -> Any: ...

    def step(self, completion_ids: Any) -> Any: ...

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def __len__(self) -> int: ...


class FingerprintedEnv(SingleTurnEnv, Protocol):
    """An environment that can identify its data."""

    def fingerprint(self) -> str: ...


class AppendableEnv(FingerprintedEnv, Protocol):
    """One that can tell whether its training rows begin with those of an earlier run.

    Its positions have their number as ``rows``.
    """

    def with_appended_rows(self, state: Mapping[str, Any], fingerprint: str) -> dict[str, Any]: ...


class TokenizingEnv(Protocol):
    """One that shows the tokenizer whose padding it takes off completions."""

    @property
    def tokenizer(self) -> Any: ...


class LookaheadEnv(SingleTurnEnv, Protocol):
    """An environment that knows its next batches before the present one is scored."""

    def upcoming(self, count: int) -> Sequence[Any]: ...


class SeveralRewardsEnv(SingleTurnEnv, Protocol):
    """An environment that says what its rewards are made of."""

    @property
    def last_rewards(self) -> Mapping[str, torch.Tensor]: ...


class HeldOutEnv(SingleTurnEnv, Protocol):
    """An environment that says whether it can be evaluated; others can."""

    @property
    def has_test_rows(self) -> bool: ...


class FailureReportingEnv(SingleTurnEnv, Protocol):
    """An environment that says which completions failed, and which of them it drops."""

    @property
    def last_failures(self) -> Sequence[Sequence[str | None]]: ...

    @property
    def last_sample_mask(self) -> torch.Tensor | None: ...


class FailureBoundEnv(FailureReportingEnv, Protocol):
    """One with a largest share of a step's completions, of all processes, that may fail."""

    @property
    def max_failure_share(self) -> float: ...


class DistributedEnv(SingleTurnEnv, Protocol):
    """One that divides its rows among processes."""

    @property
    def num_processes(self) -> int: ...


@dataclass(frozen=True)
class EvaluationPlan:
    """How an agent is to be evaluated."""

    before_answers: Callable[[], None]
    """Called each time before it answers; raises ``EvaluationStopped`` to stop."""
    rows: int | None = None
    """Rows of each test set; None: all."""
    samples: int | None = None
    """Answers sampled per row; None: one, greedily."""


class Collector(Protocol):
    """Collects experiences. The only thing in which the training functions differ."""

    unit: str
    """What is counted as steps: ``"prompts"`` or ``"turns"``."""

    @property
    def num_epochs(self) -> int:
        """Completed passes over the training data."""

    @property
    def training_prompts(self) -> int | None:
        """Prompts of one pass, where these are what is counted as steps and their number is known.

        Otherwise None.
        """

    @property
    def evaluates(self) -> bool:
        """Whether there is held-out data."""

    def collect(self, agent: Agent) -> Experience:
        """Let the agent act once in the training environment."""

    def evaluate(self, agent: Agent, plan: EvaluationPlan) -> tuple[np.ndarray, Evaluation]:
        """Evaluate an agent, which appends the result to its ``fitness`` and ``steps``.

        Args:
            agent: Who is evaluated.
            plan: How.

        Returns:
            The rewards of all ranks, one per answer, and this rank's evaluation.
        """

    def facts(self) -> dict[str, Any]:
        """Options and data that have to be the same in all processes, by the user's names."""

    def state_dict(self) -> dict[str, Any]:
        """For run checkpoints: ``position`` in the data, what identifies these data; plain JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position in what :meth:`state_dict` gave."""

    def with_appended_rows(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What :meth:`state_dict` gave with fewer training rows, as of the data that are here.

        The same if they are the same.

        Raises:
            ValueError: If these data are not those with rows appended.
        """


class Rollout(Protocol):
    """What one agent does in the training environment before its next ``learn``."""

    several_turns: bool
    """Whether prompts may continue earlier ones, and each is to be answered once."""

    @property
    def prompts(self) -> Sequence[Any]:
        """To be answered next; empty when it is over."""

    def answer(self, result: ActionResult, seconds: float) -> None:
        """Take the answers, which took ``seconds`` to generate."""

    def draw_again(self) -> bool:
        """Whether there is a further batch of prompts, which are next.

        To be asked once all prompts are answered, outside of the agent's ``rollout()``. A
        collective: of several rollouts every process asks in the same order.
        """

    def finish(self) -> Experience:
        """Score what is not scored yet, and move on in the data."""


class JointCollector(Collector, Protocol):
    """One that can begin several rollouts before the first is over."""

    def can_begin(self, count: int) -> bool:
        """Whether it can begin as many."""

    def begin(self, agents: Sequence[Agent]) -> Sequence[Rollout]:
        """Rollouts for some agents, on successive data; to be finished in this order."""


def is_joint_collector(collector: Collector) -> TypeGuard[JointCollector]:
    """Whether a collector can do that."""
    return not missing_members(collector, JointCollector)
