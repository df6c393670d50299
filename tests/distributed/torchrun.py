"""Scripts on several ranks, which can neither outlive nor hang the test that starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from processes import kill_launcher

HERE = Path(__file__).parent
PATHS = [str(HERE.parents[1]), str(HERE.parent / "helpers")]


def torchrun(script: Path, *arguments: str, ranks: int = 2, seconds: float = 900) -> str:
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
        "PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")]),
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
        kill_launcher(process)
        output, _ = process.communicate()
        raise RuntimeError(f"not done after {seconds} s:\n{output[-20000:]}") from None
    if process.returncode:
        raise RuntimeError(f"a rank failed:\n{output[-20000:]}")
    return output
