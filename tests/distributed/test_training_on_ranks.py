"""Both training functions on two processes: shares, one writer, exact resume, faults."""

from __future__ import annotations

import csv
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launched_once import launched_once
from learn_from_sampler import MISSING, learned
from processes import kill_launcher
from torchrun import HERE, torchrun
from training_runs import sums

pytestmark = [pytest.mark.slow, pytest.mark.process]

SCRIPT = HERE / "run_training.py"
SETTINGS = ["ddp", "zero2", "zero3"]
NAMES = ["reasoning", "multi_turn"]
CLOCKS = ("seconds", "tokens_per_second")
ASKED = "SIGTERM: finishing this iteration"


def result(run: Path, rank: int = 0) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run.with_name(f"{run.name}_{rank}.json").read_text())
    return content


def metrics(run: Path) -> list[dict[str, str]]:
    """Rows without what depends on the clock."""
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.endswith(CLOCKS)} for row in rows]


def assert_same(run: Path, other: Path) -> None:
    for rank in (0, 1):
        assert result(run, rank) == result(other, rank)
    assert metrics(run) == metrics(other)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of four iterations under every setting: ``<setting>_<name>_whole`` and ``_parts``."""

    def launch(folder: Path) -> None:
        (folder / "output").write_text(torchrun(SCRIPT, str(folder), "exact"))

    return launched_once(tmp_path_factory, "exact", launch)


@dataclass(frozen=True)
class Ended:
    """What became of a launcher and its processes."""

    code: int
    output: str
    returned: bool
    """Whether both processes came to the end of the script."""
    exits: list[str]
    """Codes that training exited with, per process that did."""
    at: float
    """When the launcher ended, in seconds since the epoch."""


@dataclass(frozen=True)
class Launched:
    """A launcher and two processes, alive."""

    folder: Path
    process: subprocess.Popen[bytes]
    log: Path

    def wait_for(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.05)

    def stop_in_pause(self, to: str, processes_told: int) -> None:
        """SIGTERM in the iteration in which the processes wait, which is then finished."""
        paused = [self.folder / f"paused_{rank}" for rank in (0, 1)]
        self.wait_for(lambda: all(file.exists() for file in paused))
        pid = self.process.pid if to == "launcher" else int(paused[1].read_text())
        os.kill(pid, signal.SIGTERM)
        self.wait_for(lambda: self.log.read_text().count(ASKED) == processes_told)
        (self.folder / "go").touch()

    def ended(self) -> Ended:
        code = self.process.wait(timeout=300)
        at = time.time()
        kinds = ("returned", "exited", "paused")
        files = [self.folder / f"{what}_{rank}" for what in kinds for rank in "01"]
        returned = all(file.exists() for file in files[:2])
        exits = [file.read_text() for file in files[2:4] if file.exists()]
        for file in [*files, self.folder / "go"]:
            file.unlink(missing_ok=True)
        return Ended(code, self.log.read_text(), returned, exits, at)


@contextmanager
def launched(folder: Path, *runs: str, exit_code: int = 143) -> Iterator[Launched]:
    """The script on two processes, none of which outlives the context."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    log = folder / "output"
    # Between SIGTERM and SIGKILL torchrun leaves 30 s, in which a busy machine may not be done.
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "280", "EXIT_CODE": str(exit_code)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(SCRIPT), str(folder), "go_on", *runs],
            env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | patience,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Launched(folder, process, log)
    finally:
        kill_launcher(process)
        process.wait()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    """A user's script, started three times: stopped by the launcher, by a process, by a death."""

    def launch(folder: Path) -> None:
        with launched(folder, "reasoning:pause") as first:
            first.stop_in_pause(to="launcher", processes_told=2)
            ends = [first.ended()]
        with launched(folder, "reasoning", "multi_turn:pause", exit_code=0) as second:
            second.stop_in_pause(to="rank 1", processes_told=1)
            ends.append(second.ended())
        with launched(folder, "multi_turn", "reasoning:die") as third:
            ends.append(third.ended())
        (folder / "ends").write_bytes(pickle.dumps(ends))

    folder = launched_once(tmp_path_factory, "stopped", launch)
    return folder, pickle.loads((folder / "ends").read_bytes())


