"""The examples run as a user would run them, for a few steps, and stay as short as they promise."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import kill_launcher

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: str, cwd: Path, launcher: tuple[str, ...] = ()) -> str:
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
    return output


@pytest.mark.parametrize(
    ("script", "lines"), [("grpo_from_scratch.py", 250), ("grpo_basic.py", 50)]
)
def test_length(script: str, lines: int) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) <= lines


@pytest.mark.process
def test_from_scratch(tmp_path: Path) -> None:
    output = run("grpo_from_scratch.py", "--steps", "2", cwd=tmp_path)
    assert "held-out accuracy after" in output


def test_basic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = (EXAMPLES / "grpo_basic.py").read_text()
    shorter = tmp_path / "grpo_basic.py"
    shorter.write_text(re.sub(r"max_steps=[^,]+", "max_steps=64", source))
    runpy.run_path(str(shorter), run_name="__main__")
    assert "held-out accuracy" in capsys.readouterr().out
    assert (tmp_path / "runs" / "basic_checkpoint" / "actor").is_dir()


@pytest.mark.process
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo"])
def test_reasoning(algorithm: str, tmp_path: Path) -> None:
    output = run(
        "grpo_reasoning.py", "--algorithm", algorithm, "--iterations", "2", "--quiet", cwd=tmp_path
    )
    folder = tmp_path / "demo_output" / f"{algorithm}-seed0"
    assert (folder / "learning_curve.png").stat().st_size > 5_000
    assert (folder / "run" / "metrics.csv").is_file()
    assert "held-out accuracy" in output


@pytest.mark.process
def test_command_for_the_adapter_works_without_this_library(tmp_path: Path) -> None:
    output = run("grpo_reasoning.py", "--iterations", "1", "--quiet", cwd=tmp_path)
    command = output[output.index("python - <<") :].replace("python -", f"{sys.executable} -", 1)
    assert "agilerl.algorithms" not in command
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip()


@pytest.mark.process
def test_guess_the_number(tmp_path: Path) -> None:
    output = run("multiturn_guess_the_number.py", "--iterations", "1", "--quiet", cwd=tmp_path)
    folder = tmp_path / "demo_output" / "guess-the-number-seed0"
    assert (folder / "learning_curves.png").stat().st_size > 5_000
    for credit in ("trajectory", "turn"):
        assert (folder / credit / "run" / "metrics.csv").is_file()
        assert (folder / credit / "checkpoint" / "actor").is_dir()
        assert f"{credit} credit" in output
    assert output.count("episodes per second") == 2
    assert re.search(r"random player +0\.\d+ +0\.\d+", output)


@pytest.mark.process
@pytest.mark.parametrize("processes", [1, 2])
def test_distributed(processes: int, tmp_path: Path) -> None:
    launcher: tuple[str, ...] = ()
    if processes > 1:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    arguments = ("--zero-stage", "2", "--iterations", "1", "--quiet")
    output = run("grpo_distributed.py", *arguments, cwd=tmp_path, launcher=launcher)
    assert output.count("held-out accuracy") == 1
    assert f"{processes} process(es)" in output
    assert (tmp_path / "demo_output" / "distributed" / "metrics.csv").is_file()
