"""What decides how much memory a training step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig

from agilerl.checks import COUNT, OPTIONAL_COUNT
from agilerl.llm.config import RowLayout
from agilerl.llm.generation.batching import DEFAULT_CHUNK_ROWS


@dataclass(frozen=True)
class MemorySettings:
    """The sizes of a training step of one process; named and preset as an agent's arguments.

    Raises:
        TypeError: If a size is no integer.
        ValueError: If a size is not positive, or ``completion_tokens`` is empty.
    """

    prompt_tokens: int
    """Of the longest prompt."""
    completion_tokens: int | Sequence[int]
    """Of the longest completion; or of every completion of a rollout, those of a prompt side by
    side."""
    prompts: int | None = None
    """Prompts of one ``get_action``; None: those of one optimizer step, ``batch_size`` by
    ``group_size``. With several completion lengths it must be None: these say."""
    group_size: int = 8
    batch_size: int = 16
    micro_batch_size_per_gpu: int | None = None
    micro_batch_tokens: int | None = None
    """Where it is given, ``micro_batch_size_per_gpu`` does not count."""
    hf_generate_chunk_size: int | None = None
    lora_config: LoraConfig | None = None
    dtype: torch.dtype | None = None
    """Of the base; None: the model's own, or what its config says."""
    device: str = "cpu"
    """Decides the size of logit tiles."""
    gradient_checkpointing: bool = True
    use_separate_reference_adapter: bool = True
    cast_logprobs_to_fp32: bool = True
    fused_logprobs_chunk_rows: int | None = None
    entropy_coef: float = 0.0
    optimizer: object = "adamw"
    """``"adamw"`` or ``"adamw_8bit"``; a function counts as AdamW."""
    top_k: int | None = 50
    use_vllm: bool = False
    """Then completions are generated elsewhere, and a rollout takes nothing here."""
    layout: RowLayout | None = None
    """How training rows are laid out, see :mod:`agilerl.llm.forward`; None: ``"packed"``, but
    off a CPU ``"shared_prompts"`` where the base is not in float16 or bfloat16, or has a sliding
    window. On a base that is partitioned or compiled it is ``"padded"``."""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "group_size", "batch_size"):
            COUNT(name, getattr(self, name))
        for name in (
            "prompts",
            "micro_batch_size_per_gpu",
            "micro_batch_tokens",
            "hf_generate_chunk_size",
            "fused_logprobs_chunk_rows",
        ):
            OPTIONAL_COUNT(name, getattr(self, name))
        several = not isinstance(self.completion_tokens, int)
        if several and (not len(self.completion_lengths) or self.prompts is not None):
            raise ValueError(
                f"completion_tokens is {self.completion_tokens!r} and prompts is {self.prompts}; "
                "give the length of every completion without prompts, or one length"
            )
        for length in self.completion_lengths:
            COUNT("completion_tokens", length)

    @property
    def completion_lengths(self) -> tuple[int, ...]:
        """Of every completion of a rollout."""
        if not isinstance(self.completion_tokens, int):
            return tuple(self.completion_tokens)
        prompts = self.prompts or max(1, self.batch_size // self.group_size)
        return (self.completion_tokens,) * (prompts * self.group_size)

    @property
    def chunk_prompts(self) -> int:
        """Prompts that are generated at a time."""
        prompts = -(-len(self.completion_lengths) // self.group_size)
        preset = max(1, DEFAULT_CHUNK_ROWS // self.group_size)
        return min(self.hf_generate_chunk_size or preset, prompts)

    @property
    def micro_batch_size(self) -> int:
        """Rows of a forward and backward."""
        if self.micro_batch_tokens is not None:
            return len(self.micro_batch)
        rows = min(self.batch_size, len(self.completion_lengths))
        return min(self.micro_batch_size_per_gpu or rows, rows)

    @property
    def micro_batch(self) -> tuple[int, ...]:
        """The completion lengths of the micro-batch with most tokens."""
        lengths = self.completion_lengths
        if self.micro_batch_tokens is not None:
            return max(self._cut_by_tokens(self.micro_batch_tokens), key=self.tokens_run)
        size = self.micro_batch_size
        return max((lengths[i : i + size] for i in range(0, len(lengths), size)), key=sum)

    def _cut_by_tokens(self, limit: int) -> list[tuple[int, ...]]:
        """Completion lengths in micro-batches; a row with more tokens than ``limit`` is alone."""
        lengths, parts = self.completion_lengths, list[tuple[int, ...]]()
        part: tuple[int, ...] = ()
        for length in sorted(lengths) if self.layout == "padded" else lengths:
            longer = (*part, length)
            if part and (self.tokens_run(longer) > limit or len(part) == self.batch_size):
                parts.append(part)
                longer = (length,)
            part = longer
        return [*parts, part]

    def tokens_run(self, lengths: Sequence[int]) -> int:
        """Tokens of a forward over rows side by side: padded, or each prompt once.

        Args:
            lengths: Of their completions.
        """
        if self.layout == "padded":
            return len(lengths) * (self.prompt_tokens + max(lengths) - 1)
        prompts = -(-len(lengths) // self.group_size)
        return prompts * self.prompt_tokens + sum(lengths) - len(lengths)

    @property
    def micro_batch_prompts(self) -> int:
        """The distinct prompts of a micro-batch."""
        return -(-self.micro_batch_size // self.group_size)