@pytest.mark.parametrize("name", NAMES)
def test_all_processes_agree_and_rank_0_writes(name: str, exact: Path) -> None:
    run = exact / f"ddp_{name}_whole"
    of_ranks = [result(run, rank) for rank in (0, 1)]
    assert of_ranks[0]["of_all"] == of_ranks[1]["of_all"]
    assert of_ranks[0]["own"]["generator"] != of_ranks[1]["own"]["generator"]
    # 7 prompts a pass: batches of 4 and 3. Or 16 episodes of 2 turns.
    steps = ["0", "4", "7", "11", "14"] if name == "reasoning" else ["0", "32", "64", "96", "128"]
    assert [row["steps"] for row in metrics(run)] == steps
    assert len(of_ranks[0]["of_all"]["fitness"]) == 3


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_the_uninterrupted_one(setting: str, name: str, exact: Path) -> None:
    whole, parts = (exact / f"{setting}_{name}_{how}" for how in ("whole", "parts"))
    assert_same(whole, parts)
    actor = "actor/adapter_model.safetensors"
    elites = [run.with_name(f"{run.name}_elite") / actor for run in (whole, parts)]
    assert elites[0].read_bytes() == elites[1].read_bytes()


def test_a_stream_is_shared_and_resumed_as_a_dataset(exact: Path) -> None:
    """In a pass every row is asked once; a batch has rows of both processes."""
    run = exact / "ddp_streamed_whole"
    assert_same(run, exact / "ddp_streamed_parts")
    assert [row["steps"] for row in metrics(run)] == ["0", "4", "7", "11", "14"]
    of_ranks = [result(run, rank) for rank in (0, 1)]
    assert of_ranks[0]["of_all"] == of_ranks[1]["of_all"]
    own, stream = asked_by_rank_0(run), sums(7).to_iterable_dataset(num_shards=2)
    for epoch in (0, 1):
        shuffled = stream.shuffle(seed=3, buffer_size=3)
        shuffled.set_epoch(epoch)
        order = [row["question"] for row in shuffled]
        assert own[2 * epoch + 1] == order[0:4:2]
        assert own[2 * epoch + 2] == order[4:7:2]


def test_all_ranks_draw_further_prompts_when_one_lacks_variance(exact: Path) -> None:
    run = exact / "ddp_resampled_whole"
    assert_same(run, exact / "ddp_resampled_parts")
    of_ranks = [result(run, rank) for rank in (0, 1)]
    assert of_ranks[0]["of_all"] == of_ranks[1]["of_all"]
    trained = [row for row in metrics(run) if row["reward_mean"]]
    assert {row["resamples"] for row in trained} & {"1.0", "2.0"}
    drawn = [int(row["steps"]) for row in trained]
    assert all(after - before >= 3 for before, after in zip([0, *drawn], drawn, strict=False))


def test_ranks_draw_further_seeds_together_for_each_agent(exact: Path) -> None:
    run = exact / "ddp_resampled_turns_whole"
    assert_same(run, exact / "ddp_resampled_turns_parts")
    of_ranks = [result(run, rank) for rank in (0, 1)]
    assert of_ranks[0]["of_all"] == of_ranks[1]["of_all"]
    trained = [row for row in metrics(run) if row["reward_mean"]]
    by_agent = [[row["resamples"] for row in trained if row["agent"] == n] for n in "01"]
    assert by_agent[0] != by_agent[1]
    assert {number for each in by_agent for number in each} <= {"0.0", "1.0", "2.0"}


def asked_by_rank_0(run: Path) -> dict[int, list[str]]:
    """Questions of its samples by iteration."""
    asked: dict[int, list[str]] = {}
    for line in map(json.loads, (run / "completions.jsonl").read_text().splitlines()):
        asked.setdefault(line["iteration"], []).append(line["question"])
    return asked


