"""Types that cross the public API: prompts, actions, experiences and the environments' protocols.

Shape letters, the same everywhere in this package:

``B`` sequences (= P·G) · ``P`` prompts · ``G`` group size · ``T`` tokens of prompt and completion ·
``S = T - 1`` action positions (position ``s`` predicts token ``s + 1``) · ``U`` turns ·
``V`` vocabulary · ``D`` hidden size · ``R`` LoRA rank
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict, runtime_checkable

if TYPE_CHECKING:
    import torch


class ReasoningPrompts(TypedDict):
    """One prompt as environments hand it out and ``get_action`` takes it."""

    input_ids: torch.Tensor
    """``(1, P)`` long; padding, if any, is where ``attention_mask`` is 0."""
    attention_mask: torch.Tensor
    """``(1, P)`` long, 1 on real tokens."""
    text: str
    """The prompt as text, for logs and vLLM."""


@dataclass(frozen=True)
class ActionResult:
    """What ``get_action`` returns. Unpacks into two: ``completion_ids, action_masks = result``.

    For a prompt of 3 tokens, a group of 2 and completions of 2 tokens and 1 token::

        completion_ids[0]  [[5, 6, 7, 8, 2],      action_masks[0]  [[F, F, T, T],
                            [5, 6, 7, 2, 0]]                        [F, F, T, F]]
    """

    completion_ids: list[torch.Tensor]
    """One ``(G, T)`` long tensor per prompt: prompt then completion, right-padded."""
    action_masks: list[torch.Tensor]
    """One ``(G, T - 1)`` bool tensor per prompt: True where position ``s`` predicts a generated
    token, the sampled end-of-sequence token included."""
    sampling_logps: list[torch.Tensor | None] | None = None
    """Log-probs the sampler reported, one 1-D tensor per row (generated tokens only), or None."""
    finish_reasons: list[list[str]] | None = None
    """Per prompt and row: ``"stop"`` (end of sequence, or a stop sequence) or ``"length"``."""

    @property
    def truncated(self) -> torch.Tensor | None:
        """``(P, G)`` bool: completions that were cut off by their length; None if not known."""
        if self.finish_reasons is None:
            return None
        import torch

        return torch.tensor([[each == "length" for each in group] for group in self.finish_reasons])

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return iter((self.completion_ids, self.action_masks))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return (self.completion_ids, self.action_masks)[index]


Act: TypeAlias = Callable[[list[ReasoningPrompts]], ActionResult]
"""From prompts to answers: ``lambda prompts: agent.get_action(prompts, training=False)``."""


@dataclass(frozen=True)
class Evaluation:
    """What ``evaluate`` of an environment returns: N answers or episodes, in the order played.

    Those that failed and were dropped are none of the N.

    Two test rows of a single-turn environment::

        rewards      [1.0, 0.0]
        questions    ["2+2?", "3+1?"]
        answers      ["4", "4"]
        completions  ["4", "31"]
    """

    rewards: torch.Tensor
    """``(N,)`` float32 on the CPU: the reward of each answer, or the return of each episode."""
    questions: list[str] = field(default_factory=list)
    """The question of each, or the text of the first prompt; for logs, like all that follows."""
    answers: list[Any] = field(default_factory=list)
    """The reference answer of each, where there are any."""
    completions: list[str] = field(default_factory=list)
    """What the model answered, or the transcript of the episode."""
    failures: list[str] = field(default_factory=list)
    """Why answers failed to be scored, or episodes to be played; those that were dropped for it
    have no entry above, so that there may be fewer of them than rows."""
    failure_limit: float = math.inf
    """How many may fail; with several processes, the sum of theirs."""
    rows: list[int] = field(default_factory=list)
    """Which row, or seed, of the held-out data each answers: several answers of one have the same
    number."""
    sets: list[str] = field(default_factory=list)
    """The name of the test set of each, where test sets have names."""
    final_answers: list[str | None] = field(default_factory=list)
    """What each gives as its answer, as text, where the environment can tell; None: nothing."""


TensorRows: TypeAlias = "Sequence[torch.Tensor] | torch.Tensor"
ExperiencesType: TypeAlias = tuple[TensorRows, TensorRows, Any]
"""``(completion_ids, action_masks, rewards)``; rewards ``(P, G)``, ``(B,)`` or ``(B, U)``."""


Message: TypeAlias = Mapping[str, Any]
"""A ``role``, a ``content`` (text), and whatever else a chat template reads, such as ``name``."""
Observation: TypeAlias = "str | Sequence[Message]"
"""What an environment says: a user message, or a list of messages."""
TextReset: TypeAlias = "tuple[Observation, dict[str, Any]]"
TextStep: TypeAlias = "tuple[Observation, float, bool, bool, dict[str, Any]]"


@runtime_checkable
class TextEnv(Protocol):
    """A text environment in Gymnasium style: text (or messages) out, text in.

    Both methods may be ``async``. An attribute ``tool_schemas``, where there is one, has the JSON
    schemas of the tools that the chat template shows.
    """

    def reset(self, seed: int | None = None) -> TextReset | Awaitable[TextReset]: ...

    def step(self, action: str) -> TextStep | Awaitable[TextStep]: ...


@runtime_checkable
class MultiTurnEnv(Protocol):
    """A tokenised multi-turn episode, such as ``TokenObservationWrapper``.

    Attributes that are read where an environment has them: ``transcript`` (the episode as text, for
    logs), ``max_model_len`` and ``pad_id`` (an answer that is longer than the former, the padding
    of the latter not counted, is refused), ``max_output_tokens`` (training fills both lengths in
    where they are None).
    """

    def reset(self, seed: int | None = None) -> tuple[ReasoningPrompts, dict[str, Any]]: ...

    def step(
        self, full_completion_ids: torch.Tensor
    ) -> tuple[ReasoningPrompts, float, bool, bool, dict[str, Any]]: ...

    def get_episode_data(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def close(self) -> None: ...


@runtime_checkable
class EvaluableEnv(Protocol):
    """An environment that ``agent.test`` takes: it plays its own held-out data."""

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
        """Answer the held-out data (or play the held-out seeds) ``loop`` times.

        The same data in the same order at every call, whoever acts; with several processes, this
        process's share of them.
        """
        ...
