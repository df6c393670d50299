"""Programs in an interpreter of their own, which import everything anew."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIME_LIMIT = 300


def environment(**more: str) -> dict[str, str]:
    """In which this repository and the helpers of this folder are importable."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)]), **more}


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program that has ended, run with these environment variables."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIME_LIMIT,
        env=environment(**variables),
    )


@contextmanager
def started(code: str) -> Iterator[subprocess.Popen[str]]:
    """A program that is running, and does not outlive the context."""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(text: str, process: subprocess.Popen[str], stream: str = "stdout") -> None:
    """Read a stream of a running program up to the line with ``text``."""
    for line in getattr(process, stream):
        if text in line:
            return
    pytest.fail("\n".join([f"ended without saying {text!r}", *process.communicate()]))
