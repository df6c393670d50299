"""The examples run as a user would run them, for a few steps, and stay as short as they promise."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched_once import launched_once
from processes import kill_launcher

from agilerl.training.callbacks import Callback

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


def run(
    script: str,
    *arguments: str,
    cwd: Path,
    launcher: tuple[str, ...] = (),
    errors_too: bool = False,
) -> str:
    """What the program printed, with ``errors_too`` also what went to its standard error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    process = subprocess.Popen(
        [sys.executable, *launcher, str(EXAMPLES / script), *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=600)
    finally:
        kill_launcher(process)
    assert process.returncode == 0, errors[-3000:]
    return output + errors if errors_too else output


@pytest.mark.parametrize(
    ("script", "lines"), [("grpo_from_scratch.py", 250), ("grpo_basic.py", 50)]
)
def test_length(script: str, lines: int) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) <= lines


def run_here(script: Path, *arguments: str, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``python script arguments`` in the folder, without importing everything anew."""
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.slow
def test_from_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / "grpo_from_scratch.py"
    run_here(script, "--steps", "2", cwd=tmp_path, monkeypatch=monkeypatch)
    assert "held-out accuracy after" in capsys.readouterr().out


def test_basic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (EXAMPLES / "grpo_basic.py").read_text()
    shorter = tmp_path / "grpo_basic.py"
    shorter.write_text(re.sub(r"max_steps=[^,]+", "max_steps=64", source))
    run_here(shorter, cwd=tmp_path, monkeypatch=monkeypatch)
    assert "held-out accuracy" in capsys.readouterr().out
    assert (tmp_path / "runs" / "basic_checkpoint" / "actor").is_dir()


@pytest.mark.slow
def test_reward_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--iterations", "2", "--output", "run")
    run_here(EXAMPLES / "reward_list.py", *arguments, cwd=tmp_path, monkeypatch=monkeypatch)
    output = capsys.readouterr().out
    for name in ("right", "letters", "length", "lower_case", "overlong"):
        assert re.search(rf"^{name} +\d\.\d+ +-?[01]\.\d\d +-?[01]\.\d\d$", output, re.MULTILINE)
    sample = json.loads((tmp_path / "run" / "completions.jsonl").read_text().splitlines()[0])
    assert sample["rewards"]["letters"] >= sample["rewards"]["right"]


@pytest.mark.slow
def test_countdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--iterations", "2", "--prompts", "4", "--test-rows", "8", "--warm-up-steps", "2")
    run_here(EXAMPLES / "countdown.py", *arguments, cwd=tmp_path, monkeypatch=monkeypatch)
    assert re.search(r"^held-out reward, at most 1.1: \d", capsys.readouterr().out, re.MULTILINE)
    sample = json.loads(
        (tmp_path / "demo_output/countdown/completions.jsonl").read_text().splitlines()[0]
    )
    assert set(sample["rewards"]) == {"equation", "format"}
    assert re.fullmatch(r"\[\d, \d, \d\] = \d+", sample["question"])


def test_countdown_is_scored_by_its_equation() -> None:
    equation = runpy.run_path(str(EXAMPLES / "countdown.py"))["equation"]
    task = {"nums": [3, 5, 7], "target": 22}
    assert equation("<think>3*5</think><answer>3 * 5 + 7</answer>", **task) == 1.0
    assert equation("<answer>(7+3)*5</answer><answer>7+5*3</answer>", **task) == 1.0
    for wrong in (
        "3.5+7",
        "7%5+3",
        "3**5//7",
        "15+7",
        "3*5+7=22",
        "3*5+7+7",
        "3*(5+7",
        "3/(5-5)*7",
        "22",
    ):
        assert equation(f"<answer>{wrong}</answer>", **task) == 0.0
    assert equation("3*5+7", **task) == 0.0


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which the demonstration ran as a program, and what it printed."""

    def launch(folder: Path) -> None:
        output = run("grpo_reasoning.py", "--iterations", "2", "--quiet", cwd=folder)
        (folder / "output").write_text(output)

    folder = launched_once(tmp_path_factory, "demo", launch)
    return folder, (folder / "output").read_text()


def assert_demo_output(folder: Path, algorithm: str, output: str) -> None:
    written = folder / "demo_output" / f"{algorithm}-seed0"
    assert (written / "learning_curve.png").stat().st_size > 5_000
    assert (written / "run" / "metrics.csv").is_file()
    assert "held-out accuracy" in output


@pytest.mark.slow
@pytest.mark.process
def test_reasoning(demo: tuple[Path, str]) -> None:
    folder, output = demo
    assert_demo_output(folder, "grpo", output)


@pytest.mark.slow
@pytest.mark.process
def test_command_for_the_adapter_works_without_this_library(demo: tuple[Path, str]) -> None:
    folder, output = demo
    command = output[output.index(f"{sys.executable} - <<") :]
    assert "agilerl.algorithms" not in command
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gspo", "cispo"])
def test_reasoning_with_other_algorithms(
    algorithm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--algorithm", algorithm, "--iterations", "2", "--quiet")
    script = EXAMPLES / "grpo_reasoning.py"
    run_here(script, *arguments, cwd=tmp_path, monkeypatch=monkeypatch)
    assert_demo_output(tmp_path, algorithm, capsys.readouterr().out)


@pytest.mark.slow
def test_reasoning_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, arguments = EXAMPLES / "grpo_reasoning.py", ("--iterations", "2", "--quiet")
    with monkeypatch.context() as pressed:
        pressed.setattr(Callback, "on_iteration", lambda *_: signal.raise_signal(signal.SIGINT))
        run_here(script, *arguments, cwd=tmp_path, monkeypatch=monkeypatch)
    stopped = capsys.readouterr().out
    assert "stopped after iteration 1 of 2" in stopped and "--quiet --resume)" in stopped
    run_here(script, *arguments, "--resume", cwd=tmp_path, monkeypatch=monkeypatch)
    output = capsys.readouterr().out
    assert_demo_output(tmp_path, "grpo", output)
    assert "stopped" not in output
    metrics = (tmp_path / "demo_output" / "grpo-seed0" / "run" / "metrics.csv").read_text()
    assert metrics.splitlines()[-1].startswith("2,")


@pytest.mark.slow
def test_guess_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / "multiturn_guess_the_number.py"
    run_here(script, "--iterations", "1", "--quiet", cwd=tmp_path, monkeypatch=monkeypatch)
    output = capsys.readouterr().out
    folder = tmp_path / "demo_output" / "guess-the-number-seed0"
    assert (folder / "learning_curves.png").stat().st_size > 5_000
    for credit in ("trajectory", "turn"):
        assert (folder / credit / "run" / "metrics.csv").is_file()
        assert (folder / credit / "checkpoint" / "actor").is_dir()
        assert f"{credit} credit" in output
    assert output.count("episodes per second") == 2
    assert re.search(r"random player +0\.\d+ +0\.\d+", output)


@pytest.mark.slow
def test_evolve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The interpreter does this for a script that it is started with.
    monkeypatch.syspath_prepend(str(EXAMPLES))
    length = ("--iterations", "2", "--evo-steps", "1", "--evaluation-interval", "1")
    rows = ("--selection-rows", "5", "--report-rows", "8", "--quiet")
    run_here(EXAMPLES / "evolve.py", *length, *rows, cwd=tmp_path, monkeypatch=monkeypatch)
    output = capsys.readouterr().out
    folder = tmp_path / "demo_output" / "evolve"
    runs = {run["method"]: run for run in json.loads((folder / "curves.json").read_text())["runs"]}
    assert set(runs) == {"evolution", "fixed", "random"}

    consumed = [[point["samples"] for point in run["curve"]] for run in runs.values()]
    assert consumed == [[0, 1024, 2048]] * 3  # 4 agents x 32 prompts x 8 completions an iteration
    rates = {
        method: [[member["learning_rate"] for member in point["members"]] for point in run["curve"]]
        for method, run in runs.items()
    }
    assert rates["evolution"][0] == rates["fixed"][0] == rates["fixed"][-1]
    assert 30 < rates["fixed"][0][-1] / rates["fixed"][0][0] < 100
    assert rates["random"][0] == rates["random"][-1] != rates["fixed"][0]
    assert all(3e-5 <= rate <= 3e-3 for rate in rates["random"][0])

    # What the agents had after a generation is what they are evaluated with next.
    lineage = json.loads((folder / "seed0" / "evolution" / "lineage.json").read_text())
    (generation,) = lineage["generations"]
    assert rates["evolution"][-1] == [m["hyperparameters"]["lr"] for m in generation["members"]]
    assert rates["evolution"][-1] != rates["evolution"][0]
    for run in runs.values():
        for point in run["curve"]:
            members = point["members"]
            best = members[point["best"]]
            assert best["fitness"] == max(member["fitness"] for member in members)
            assert point["accuracy_of_best"] == best["accuracy"]
            # Each split has its own rows: fifths and eighths.
            for member in members:
                assert member["fitness"] * 5 == pytest.approx(round(member["fitness"] * 5))
                assert member["accuracy"] * 8 == pytest.approx(round(member["accuracy"] * 8))
    for picture in ("curves.png", "seed0/family_tree.png", "seed0/learning_rates.png"):
        assert (folder / picture).stat().st_size > 5_000
    assert "after 2,048 completions of the whole population" in output


def assert_no_engine_log(output: str) -> None:
    """vLLM writes its log to a file of its own: lines with the process, the level and the time."""
    assert not re.search(r"pid=\d+|\b(INFO|WARNING|ERROR) \d\d-\d\d ", output)


@NEEDS_VLLM
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.process
def test_reasoning_with_vllm(tmp_path: Path) -> None:
    arguments = ("--vllm", "--iterations", "2", "--quiet")
    output = run("grpo_reasoning.py", *arguments, cwd=tmp_path, errors_too=True)
    assert_demo_output(tmp_path, "grpo", output)
    assert "generation by vLLM: held-out accuracy" in output
    assert_no_engine_log(output)


@NEEDS_VLLM
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.process
def test_guess_the_number_with_vllm(tmp_path: Path) -> None:
    arguments = ("--vllm", "--credit", "turn", "--iterations", "1", "--quiet")
    output = run("multiturn_guess_the_number.py", *arguments, cwd=tmp_path, errors_too=True)
    assert "generation by vLLM" in output
    assert re.search(r"turn credit, .* 0\.\d+ +0\.\d+", output)
    assert_no_engine_log(output)


DISTRIBUTED = ("--zero-stage", "2", "--iterations", "1", "--quiet")


def assert_distributed_output(folder: Path, processes: int, output: str) -> None:
    assert output.count("held-out accuracy") == 1
    assert f"{processes} process(es)" in output
    assert (folder / "demo_output" / "distributed" / "metrics.csv").is_file()


@pytest.mark.slow
def test_distributed_on_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / "grpo_distributed.py"
    run_here(script, *DISTRIBUTED, cwd=tmp_path, monkeypatch=monkeypatch)
    assert_distributed_output(tmp_path, 1, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.process
def test_distributed_on_two_processes(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    output = run("grpo_distributed.py", *DISTRIBUTED, cwd=tmp_path, launcher=launcher)
    assert_distributed_output(tmp_path, 2, output)
