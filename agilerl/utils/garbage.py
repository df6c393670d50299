"""Whether a finalizer was called by Python's cyclic garbage collector, or as its object died."""

from __future__ import annotations

import gc
import threading
from typing import Any

_collecting_threads: set[int] = set()


def is_collecting_garbage() -> bool:
    """Whether this is called from within a garbage collection.

    That begins anywhere in the program: a finalizer that it calls must not change what may be in
    the middle of an iteration, such as the modules of a model.
    """
    return threading.get_ident() in _collecting_threads


def _note_phase(phase: str, info: dict[str, Any]) -> None:
    if phase == "start":
        _collecting_threads.add(threading.get_ident())
    else:
        _collecting_threads.discard(threading.get_ident())


gc.callbacks.append(_note_phase)
