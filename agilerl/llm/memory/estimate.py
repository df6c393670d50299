"""The memory of a training step: what is kept throughout, and what rollout and update add.

Everything is counted in bytes of tensors on the device, as ``torch.cuda.max_memory_allocated`` does
there. Not counted: Python, the code of the libraries, the CUDA context, and what an allocator keeps
of freed blocks.

Kept throughout:

* base weights: parameters and buffers.
* adapters: the actor's, and as much for a reference adapter.
* optimizer state: two moments of each trained parameter. For ``"adamw_8bit"`` a byte each, and a
  float32 scale for every block of 256; those of tensors below 4,096 elements stay float32.

A rollout adds:

* merged copies: of the targeted weights, which in float32, not quantized, run without LoRA
  branches.
* keys and values: of each prompt once, of each row in blocks of columns. Rows leave as they end.
* the forward over the prompts, or one decoding step: logits of all rows, three times (those before,
  these, and what is drawn from), twice with top-k; attention scores.

An update adds:

* gradients: of the trained adapter, until the step.
* activations: what the decoder's forward keeps for backward. With gradient checkpointing the input
  of each layer. Where rows are not packed, also copies of a prompt's keys and values for each row.
* log-probs: a tile of logits a time, two of them alive, and the ``(N, D)`` gradient of the hidden
  states.
* backward: one layer's gradients, and with gradient checkpointing its activations.

The passes of the reference and of the old log-probs keep nothing for backward, so they are below
the update's peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedConfig, PreTrainedModel

from agilerl.checks import InstanceOf, require
from agilerl.llm.config import RowLayout
from agilerl.llm.generation.decode import COMPACT_SHARE
from agilerl.llm.generation.kv_cache.growing_cache import CACHE_BLOCK
from agilerl.llm.memory.settings import MemorySettings
from agilerl.llm.memory.traced_passes import PrefillPass, TracedModel, tensor_bytes

# Of bitsandbytes.
_LEAST_8_BIT_ELEMENTS = 4096
_ELEMENTS_OF_A_SCALE = 256


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one training step of a process; see the module for what is counted."""

    base_weights: int
    adapters: int
    optimizer_state: int
    merged_copies: int
    """In a rollout, as are the next three."""
    kv_cache: int
    prefill: int
    """The forward over the prompts."""
    decoding: int
    """One token of every row; not at the same time as ``prefill``."""
    gradients: int
    """In the update, as is all that follows."""
    activations: int
    logits_tile: int
    """While log-probs are computed."""
    backward: int
    """In backward; not at the same time as ``logits_tile``."""

    @property
    def fixed(self) -> int:
        """What is kept throughout."""
        return self.base_weights + self.adapters + self.optimizer_state

    @property
    def rollout_peak(self) -> int:
        """The most that a rollout takes, with what is kept throughout."""
        step = max(self.prefill, self.kv_cache + self.decoding)
        return self.fixed + self.merged_copies + step

    @property
    def update_peak(self) -> int:
        """The most that an update takes, with what is kept throughout."""
        passes = self.activations + max(self.logits_tile, self.backward)
        return self.fixed + self.gradients + passes

    @property
    def total(self) -> int:
        """The peak of the whole step."""
        return max(self.rollout_peak, self.update_peak)

    def __str__(self) -> str:
        rows = [
            ("base weights", self.base_weights),
            ("adapters", self.adapters),
            ("optimizer state", self.optimizer_state),
            ("rollout: merged copies", self.merged_copies),
            ("rollout: keys and values", self.kv_cache),
            ("rollout: prompts, or", self.prefill),
            ("rollout: one token of all rows", self.decoding),
            ("peak of the rollout", self.rollout_peak),
            ("update: gradients", self.gradients),
            ("update: activations", self.activations),
            ("update: log-probs, or", self.logits_tile),
            ("update: backward", self.backward),
            ("peak of the update", self.update_peak),
            ("peak", self.total),
        ]
        return "\n".join(f"{name:31} {readable(size):>9}" for name, size in rows)


