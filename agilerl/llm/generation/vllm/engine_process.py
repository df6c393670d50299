"""The process of a colocated engine: ``python -m agilerl.llm.generation.vllm.engine_process``.

Serves the trainer over a socket whose file descriptor it is given. It receives ``(number, method,
arguments)`` and sends ``(number, "done" | "failed", result)``; while it works, also ``(number,
"alive", None)``. It ends with the trainer, however that ends.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from agilerl.llm.generation.vllm.engine import Answer, Request, Sample, StagedAdapter

HEARTBEAT_SECONDS = 1.0

left_behind: set[str] = set()
"""Directories of a trainer that is killed, which nobody else would remove."""


class Server:
    """Methods that the trainer calls by name."""

    def __init__(self, settings: dict[str, Any], connection: Connection) -> None:
        from vllm import LLM

        self.llm = LLM(**settings)
        self.engine = self.llm.llm_engine
        self.connection = connection

    def load_adapter(self, adapter: StagedAdapter) -> None:
        """Serve an adapter from now on."""
        left_behind.add(os.path.dirname(adapter.path))
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

        parameters = [
            SamplingParams(**r.parameters, detokenize="stop" in r.parameters, flat_logprobs=True)
            for r in requests
        ]
        ids = self.llm.enqueue(
            [TokensPrompt(prompt_token_ids=request.prompt) for request in requests],
            parameters,
            lora_request=[_lora_request(request.adapter) for request in requests],
            use_tqdm=False,
        )
        outputs = []
        try:
            while self.engine.has_unfinished_requests():
                outputs += [output for output in self.engine.step() if output.finished]
                if self.connection.poll():
                    return None
                heartbeat()
        finally:
            self.engine.abort_request(ids, internal=True)  # those that have not finished
        return [_answer(output) for output in sorted(outputs, key=lambda o: int(o.request_id))]


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
        server = Server(settings, connection)
    except Exception as error:
        connection.send((number, "failed", repr(error)))
        raise
    connection.send((number, "done", None))
    last = 0.0

    def heartbeat() -> None:
        nonlocal last
        if time.monotonic() - last > HEARTBEAT_SECONDS:
            last = time.monotonic()
            connection.send((number, "alive", None))

    while True:
        number, method, arguments = connection.recv()
        if method == "complete":
            arguments = (*arguments, heartbeat)
        try:
            result = getattr(server, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - the trainer is told, and decides
            connection.send((number, "failed", repr(error)))
        else:
            connection.send((number, "done", result))


def _end_with_trainer(descriptor: int) -> None:
    """End at once when the trainer has died or closed its end of a pipe that nobody writes to."""
    os.read(descriptor, 1)
    for directory in left_behind:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Arguments: descriptors of the socket and of the trainer's life line, the log's directory."""
    descriptor, life_line, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    left_behind.add(directory)
    threading.Thread(target=_end_with_trainer, args=(life_line,), daemon=True).start()
    try:
        serve(Connection(descriptor))
    except EOFError:
        os._exit(0)


if __name__ == "__main__":
    main()
