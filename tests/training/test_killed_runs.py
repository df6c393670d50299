"""Real SIGKILLs at random instants of a run lose at most one iteration, and change nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.process
@pytest.mark.slow
def test_twenty_sigkills_of_a_run_that_saves_every_iteration(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_during_run.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.search(r"killed=(\d+) in_save=(\d+) lost=(\d+)", done.stdout)
    assert found, done.stdout
    killed, in_save, lost = map(int, found.groups())
    assert killed == 20
    assert in_save >= 1, "no kill hit a save, though some waited for one"
    assert lost <= 1
