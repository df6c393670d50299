"""What decides how much memory a training step takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from peft import LoraConfig

from agilerl.checks import (
    COUNT,
    FLAG,
    OPTIONAL_COUNT,
    InstanceOf,
    Number,
    OneOf,
    as_device,
    require,
    shorten,
)
from agilerl.llm.config import ROW_LAYOUTS, RowLayout
from agilerl.llm.engine.optimizers import check_optimizer
from agilerl.llm.generation.batching import DEFAULT_CHUNK_ROWS


def check_micro_batch_unit(rows: int | str | None, tokens: int | None) -> None:
    """Refuse micro-batches that are counted in sequences and in tokens.

    Args:
        rows: ``micro_batch_size_per_gpu``.
        tokens: ``micro_batch_tokens``.
    """
    require(
        rows is None or tokens is None,
        f"micro_batch_size_per_gpu is {rows!r} and micro_batch_tokens is {tokens}; a micro-batch "
        "is counted in sequences or in tokens: leave one of them at None",
    )


def _check_completion_tokens(name: str, value: Any) -> None:
    """Refuse what is neither a length nor a list of lengths."""
    remedy = "it must be an integer, or a list with the length of every completion"
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    require(
        several or isinstance(value, Integral),
        f"{name} is {shorten(value)}; {remedy}",
        TypeError,
    )
    require(not several or len(value) > 0, f"{name} is {value!r}; {remedy}")
    for length in value if several else (value,):
        COUNT(name, length)


def _check_dtype(name: str, value: Any) -> None:
    """Refuse what is no floating point dtype of torch."""
    InstanceOf(torch.dtype, "a torch.dtype, such as torch.bfloat16,")(name, value)
    require(
        value is None or value.is_floating_point,
        f"{name} is {value}; it must be a floating point dtype, such as torch.bfloat16, or None",
    )


# Those of an agent's arguments; but a GPU need not be there, nor bitsandbytes.
_RULES: Mapping[str, Callable[[str, Any], object]] = {
    "prompt_tokens": COUNT,
    "completion_tokens": _check_completion_tokens,
    "prompts": OPTIONAL_COUNT,
    "group_size": COUNT,
    "batch_size": COUNT,
    "micro_batch_size_per_gpu": OPTIONAL_COUNT,
    "micro_batch_tokens": OPTIONAL_COUNT,
    "hf_generate_chunk_size": OPTIONAL_COUNT,
    "lora_config": InstanceOf(LoraConfig, "a peft.LoraConfig"),
    "dtype": _check_dtype,
    "device": as_device,
    "gradient_checkpointing": FLAG,
    "use_separate_reference_adapter": FLAG,
    "cast_logprobs_to_fp32": FLAG,
    "fused_logprobs_chunk_rows": OPTIONAL_COUNT,
    "entropy_coef": Number(0),
    "optimizer": check_optimizer,
    "top_k": Number(0, integer=True, optional=True),
    "use_vllm": FLAG,
    "layout": OneOf((None, *ROW_LAYOUTS)),
}


@dataclass(frozen=True)
class MemorySettings:
    """The sizes of a training step of one process; named and preset as an agent's arguments.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If it is out of range, or two contradict each other.
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
    """In place of ``micro_batch_size_per_gpu``."""
    hf_generate_chunk_size: int | None = None
    lora_config: LoraConfig | None = None
    dtype: torch.dtype | None = None
    """Of the base; None: the model's own, or what its config says."""
    device: str | torch.device = "cpu"
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
        for name, rule in _RULES.items():
            rule(name, getattr(self, name))
        check_micro_batch_unit(self.micro_batch_size_per_gpu, self.micro_batch_tokens)
        require(
            isinstance(self.completion_tokens, Integral) or self.prompts is None,
            f"completion_tokens is {shorten(self.completion_tokens)} and prompts is "
            f"{self.prompts}; give the length of every completion without prompts, or one length",
        )

    @property
    def completion_lengths(self) -> tuple[int, ...]:
        """Of every completion of a rollout."""
        if isinstance(self.completion_tokens, Sequence):
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
