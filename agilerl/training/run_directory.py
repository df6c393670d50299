"""The folder of one run: configuration, and checkpoints that are complete or not there at all."""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from agilerl.llm.atomic_directory import (
    lock_directory,
    sync_directory,
    sync_tree,
    unlock_directory,
)
from agilerl.training.protocols import Agent

logger = logging.getLogger(__name__)

# What a run leaves in its folder, but for W&B's folder, which tells runs apart itself.
_RUN_ENTRIES = (
    "metrics.csv",
    "completions.jsonl",
    "config.json",
    "tensorboard",
    "iteration_*",
    "crashed_in_iteration_*",
)


class RunDirectory:
    """Where one run writes; a context, in which no other run can write there.

    Args:
        name: Name of the run, see :func:`run_name`.
        path: The folder; ``runs/<name>`` when None. What an earlier run left there is moved to
            ``earlier_run_1`` (2, 3, ...) inside it, never overwritten.

    Raises:
        RuntimeError: If a living run, in whatever process, writes to ``path``.
    """

    def __init__(self, name: str, path: str | Path | None = None) -> None:
        self.name = name
        self.path = _make_unused(Path("runs") / name) if path is None else Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_for_a_run(self.path)
        try:
            _move_earlier_run(self.path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other runs have the directory."""
        if self._lock is not None:
            unlock_directory(self._lock)
            self._lock = None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.json``; values that JSON does not know are written as their text."""
        _write_json(self.path / "config.json", config)

    def write_checkpoint(
        self, name: str, agents: Sequence[Agent], run_state: Mapping[str, Any]
    ) -> Path:
        """Save every agent to ``<name>/agent_<index>`` and the state to ``<name>/run_state.json``.

        All is written into a ``.partial`` sibling that is renamed last, so a folder without that
        suffix is complete. A checkpoint that exists already is left as it is.

        Returns:
            The checkpoint's folder.
        """
        target = self.path / name
        if target.exists():
            return target
        partial = self.path / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            for agent in agents:
                agent.save_checkpoint(partial / f"agent_{agent.index}")
            _write_json(partial / "run_state.json", run_state)
            sync_tree(partial)
            partial.rename(target)
            for agent in agents:  # what the agent noted is the name before the rename
                agent.last_checkpoint = str(target / f"agent_{agent.index}")
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_directory(self.path)
        return target


def run_name(agents: Sequence[Agent], env_name: str) -> str:
    """``<ALGO>-<environment>-<date>-<time>``, safe as a file name."""
    algos = "+".join(dict.fromkeys(agent.algo for agent in agents))
    environment = re.sub(r"[^\w.+-]+", "_", env_name).strip("._") or "env"
    return f"{algos}-{environment}-{time.strftime('%Y%m%d-%H%M%S')}"


def _make_unused(path: Path) -> Path:
    """Create ``path``, or ``path-2``, ``path-3`` ... when runs started in the same second."""
    candidate, number = path, 1
    while True:
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")


def _lock_for_a_run(path: Path) -> int | None:
    try:
        return lock_directory(path)
    except BlockingIOError:
        raise RuntimeError(
            f"checkpoint_path={str(path)!r} belongs to a run that is still going on, and two runs "
            "would mix their files: wait for it or stop it, or choose another checkpoint_path."
        ) from None
    except OSError as error:
        logger.warning(
            "%s cannot be locked (%s): see to it that no other run writes there", path, error
        )
        return None


def _move_earlier_run(path: Path) -> None:
    leftovers = [entry for pattern in _RUN_ENTRIES for entry in sorted(path.glob(pattern))]
    if not leftovers:
        return
    number = 1
    while (path / f"earlier_run_{number}").exists():
        number += 1
    destination = path / f"earlier_run_{number}"
    destination.mkdir()
    for entry in leftovers:
        entry.rename(destination / entry.name)
    logger.warning(
        "%s holds an earlier run: its metrics, samples and checkpoints were moved to %s",
        path,
        destination,
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, default=str, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
