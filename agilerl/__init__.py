"""agilerl: finetune language models with reinforcement learning.

Importing this package loads neither torch nor transformers; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "GRPO": "agilerl.algorithms",
    "GSPO": "agilerl.algorithms",
    "CISPO": "agilerl.algorithms",
    "ReasoningGym": "agilerl.llm_envs",
    "TokenObservationWrapper": "agilerl.llm_envs",
    "SyncMultiTurnVecEnv": "agilerl.llm_envs",
    "finetune_llm_reasoning": "agilerl.training.train_llm",
    "finetune_llm_multiturn": "agilerl.training.train_llm",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'agilerl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
