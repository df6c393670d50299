"""An engine process beside the trainer, on its device and for its rank alone.

In a process of its own, because vLLM in the trainer's would take over more than its own part:
several engines share one global state, which the first that ends tears down, it initialises
torch.distributed and replaces ``torch.set_num_threads``, and a call that hangs could not be ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from agilerl.llm.generation.vllm.config import VLLMConfig
from agilerl.llm.generation.vllm.engine import Answer, EngineError, Request, StagedAdapter

logger = logging.getLogger(__name__)

LOG_LINES, LINE_LENGTH = 20, 500
END_SECONDS = 30.0
EXTENSION = "agilerl.llm.generation.vllm.sampler_extension.TrainerLogprobs"


def engine_settings(
    config: VLLMConfig,
    model: str,
    tokenizer: str | None,
    dtype: str,
    max_model_len: int,
    seed: int,
    *,
    on_gpu: bool,
) -> dict[str, Any]:
    """Arguments of :class:`vllm.LLM`.

    Without a ``tokenizer`` there can be no stop sequences.
    """
    eager = config.enforce_eager
    settings: dict[str, Any] = {
        "model": model,
        "dtype": config.dtype or dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype or "auto",
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enforce_eager": not on_gpu if eager is None else eager,
        "enable_lora": True,
        "max_lora_rank": _allowed_rank(config.max_lora_rank),
        "max_loras": config.max_loras,
        "tokenizer": tokenizer,
        "skip_tokenizer_init": tokenizer is None,
        "generation_config": "vllm",  # the model's own would change the defaults of sampling
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        "seed": seed,
    }
    if config.kv_cache_memory_bytes is not None or not on_gpu:
        settings["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes or 2**30
    if on_gpu:
        settings["gpu_memory_utilization"] = config.gpu_memory_utilization
        settings["enable_sleep_mode"] = config.sleep_mode
    else:
        # Prompts run whole: vLLM cannot take back the random numbers that a part of one drew,
        # because torch's generator has no offset on a CPU.
        settings["enable_chunked_prefill"] = False
        # Whole blocks are shared: of 128 tokens, the default here, short prompts fill none.
        settings["block_size"] = 32
    return settings


def _allowed_rank(rank: int) -> int:
    """The smallest that vLLM has kernels for."""
    return next((n for n in (8, 16, 32, 64, 128, 256, 320, 512) if n >= rank), rank)


class ColocatedEngine:
    """Starts an engine process and speaks with it; ended with the last reference to this object.

    Args:
        settings: Arguments of :class:`vllm.LLM`.
        config: Its timeouts, and whether it sleeps.
        device: The trainer's.
        model_directory: Of a model that was written for this engine, and is removed with it.

    Raises:
        EngineError: The engine did not start.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        config: VLLMConfig,
        device: torch.device,
        model_directory: Path | None = None,
    ) -> None:
        self._config = config
        self._sleeps = config.sleep_mode and device.type == "cuda"
        if config.sleep_mode and not self._sleeps:
            logger.info("sleep_mode has no effect on %s: vLLM has no sleep there", device.type)
        self._users, self._call = 0, 0
        self._sending = threading.Lock()
        self._directory = Path(tempfile.mkdtemp(prefix="agilerl-vllm-"))
        directories = [self._directory, *filter(None, [model_directory])]
        self._connection, theirs = Pipe()
        arguments = [theirs.fileno(), os.getpid(), *directories]
        with (self._directory / "engine.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.engine_process", *map(str, arguments)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(config, device),
                start_new_session=True,  # Ctrl-C is for the trainer, which ends the engine
            )
        theirs.close()
        self.close = weakref.finalize(
            self,
            _end,
            os.getpid(),
            self._process,
            self._connection,
            self._sending,
            directories,
        )
        self._send(settings)
        try:
            self._wait(config.startup_timeout)
        except BaseException:
            self.close()
            raise
        if self._sleeps:
            self._ask("sleep", config.sleep_mode_level)

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    @property
    def sleep_level(self) -> int:
        """How deeply it sleeps between rollouts; 0: not at all."""
        return self._config.sleep_mode_level if self._sleeps else 0

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Within it the engine holds its GPU memory; may be nested."""
        if self._sleeps and self._users == 0:
            torch.cuda.empty_cache()  # what the trainer keeps for later would be in its way
            self._ask("wake_up", self._config.sleep_mode_level)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._sleeps and self._users == 0 and not self.ended:
                self._ask("sleep", self._config.sleep_mode_level)

    def load_adapter(self, adapter: StagedAdapter) -> None:
        """Serve an adapter from now on."""
        self._ask("load_adapter", adapter)

    def unload_adapter(self, adapter: StagedAdapter) -> None:
        """Serve it no longer, and forget what was cached of it."""
        self._ask("unload_adapter", adapter)

    def complete(self, requests: Sequence[Request]) -> list[Answer]:
        """Answers in the order of the requests; see :class:`.engine.Engine`."""
        answers: list[Answer] = self._ask("complete", list(requests))
        return answers

    def complete_on_each(self, request: Request) -> dict[str, Answer]:
        """The one engine's answer."""
        return {"vLLM": self.complete([request])[0]}

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._send(method, arguments)
        return self._wait(self._config.request_timeout)

    def _send(self, *message: Any) -> None:
        self._call += 1
        content = (self._call, *message)

        def send() -> None:
            # One that waits for a hung engine ends with it; `_wait` tells the caller.
            with self._sending, contextlib.suppress(OSError):
                self._connection.send(content)

        threading.Thread(target=send, daemon=True).start()

    def _wait(self, timeout: float) -> Any:
        """The answer to what was sent last; ``timeout`` seconds without a sign of life end it."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    self._end_and_raise(f"made no progress for {timeout:g} s, and was ended")
                call, kind, result = self._connection.recv()
            except (EOFError, OSError) as error:
                self._end_and_raise("has ended", error)
            if call != self._call:  # of a call that an exception interrupted
                continue
            if kind == "alive":
                deadline = time.monotonic() + timeout
            elif kind == "refused":
                self._raise(f"refused a request: {result}")
            elif kind == "failed":
                self._end_and_raise(f"failed: {result}")
            else:
                return result

    def _end_and_raise(self, what: str, cause: BaseException | None = None) -> NoReturn:
        """End the engine, and raise EngineError."""
        try:
            self._raise(what, cause)
        finally:
            self.close()

    def _raise(self, what: str, cause: BaseException | None = None) -> NoReturn:
        """Raise EngineError with the last lines of the engine's log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0 if cause is not None else 0.0)
        code = self._process.poll()
        ended = f" (exit status {code})" if code is not None else ""
        with contextlib.suppress(OSError):
            text = (self._directory / "engine.log").read_text(errors="replace")
            # vLLM logs the whole batch that it failed on, in one line.
            lines = [line[:LINE_LENGTH] for line in text.splitlines()[-LOG_LINES:]]
            what += f"{ended}. Its last log lines:\n" + "\n".join(lines)
        raise EngineError(f"the vLLM engine (process {self._process.pid}) {what}") from cause


