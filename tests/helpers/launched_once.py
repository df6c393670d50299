"""What is launched once for all workers of pytest-xdist."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def launched_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, launch: Callable[[Path], None]
) -> Path:
    """The folder that ``launch`` filled, for whichever worker needed it first.

    Raises:
        RuntimeError: The launch failed, for this worker or for another one.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the folder of the whole run
    folder, failure = root / name, root / f"{name}.failure"
    with FileLock(root / f"{name}.lock"):
        if not folder.exists():
            folder.mkdir()
            try:
                launch(folder)
            except BaseException as error:
                failure.write_text(repr(error))
                raise
    if failure.exists():
        raise RuntimeError(failure.read_text())
    return folder
