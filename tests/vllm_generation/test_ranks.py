"""Every rank samples from an engine of its own, and all train one adapter."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from processes import has_ended
from torchrun import torchrun


def ends(pid: int) -> bool:
    """Whether a process is over soon; an engine ends when it notices that its rank has."""
    for _ in range(600):
        if has_ended(pid):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_two_ranks_with_an_engine_each(zero_stage: int) -> None:
    output = torchrun(Path(__file__).with_name("train_on_ranks.py"), str(zero_stage), seconds=300)
    (line,) = [line for line in output.splitlines() if line.startswith("FOUND ")]
    first, second = json.loads(line.removeprefix("FOUND "))
    assert first["weights"] == second["weights"]
    assert first["engine"] != second["engine"]
    assert all(ends(each["engine"]) for each in (first, second))
    for each in (first, second):
        assert each["probe"] < 1e-4
        assert each["importance"] == pytest.approx([1.0] * 3, abs=1e-3)
        assert all(norm > 0 for norm in each["norms"])