@pytest.mark.parametrize("setting", SETTINGS)
def test_evolution_is_the_same_on_all_ranks_and_resumed_exactly(setting: str, exact: Path) -> None:
    whole, parts = (exact / f"{setting}_evolution_{how}" for how in ("whole", "parts"))
    assert_same(whole, parts)
    lineage = (whole / "lineage.json").read_text()
    assert (parts / "lineage.json").read_text() == lineage
    assert len(json.loads(lineage)["generations"]) == 3
    for found in (lambda rank: result(whole, rank), lambda rank: result(whole, rank)["second"]):
        assert found(0)["of_all"] == found(1)["of_all"]
        assert found(0)["of_all"]["hyperparameters"]["batch_size"] % 2 == 0


def test_one_process_prints_the_generations(exact: Path) -> None:
    printed = (exact / "output").read_text()
    # Under each setting, in the whole run and in two parts.
    assert printed.count("Generation 1, after iteration 1\n") == 2 * len(SETTINGS)
    assert printed.count("Generation 3, after iteration 3\n") == 2 * len(SETTINGS)


def test_a_full_disk_costs_one_checkpoint_and_is_said_once(exact: Path) -> None:
    run = exact / "full_disk"
    whole = exact / "ddp_reasoning_whole"
    for rank in (0, 1):
        found = result(run, rank)
        assert {name: found[name] for name in ("of_all", "own")} == result(whole, rank)
        assert found["last_checkpoint"] == str(run / "iteration_00000004" / "agent_0")
    said = "checkpoint of iteration 2 could NOT be saved"
    messages = [result(run, rank)["errors"] for rank in (0, 1)]
    assert [len(each) for each in messages] == [1, 0]
    assert said in messages[0][0]
    assert (exact / "output").read_text().count(said) == 1
    kept = sorted(child.name for child in run.glob("iteration_*"))
    assert kept[-2:] == ["iteration_00000003", "iteration_00000004"]
    assert "iteration_00000002" not in kept


@pytest.mark.parametrize("setting", SETTINGS)
def test_samplers_that_left_rows_out_on_one_rank(setting: str, exact: Path) -> None:
    alone = learned(None)
    for rank in (0, 1):
        found = torch.load(exact / f"{setting}_sampler_{rank}.pt", weights_only=False)
        for missing in MISSING:
            got, expected = found[missing], alone[missing]
            torch.testing.assert_close(got["weights"], expected["weights"], rtol=0, atol=1e-6)
            for name in ("importance_weight_mean", "importance_weight_max", "mean_loss"):
                assert got["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-5)


def assert_saved(ended: Ended, run: Path, exit_code: int) -> None:
    assert ended.exits == [str(exit_code)] * 2, ended.output[-3000:]
    assert not ended.returned
    saved = run / "iteration_00000002"
    message = f"Stopped by SIGTERM after iteration 2. Saved to {saved}"
    assert ended.output.count(message) == 1
    assert "forcefully exiting" not in ended.output


def test_sigterm_to_the_launcher(stopped: tuple[Path, list[Ended]], exact: Path) -> None:
    """It passes the signal on to all; whatever becomes of them, it ends with 1 itself."""
    folder, (ended, _, _) = stopped
    assert_saved(ended, folder / "reasoning", 143)
    assert ended.code == 1
    assert_same(folder / "reasoning", exact / "ddp_reasoning_whole")


def test_sigterm_to_one_process(stopped: tuple[Path, list[Ended]], exact: Path) -> None:
    """All stop together and part from each other; with exit code 0 there is no error anywhere."""
    folder, (_, ended, _) = stopped
    assert_saved(ended, folder / "multi_turn", 0)
    assert [f"group of rank {rank} at exit: False" in ended.output for rank in (0, 1)] == [True] * 2
    assert ended.code == 0
    assert_same(folder / "multi_turn", exact / "ddp_multi_turn_whole")


def test_a_process_that_dies_brings_the_run_down_by_name(
    stopped: tuple[Path, list[Ended]],
) -> None:
    folder, (_, _, ended) = stopped
    assert ended.code != 0 and not ended.returned
    # Other processes that ended with an error are listed before.
    cause = ended.output.partition("Root Cause")[2]
    assert "rank      : 1 " in cause, ended.output[-3000:]
    assert "exitcode  : -9" in cause
    assert ended.at - (folder / "died").stat().st_mtime < 60
    assert (folder / "dying" / "iteration_00000001").is_dir()
