"""Ending programs that start others, and telling whether a process has ended."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any

import psutil


def kill_launcher(process: subprocess.Popen[Any]) -> None:
    """Kill a launcher, if it is still there, and its ranks, which would keep its output open.

    The ranks are sessions of their own, so there is no one group to kill.
    """
    if process.poll() is not None:
        return
    launcher = psutil.Process(process.pid)
    # It is stopped first, so that it starts no rank after they were listed.
    launcher.suspend()
    for each in [*launcher.children(recursive=True), launcher]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def has_ended(pid: int) -> bool:
    """Whether a process is over; one that its parent has not waited for yet is."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command_line(process: psutil.Process) -> list[str]:
    """The command of a process, empty if it has ended since it was listed."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
