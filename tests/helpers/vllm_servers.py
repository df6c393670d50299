"""Real vLLM servers on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

import agilerl
from agilerl.testing import bundled_model_path

TRAINER_LOGPROBS = (
    "--worker-extension-cls",
    "agilerl.llm.generation.vllm.sampler_extension.TrainerLogprobs",
)
API_KEY = "the-tests-key"
START_SECONDS = 300.0


class LocalServer:
    """A vLLM server of the bundled model on a free port, killed at the latest with the test run.

    Args:
        folder: For its log.
        flags: More of them.
        port: None: any free one.
    """

    def __init__(self, folder: Path, *flags: str, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"server-{self.port}.log"
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(bundled_model_path()), "--dtype", "float32", "--enforce-eager",
            "--max-model-len", "128", "--generation-config", "vllm",
            "--enable-lora", "--max-lora-rank", "16", "--max-loras", "4",
            "--no-enable-chunked-prefill",  # in which the CPU build crashes if requests have seeds
            "--block-size", "32",
            "--kv-cache-memory-bytes", str(2**28),
            "--host", "127.0.0.1", "--port", str(self.port), *flags,
        ]  # fmt: skip
        with self._log.open("wb") as log:
            keeper = subprocess.Popen(
                [sys.executable, __file__, str(test_run()), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | environment(),
                start_new_session=True,
            )
        assert keeper.stdout is not None
        self.pid = int(keeper.stdout.readline())

    def wait(self) -> None:
        """Until it works.

        Raises:
            RuntimeError: It ended, or takes too long; with its log.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and psutil.pid_exists(self.pid):
            try:
                if httpx.get(f"{self.url}/health", trust_env=False).is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        self.kill()
        raise RuntimeError(self._log.read_text()[-5000:])

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """End all of its processes, if any is still there."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)


def environment() -> dict[str, str]:
    source = str(Path(agilerl.__file__).parents[1])
    return {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_API_KEY": API_KEY,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_run() -> int:
    """The process that ends last: that of the run, or its worker's parent."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def keep(owner: int, command: list[str]) -> None:
    """Run a command, and kill all of its processes when its owner has ended."""
    # What it prints goes to the log.
    process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    print(process.pid, flush=True)
    running = psutil.Process(owner)
    while process.poll() is None:
        if not running.is_running() or running.status() == psutil.STATUS_ZOMBIE:
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.5)


if __name__ == "__main__":
    keep(int(sys.argv[1]), sys.argv[2:])