def readable(size: int) -> str:
    """A number of bytes as text: ``"1.5 GB"``."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def estimate_memory(
    model_or_config: PreTrainedModel | PeftModel | PreTrainedConfig, settings: MemorySettings
) -> MemoryEstimate:
    """Predict the memory of a training step: ``get_action``, then ``learn``.

    Nothing is loaded or computed: the passes are run on tensors that have shapes only.

    Args:
        model_or_config: The base model, or a config, such as ``AutoConfig.from_pretrained`` gives.
        settings: The sizes.

    Raises:
        TypeError: If an argument is something else.
    """
    require(
        isinstance(model_or_config, PreTrainedModel | PeftModel | PreTrainedConfig),
        f"model_or_config is of type {type(model_or_config).__name__}; it must be a transformers "
        "model or config",
        TypeError,
    )
    InstanceOf(MemorySettings, "a MemorySettings", optional=False)("settings", settings)
    return Estimator(model_or_config, settings).estimate(settings)


class Estimator:
    """Estimates for one model under several settings.

    Args:
        model_or_config: The base model or its config.
        settings: With the adapter, and the dtype of the base.
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PeftModel | PreTrainedConfig,
        settings: MemorySettings,
    ) -> None:
        if isinstance(model_or_config, PeftModel):
            model_or_config = model_or_config.get_base_model()
        if isinstance(model_or_config, PreTrainedModel):
            kind, config = type(model_or_config), model_or_config.config
        else:
            kind, config = None, model_or_config
        dtype = settings.dtype or model_or_config.dtype or torch.float32
        self._traced = TracedModel(config, kind, dtype, settings.lora_config)
        # A quantized model has fewer bytes than its config says.
        real = isinstance(model_or_config, PreTrainedModel) and settings.dtype is None
        self._weights = tensor_bytes(model_or_config) if real else self._traced.weight_bytes
        self._quantized = getattr(config, "quantization_config", None) is not None
        text: Any = config.get_text_config()
        self._vocabulary, self._heads = text.vocab_size, text.num_attention_heads
        # As agilerl.llm.forward.packed_attention.can_attend_packed has it, and without windows.
        window = getattr(text, "sliding_window", None)
        half = dtype in (torch.float16, torch.bfloat16)
        self._off_cpu_layout: RowLayout = "packed" if half and not window else "shared_prompts"

    def estimate(self, settings: MemorySettings) -> MemoryEstimate:
        """With these settings; ``lora_config`` and ``dtype`` are those of this object."""
        if settings.layout is None:
            on_cpu = torch.device(settings.device).type == "cpu"
            settings = replace(settings, layout="packed" if on_cpu else self._off_cpu_layout)
        adapter = sum(parameter.nbytes for parameter in self._traced.adapter)
        moment = adapter
        if settings.optimizer == "adamw_8bit":
            moment = sum(_bytes_in_8_bits(parameter.numel()) for parameter in self._traced.adapter)
        update = self._traced.update(settings)
        chunk = settings.chunk_prompts
        prefill = self._traced.prefill(chunk, settings.prompt_tokens)
        column = prefill.cache // (chunk * settings.prompt_tokens)
        copies = 0
        if settings.layout == "shared_prompts":
            # One of all layers, and where they keep what they attended to, another of each.
            kept = 1 if settings.gradient_checkpointing else 2
            copies = kept * settings.micro_batch_size * settings.prompt_tokens * column
        rollout = dict.fromkeys(("merged_copies", "kv_cache", "prefill", "decoding"), 0)
        if not settings.use_vllm:
            rollout = self._rollout(settings, chunk, prefill)
        return MemoryEstimate(
            base_weights=self._weights,
            adapters=adapter * (2 if settings.use_separate_reference_adapter else 1),
            optimizer_state=2 * moment,
            gradients=adapter,
            activations=update.activations + copies,
            logits_tile=update.logits,
            backward=update.backward,
            **rollout,
        )

    def _rollout(
        self, settings: MemorySettings, chunk: int, prefill: PrefillPass
    ) -> dict[str, int]:
        column = prefill.cache // (chunk * settings.prompt_tokens)
        rows = settings.completion_lengths[: chunk * settings.group_size]
        width = settings.prompt_tokens + max(rows)
        logits = len(rows) * self._vocabulary * 4 * (2 if settings.top_k else 3)
        scores = len(rows) * self._heads * width * 4 * 2
        return {
            "merged_copies": 0 if self._quantized else self._traced.merged_bytes,
            "kv_cache": prefill.cache + column * most_cached_columns(rows),
            "prefill": prefill.cache + prefill.activations,
            "decoding": logits + scores,
        }


def _bytes_in_8_bits(elements: int) -> int:
    """Of one moment of a tensor."""
    if elements < _LEAST_8_BIT_ELEMENTS:
        return 4 * elements
    return elements + 4 * math.ceil(elements / _ELEMENTS_OF_A_SCALE)


def most_cached_columns(lengths: tuple[int, ...]) -> int:
    """Columns of all rows together, when there are most; rows leave some at a time.

    Args:
        lengths: Of the completions of a chunk.
    """
    block, start, columns = min(CACHE_BLOCK, max(lengths)), 0, 0
    most = 0
    while columns < max(lengths) - 1:
        columns = start + block
        unfinished = sum(length > start for length in lengths)
        rows = min(len(lengths), int(unfinished / (1 - COMPACT_SHARE)))
        most = max(most, rows * columns)
        start = columns + 1
    return most
