"""What the loop asks of agents, environments and collectors, and the records that cross."""

# ruff: noqa: D102  the class docstring says what the one-line methods are

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch

    from agilerl.llm.config import SamplingConfig
    from agilerl.typing import Act, ActionResult, Evaluation, ExperiencesType


Row: TypeAlias = "dict[str, float]"
"""One agent's numbers of one iteration; ``iteration``, ``agent`` and ``steps`` are always there."""


class Agent(Protocol):
    """A population member, such as ``GRPO``: what the loop uses of it."""

    @property
    def algo(self) -> str: ...

    @property
    def index(self) -> int: ...

    fitness: list[float]
    scores: list[float]
    steps: list[int]
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
    ) -> dict[str, float]: ...

    def test(self, env: Any) -> np.ndarray: ...

    def sampling_config(self, training: bool = True) -> SamplingConfig: ...

    def set_reference_policy(self, reference_update_tracker: int) -> None: ...

    def save_checkpoint(
        self, path: str | Path, lora_only: bool = True, save_optimizer: bool = True
    ) -> None: ...


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


@dataclass(frozen=True)
class Sample:
    """One completion for ``completions.jsonl``."""

    question: str
    completion: str
    answer: Any
    reward: float


@dataclass(frozen=True)
class Experience:
    """What one agent collected for one ``learn`` call.

    Two prompts in groups of two, three of the four completions right::

        rewards           [[1.0, 0.0], [1.0, 1.0]]
        steps             2
        generated_tokens  40
    """

    experiences: ExperiencesType
    """First argument of ``learn``."""
    rewards: torch.Tensor
    """``(P, G)`` float32 on the CPU: one reward per completion, one row per group."""
    steps: int
    """What ``max_steps`` counts: prompts consumed, or turns played."""
    generated_tokens: int
    """Tokens sampled, end-of-sequence tokens included."""
    generation_seconds: float
    environment_seconds: float
    learn_arguments: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of ``learn``."""
    facts: dict[str, float] = field(default_factory=dict)
    """Further columns of the iteration's row."""
    samples: list[Sample] = field(default_factory=list)
    """A few completions to read."""


class Collector(Protocol):
    """How experiences come about. The only thing in which training functions differ."""

    @property
    def num_epochs(self) -> int:
        """Completed passes over the training data."""

    def collect(self, agent: Agent) -> Experience:
        """Let the agent act once in the training environment."""

    def evaluate(self, agent: Agent) -> np.ndarray:
        """Rewards of the whole evaluation, one per row; appends their mean to ``agent.fitness``."""

    def state_dict(self) -> dict[str, Any]:
        """For run checkpoints: ``position`` in the data, facts about these data; plain JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position in what :meth:`state_dict` gave."""
