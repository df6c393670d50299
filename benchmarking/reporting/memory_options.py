"""Predict what single options save on Qwen2.5-1.5B's shapes: the table of ``docs/memory.md``.

Nothing is downloaded or run; it takes about a minute.

    .venv/bin/python benchmarking/reporting/memory_options.py
"""

from __future__ import annotations

from typing import Any

from tables import table
from transformers import Qwen2Config

from agilerl.utils import MemorySettings, estimate_memory

CONFIG = Qwen2Config(
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
COMMON: dict[str, Any] = {
    "prompt_tokens": 256,
    "completion_tokens": 512,
    "group_size": 8,
    "batch_size": 64,
    "micro_batch_size_per_gpu": 8,
    "device": "cuda",
}
CASES: dict[str, dict[str, Any]] = {
    "`micro_batch_size_per_gpu=8`": {},
    "no micro-batches (`micro_batch_size_per_gpu=None`)": {"micro_batch_size_per_gpu": None},
    "`micro_batch_size_per_gpu=2`": {"micro_batch_size_per_gpu": 2},
    "`micro_batch_tokens=2048`": {"micro_batch_size_per_gpu": None, "micro_batch_tokens": 2048},
    "`gradient_checkpointing=False`": {"gradient_checkpointing": False},
    "`gradient_checkpointing=False`, `micro_batch_size_per_gpu=2`": {
        "gradient_checkpointing": False,
        "micro_batch_size_per_gpu": 2,
    },
    '`optimizer="adamw_8bit"`': {"optimizer": "adamw_8bit"},
    "`hf_generate_chunk_size=2`": {"hf_generate_chunk_size": 2},
    "`hf_generate_chunk_size=2`, `micro_batch_size_per_gpu=2`": {
        "hf_generate_chunk_size": 2,
        "micro_batch_size_per_gpu": 2,
    },
    "rows padded, as with `torch_compiler`": {"layout": "padded"},
}
"""What differs from :data:`COMMON`, by its name in the table."""


def options_table() -> str:
    """Predicted gigabytes of every case, as a Markdown table."""
    rows = []
    for name, options in CASES.items():
        found = estimate_memory(CONFIG, MemorySettings(**{**COMMON, **options}))
        peaks = (found.rollout_peak, found.update_peak, found.total)
        rows.append([name, *(f"{peak / 1e9:.1f} GB" for peak in peaks)])
    return table(["setting", "rollout", "update", "peak of both"], rows)


if __name__ == "__main__":
    print(options_table())