def _environment(config: VLLMConfig, device: torch.device) -> dict[str, str]:
    """The engine's: it is no rank of the trainer's, and sees no GPU but its own."""
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in launched and not name.startswith(("MASTER_", "TORCHELASTIC_", "ACCELERATE_"))
    }
    # Where agilerl itself lies, in case that it is not installed.
    source = str(Path(__file__).resolve().parents[4])
    paths = [source, *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # the last lines should say something
    if device.type == "cuda":
        own = torch.cuda.current_device() if device.index is None else device.index
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        every = range(torch.cuda.device_count())
        devices = visible.split(",") if visible else list(map(str, every))
        # The trainer's, then as many others as tensor parallelism takes.
        chosen = [devices[own], *devices[:own], *devices[own + 1 :]][: config.tensor_parallel_size]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    else:
        # Trainer and engine work in turns, so neither is bound to cores of its own.
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return environment


def _end(
    owner: int,
    process: subprocess.Popen[bytes],
    connection: Connection,
    sending: threading.Lock,
    directories: Sequence[Path],
) -> None:
    if os.getpid() != owner:  # a fork of the trainer ends, whose engine it is
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with the workers of tensor parallelism
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        logger.error("The vLLM engine (process %d) could not be killed", process.pid)
    if sending.acquire(timeout=END_SECONDS):  # what could not be sent has failed now
        connection.close()
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
