"""Temporary directories that go with the object that they were made for."""

from __future__ import annotations

import os
import shutil
import weakref
from pathlib import Path


def remove_with(owner: object, directory: Path) -> weakref.finalize[..., object]:
    """Remove a directory once ``owner`` is gone, or at the end of the process, but not of a fork.

    Returns:
        What removes it at once when it is called.
    """
    return weakref.finalize(owner, _remove, os.getpid(), directory)


def _remove(process: int, directory: Path) -> None:
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)
