"""A real SIGKILL at every file operation of a save leaves a whole checkpoint behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.process
def test_sigkill_at_every_step_of_a_save(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_during_save.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.search(r"killed=(\d+) old=(\d+) between=(\d+)", done.stdout)
    assert found, done.stdout
    killed, old, between = map(int, found.groups())
    assert killed >= 15 and 10 <= old < killed and between >= 1
