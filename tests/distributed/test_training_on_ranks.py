"""Both training functions on two processes: shares, one writer, exact resume, a process dying."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("train_on_ranks.py")


def launch(
    folder: Path, *iterations: int, processes: int = 2, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script under torchrun; kills it all when it takes longer than two minutes."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={processes}", str(SCRIPT), str(folder), *map(str, iterations)]
    with subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=500)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output)


def result(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{name}_{rank}.json").read_text())
    return content


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four iterations."""
    folder = tmp_path_factory.mktemp("whole")
    done = launch(folder, 4)
    assert done.returncode == 0, done.stdout[-3000:]
    return folder


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations, then agents made anew that go on to four."""
    folder = tmp_path_factory.mktemp("resumed")
    done = launch(folder, 2, 4)
    assert done.returncode == 0, done.stdout[-3000:]
    return folder


@pytest.mark.parametrize("name", ["reasoning", "multi_turn"])
def test_all_processes_agree_and_rank_0_writes(name: str, whole: Path) -> None:
    assert result(whole, name, 0) == result(whole, name, 1)
    with (whole / name / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    # 7 prompts a pass: batches of 4 and 3. Or 16 episodes of 2 turns.
    steps = ["0", "4", "7", "11", "14"] if name == "reasoning" else ["0", "32", "64", "96", "128"]
    assert [row["steps"] for row in rows] == steps
    assert len(result(whole, name)["fitness"]) == 3


@pytest.mark.parametrize("name", ["reasoning", "multi_turn"])
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, whole: Path, resumed: Path) -> None:
    for rank in (0, 1):
        assert result(whole, name, rank) == result(resumed, name, rank)
    clocks = ("seconds", "tokens_per_second")
    metrics = []
    for folder in (whole, resumed):
        with (folder / name / "metrics.csv").open() as file:
            metrics.append(
                [
                    {k: v for k, v in row.items() if not k.endswith(clocks)}
                    for row in csv.DictReader(file)
                ]
            )
    assert metrics[0] == metrics[1]
    actor = f"{name}_elite/actor/adapter_model.safetensors"
    assert (whole / actor).read_bytes() == (resumed / actor).read_bytes()


def test_a_process_that_dies_brings_the_run_down_by_name(tmp_path: Path) -> None:
    started = time.monotonic()
    done = launch(tmp_path / "dies", 4, DIE_ON_RANK="1")
    assert done.returncode != 0
    assert "rank      : 1" in done.stdout
    assert time.monotonic() - started < 150, "start-up included; the death itself costs seconds"
    assert (tmp_path / "dies" / "reasoning" / "iteration_00000001").is_dir()
