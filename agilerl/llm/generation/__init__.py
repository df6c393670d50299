"""Generation: token ids in, token ids (and the sampler's log-probs, where it reports them) out."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import torch

from agilerl.llm.config import SamplingConfig

if TYPE_CHECKING:
    from agilerl.llm.policy import Policy


@dataclass(frozen=True)
class Completions:
    """``samples_per_prompt`` completions of each prompt, prompt by prompt."""

    token_ids: list[torch.Tensor]
    """One 1-D long tensor per completion: no prompt, the sampled end-of-sequence token included."""
    logps: list[torch.Tensor] | None = None
    """One 1-D float32 tensor per completion, or None where the sampler reports none: each token's
    log-prob under the temperature-scaled distribution, before penalties and filters."""


@dataclass(frozen=True)
class GenerationRequest:
    """The arguments of one :meth:`Generator.generate`."""

    prompts: Sequence[torch.Tensor]
    samples_per_prompt: int
    sampling: SamplingConfig
    rng: torch.Generator


@dataclass(frozen=True)
class JointLimits:
    """With which other generators one can generate in the same calls."""

    key: Hashable
    """Equal among these."""
    max_rows: int | None
    """Most completions of all of them at a time; None: as many as they like."""


def new_token_limit(prompt: torch.Tensor, sampling: SamplingConfig) -> int:
    """Most tokens a prompt may be completed by.

    Raises:
        ValueError: If there is no room for a single one.
    """
    room = sampling.max_model_len - len(prompt)
    if room < 1 or len(prompt) == 0:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens leaves no room for output within max_model_len "
            f"{sampling.max_model_len}: raise max_model_len, or filter prompts (ReasoningGym's "
            "max_context_length)"
        )
    return room if sampling.max_new_tokens is None else min(room, sampling.max_new_tokens)


class Generator(Protocol):
    """What an agent needs to roll out; knows nothing of rewards or agents."""

    @property
    def differs_from_trainer(self) -> bool:
        """Whether sampling and training compute log-probs by different code.

        Then an importance-sampling correction has something to correct, and the agent asks for
        log-probs (``SamplingConfig.return_logps``).
        """
        ...

    def sync(self, policy: Policy) -> None:
        """Generate with the policy's current weights and role from now on.

        Called before every rollout, so it must be cheap where nothing has changed.
        """
        ...

    def session(self) -> AbstractContextManager[None]:
        """Several calls of :meth:`generate` with the same weights; may be nested.

        Within it a prompt that starts with an earlier prompt and its completion may be completed
        without running that part again. Completions are the same, beyond rounding. Leaving it frees
        what was cached.
        """
        ...

    def generate(
        self,
        prompts: Sequence[torch.Tensor],
        samples_per_prompt: int,
        sampling: SamplingConfig,
        rng: torch.Generator,
    ) -> Completions:
        """Complete 1-D ``prompts``; all randomness comes from ``rng``."""
        ...

    def joint_limits(self, sampling: SamplingConfig, samples_per_prompt: int) -> JointLimits | None:
        """With which generators this one can share calls; None: with none.

        Args:
            sampling: How it would sample.
            samples_per_prompt: How often each prompt would be completed.
        """
        ...

    def join(self, others: Sequence[Self]) -> JointGenerator:
        """A generator for this one's and others' policies, whose limits have the same key."""
        ...

    def close(self) -> None:
        """Free what the generator holds; it is not used again."""
        ...


class JointGenerator(Protocol):
    """Generates for several policies in one call; their generators are synced."""

    def session(self) -> AbstractContextManager[None]:
        """Several calls with the same weights, as :meth:`Generator.session`; not nested."""
        ...

    def generate(self, requests: Mapping[int, GenerationRequest]) -> dict[int, Completions]:
        """Complete requests, by the number of the generator that each is for.

        Each gets the completions that its own generator would have made of it, beyond rounding.
        """
        ...
