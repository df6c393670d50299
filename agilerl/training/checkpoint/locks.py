"""Locks that keep two living runs from writing to the same place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)


def lock_for_a_run(
    argument: str, path: Path, lock: Callable[[Path], int], consequence: str
) -> int | None:
    """Lock ``path`` for this run.

    Args:
        argument: Name of the argument that says where it is.
        path: What to lock.
        lock: Locks it, as :func:`agilerl.llm.checkpoint.atomic_directory.lock_directory` does.
        consequence: What two runs would do there.

    Returns:
        What ``lock`` returns; None where the file system has no locks, which is logged.

    Raises:
        RuntimeError: If it belongs to a living run, in whatever process.
    """
    try:
        return lock(path)
    except BlockingIOError:
        raise RuntimeError(
            f"{argument}={str(path)!r} belongs to a run that is still going on, and {consequence}: "
            f"wait for it or stop it, or choose another {argument}."
        ) from None
    except OSError as error:
        logger.warning(
            "%s cannot be locked (%s): see to it that no other run writes there", path, error
        )
        return None
