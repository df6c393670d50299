"""Directories that are replaced as a whole: a kill at any instant leaves the old or the new one.

A directory is complete when it holds its ``marker`` file. Beside ``models/run`` there may be

* ``models/.run.<8 hex digits>.tmp``: being written, or left behind by a writer that was killed,
* ``models/.run.previous``: what ``models/run`` held before the save that is replacing it,
* ``models/.run.lock``: while a run owns the name, see :func:`lock_name`,
* ``models/run.earlier_1``: moved there by :func:`move_aside`.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from agilerl.checks import require

logger = logging.getLogger(__name__)

T = TypeVar("T")
READ_ATTEMPTS = 5


@contextlib.contextmanager
def atomic_directory(path: Path, marker: str) -> Iterator[Path]:
    """Write a directory under a temporary name, which is yielded; at the end, sync and rename it.

    Args:
        path: Its final name; an earlier directory there is replaced.
        marker: File that the caller writes into it.

    Raises:
        FileExistsError: If ``path`` holds something else, which replacing would destroy.
    """
    path = path.expanduser().resolve()
    refuse_to_replace(path, marker)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path, marker)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    with contextlib.ExitStack() as stack:
        # Held until the end, or until the kernel releases it for a process that was killed: that
        # is how the next writer tells a leftover from work in progress.
        with contextlib.suppress(OSError):  # a file system without locks
            stack.callback(_unlock, _lock(temporary))
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        yield temporary
        sync_tree(temporary)
        previous = _beside(path, "previous")
        if (path / marker).is_file():
            shutil.rmtree(previous, ignore_errors=True)
            path.rename(previous)
        temporary.rename(path)
        sync_directory(path.parent)
        shutil.rmtree(previous, ignore_errors=True)


def complete_directory(path: Path, marker: str) -> Path:
    """``path``, or what it held before a save that was killed at the moment of replacing it.

    Raises:
        FileNotFoundError: If neither holds ``marker``.
    """
    path = path.expanduser().resolve()
    require(
        holds_directory(path, marker),
        f"{path} holds no checkpoint: there is no {marker} in it; pass the directory that "
        "save_checkpoint wrote",
        FileNotFoundError,
    )
    if (path / marker).is_file():
        return path
    logger.warning("%s was being replaced when its writer died; the previous one is used", path)
    return _beside(path, "previous")


def read_directory(path: Path, marker: str, read: Callable[[Path], T]) -> T:
    """What ``read`` makes of the directory at ``path``, all of it from one writer.

    Another process may replace the directory meanwhile; then it is read again. Errors of ``read``
    are raised if the directory stayed.

    Raises:
        FileNotFoundError: If there is none.
        RuntimeError: If it was replaced in each of several attempts.
    """
    for _ in range(READ_ATTEMPTS):
        folder = complete_directory(path, marker)
        with contextlib.ExitStack() as stack:
            try:
                # While it is open its number on the disk is not given to another.
                descriptor = os.open(folder, os.O_RDONLY)
            except FileNotFoundError:
                continue
            stack.callback(os.close, descriptor)
            try:
                result = read(folder)
            except (OSError, ValueError):
                if _is_at(folder, descriptor):
                    raise
            else:
                if _is_at(folder, descriptor):
                    return result
    raise RuntimeError(
        f"{path} was replaced faster than it could be read, {READ_ATTEMPTS} times; read a copy"
    )


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file or directory is the one at ``path``."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def holds_directory(path: Path, marker: str) -> bool:
    """Whether :func:`complete_directory` would find one at ``path``."""
    path = path.expanduser().resolve()
    return (path / marker).is_file() or (_beside(path, "previous") / marker).is_file()


def move_aside(path: Path, marker: str) -> Path:
    """Move a complete directory to ``<name>.earlier_1`` (2, 3, ...) beside it; returns that."""
    held = complete_directory(path, marker)
    path = path.expanduser().resolve()
    names = (f"{path.name}.earlier_{number}" for number in itertools.count(1))
    target = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    held.rename(target)
    sync_directory(path.parent)
    return target


def refuse_to_replace(path: Path, marker: str) -> None:
    """Raise FileExistsError unless ``path`` is free, empty, or a directory with ``marker``."""
    if not path.exists() or (path / marker).is_file():
        return
    require(path.is_dir(), f"{path} is a file; pass a directory", FileExistsError)
    require(
        not any(path.iterdir()),
        f"{path} holds files but no checkpoint ({marker}), and saving there would remove them; "
        f"pass a new directory, for example {path / 'checkpoint'}",
        FileExistsError,
    )


def _remove_leftovers(path: Path, marker: str) -> None:
    """Delete what killed writers of ``path`` left behind; what another is writing is locked."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp")
    for leftover in [entry for entry in path.parent.iterdir() if name.fullmatch(entry.name)]:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.callback(_unlock, _lock(leftover))
            shutil.rmtree(leftover, ignore_errors=True)
    if (path / marker).is_file():
        shutil.rmtree(_beside(path, "previous"), ignore_errors=True)


def _lock(path: Path, flags: int = os.O_RDONLY) -> int:
    """Lock a file or directory; the file descriptor, for :func:`_unlock`.

    The kernel releases the lock however the process ends.
    """
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _unlock(descriptor: int) -> None:
    # Closing alone would leave the lock to forked children that live on.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def lock_name(path: Path) -> int:
    """Lock a name against other processes, and against other calls in this one.

    A directory that is replaced takes its own lock with it, so this one is on a file beside it.

    Returns:
        What :func:`unlock_name` takes.

    Raises:
        BlockingIOError: If it is locked.
        OSError: If it lies on a file system without locks.
    """
    file = _beside(path, "lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    while not _is_at(file, descriptor := _lock(file, os.O_RDWR | os.O_CREAT)):
        # Its owner removed the file between the two calls: lock the one that is there now.
        os.close(descriptor)
    return descriptor


def unlock_name(path: Path, descriptor: int) -> None:
    """Release a name and remove its file."""
    _beside(path, "lock").unlink(missing_ok=True)
    _unlock(descriptor)


def _beside(path: Path, kind: str) -> Path:
    path = path.expanduser().resolve()
    return path.with_name(f".{path.name}.{kind}")


def sync_tree(folder: Path) -> None:
    """Flush every file and directory below ``folder`` to disk."""
    for root, _, files in os.walk(folder):
        for name in (*files, "."):
            sync_directory(Path(root, name))


def sync_directory(path: Path) -> None:
    """Flush a directory's entries, a rename in it for instance, to disk; or a file's content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
