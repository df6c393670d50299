"""The process of a colocated engine: ``python -m agilerl.llm.generation.vllm.engine_process``.

Serves the trainer over a socket whose file descriptor it is given. It receives ``(number, method,
arguments)`` and sends ``(number, "done" | "refused" | "failed", result)``; while it makes progress,
also ``(number, "alive", None)``. It ends with the trainer, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from agilerl.llm.generation.vllm.engine import Answer, Request, Sample, StagedAdapter

HEARTBEAT_SECONDS = 1.0
TRAINER_SECONDS = 0.2  # between two looks at whether there is one

left_behind: set[str] = set()
"""Directories of a trainer that is killed, which nobody else would remove."""


class RefusedError(Exception):
    """A request is not one that vLLM takes; the engine goes on."""


class EngineWorker:
    """Methods that the trainer calls by name."""

    def __init__(self, settings: dict[str, Any], connection: Connection) -> None:
        from vllm import LLM

        self.llm = LLM(**settings)
        self.engine = self.llm.llm_engine
        self.connection = connection

    def load_adapter(self, adapter: StagedAdapter) -> None:
        """Serve an adapter from now on."""
        left_behind.add(os.path.dirname(adapter.path))
        with refusing():
            self.engine.add_lora(_lora_request(adapter))

    def unload_adapter(self, adapter: StagedAdapter) -> None:
        """Serve it no longer, and forget what was cached of it."""
        self.engine.remove_lora(adapter.number)
        self.engine.reset_prefix_cache()

    def sleep(self, level: int) -> None:
        """Free the GPU's memory."""
        self.llm.sleep(level)

    def wake_up(self, level: int) -> None:
        """Take it again; weights that were discarded are loaded."""
        self.llm.wake_up()
        if level > 1:
            self.llm.collective_rpc("reload_weights")

    def complete(self, requests: list[Request], heartbeat: Any) -> list[Answer] | None:
        """The answers; None if the trainer has given up waiting, and sent something else."""
        from vllm import SamplingParams, TokensPrompt

        with refusing():
            parameters = [
                SamplingParams(
                    **r.parameters, detokenize="stop" in r.parameters, flat_logprobs=True
                )
                for r in requests
            ]
            ids = self.llm.enqueue(
                [TokensPrompt(prompt_token_ids=request.prompt) for request in requests],
                parameters,
                lora_request=[_lora_request(request.adapter) for request in requests],
                use_tqdm=False,
            )
        outputs: list[Any] = []
        try:
            while self.engine.has_unfinished_requests():
                outputs += [output for output in self.engine.step() if output.finished]
                if self.connection.poll():
                    return None
                heartbeat(partial(self._progress, outputs))
        finally:
            self.engine.abort_request(ids, internal=True)  # those that have not finished
        return [_answer(output) for output in sorted(outputs, key=lambda o: int(o.request_id))]

    def _progress(self, finished: list[Any]) -> tuple[int, int]:
        """Requests that are finished, and tokens of the others."""
        others = self.engine.output_processor.request_states.values()
        return len(finished), sum(each.detokenizer.num_output_tokens() for each in others)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Within it errors are those of a request, not of the engine."""
    try:
        yield
    except Exception as error:
        raise RefusedError(repr(error)) from error


def _lora_request(adapter: StagedAdapter) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.number, adapter.path)


def _answer(output: Any) -> Answer:
    prompt = output.prompt_logprobs
    return Answer(
        [
            Sample(list(o.token_ids), None if o.logprobs is None else list(o.logprobs.logprobs))
            for o in output.outputs
        ],
        None if prompt is None else list(prompt.logprobs),
    )


def serve(connection: Connection) -> None:
    """Answer until the trainer closes its end."""
    number, settings = connection.recv()
    try:
        worker = EngineWorker(settings, connection)
    except Exception as error:
        connection.send((number, "failed", repr(error)))
        raise
    connection.send((number, "done", None))
    last, progress = 0.0, None

    def heartbeat(measure: Callable[[], Any]) -> None:
        """Say that there is progress, if what ``measure`` gives has changed."""
        nonlocal last, progress
        if time.monotonic() - last > HEARTBEAT_SECONDS:
            before, last, progress = progress, time.monotonic(), measure()
            if progress != before:
                connection.send((number, "alive", None))

    while True:
        number, method, arguments = connection.recv()
        if method == "complete":
            arguments, progress = (*arguments, heartbeat), None
        try:
            result = getattr(worker, method)(*arguments)
        except RefusedError as error:
            connection.send((number, "refused", str(error)))
        except Exception as error:
            connection.send((number, "failed", repr(error)))
            raise
        else:
            connection.send((number, "done", result))


def _end_with_trainer(trainer: int) -> None:
    """End at once when the trainer has ended, whatever it has left running."""
    while os.getppid() == trainer:
        time.sleep(TRAINER_SECONDS)
    _clean_up_and_exit()


def _clean_up_and_exit() -> NoReturn:
    for directory in left_behind:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Arguments: the socket's descriptor, the trainer's process number, directories to remove."""
    descriptor, trainer, *directories = sys.argv[1:]
    left_behind.update(directories)
    threading.Thread(target=_end_with_trainer, args=(int(trainer),), daemon=True).start()
    try:
        serve(Connection(int(descriptor)))
    except (EOFError, ConnectionError):  # the trainer's end of the socket is closed
        _clean_up_and_exit()


if __name__ == "__main__":
    main()
