"""Two real gloo ranks, started once; the tests read what they wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

HERE = Path(__file__).parent


def run_ranks(script: Path, *arguments: str, ranks: int = 2, seconds: float = 240) -> str:
    """Run a script on several ranks and return what they printed.

    When time is up, all of them are killed.

    Raises:
        RuntimeError: A rank failed, or they took too long; with the end of the output.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(script), *arguments]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # The ranks are sessions of their own, so there is no one group to kill.
        parent = psutil.Process(process.pid)
        for each in [*parent.children(recursive=True), parent]:
            each.kill()
        output, _ = process.communicate()
        raise RuntimeError(f"not done after {seconds} s:\n{output[-6000:]}") from None
    if process.returncode:
        raise RuntimeError(f"a rank failed:\n{output[-6000:]}")
    return output


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks found, all cases under all settings; they are started for the first test."""
    path = tmp_path_factory.mktemp("ranks")
    run_ranks(HERE / "run_ranks.py", str(path))
    return path


@pytest.fixture
def ranks(folder: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank found, in their order, for a ``(setting, case)``."""
    setting, case = request.param
    paths = [folder / f"{setting}-{case}-{rank}.pt" for rank in range(2)]
    return [torch.load(path, weights_only=False) for path in paths]
