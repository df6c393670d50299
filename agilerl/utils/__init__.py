"""Functions that user code calls around training: saving agents, making populations, sizing runs.

``estimate_memory`` and ``MemorySettings`` load on first use: much of the library imports from here.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "MemoryEstimate": "agilerl.llm.memory.estimate",
    "MemorySettings": "agilerl.llm.memory.settings",
    "estimate_memory": "agilerl.llm.memory.estimate",
}

__all__ = ["MemoryEstimate", "MemorySettings", "estimate_memory"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'agilerl.utils' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
