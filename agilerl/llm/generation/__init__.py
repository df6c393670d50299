"""Generation: token ids in, token ids (and the sampler's log-probs, where it reports them) out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from agilerl.llm.config import SamplingConfig


@dataclass(frozen=True)
class Completions:
    """``samples_per_prompt`` completions of each prompt, prompt by prompt."""

    token_ids: list[torch.Tensor]
    """One 1-D long tensor per completion: no prompt, the sampled end-of-sequence token included."""
    logps: list[torch.Tensor] | None = None
    """One 1-D float32 tensor per completion, or None where the sampler reports none: each token's
    log-prob under the temperature-scaled distribution, before penalties and filters."""


class Generator(Protocol):
    """What an agent needs to roll out; knows nothing of rewards or agents."""

    def generate(
        self,
        prompts: Sequence[torch.Tensor],
        samples_per_prompt: int,
        sampling: SamplingConfig,
        rng: torch.Generator,
    ) -> Completions:
        """Complete 1-D ``prompts``; all randomness comes from ``rng``."""
        ...

    def conversations(self) -> AbstractContextManager[None]:
        """Within it prompts may continue rows generated before, and weights do not change.

        A prompt that starts with an earlier prompt and its completion (all but the last token
        suffice) may then be completed without running that part again. Completions are the same,
        beyond rounding. Leaving it frees what was kept.
        """
        ...
