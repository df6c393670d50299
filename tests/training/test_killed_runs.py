"""Real SIGKILLs at random instants of a run lose at most one iteration, and change nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "kills"), [("agent", 20), ("evolution", 12)])
def test_sigkills_of_a_run_that_saves_every_iteration(
    scenario: str, kills: int, tmp_path: Path
) -> None:
    script = Path(__file__).with_name("kill_during_run.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), scenario],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)\b", done.stdout)}
    assert found["killed"] == kills, done.stdout
    assert found["in_save"] >= 1, "no kill hit a save, though some waited for one"
    assert found["lost"] <= 1
    if scenario == "evolution":
        assert found["generations"] >= 6
        assert found["in_generation"] >= 1, "no kill hit a generation, though some waited for one"
