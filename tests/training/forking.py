"""Runs in child processes of their own, forked, so that nothing is imported twice."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agilerl.distributed import DistributedRanks, Ranks

TIME_LIMIT = 300


def start(action: Callable[[], object]) -> int:
    """Fork a child that ends with 0 when ``action`` returns; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        action()
        os._exit(0)
    except BaseException:  # noqa: BLE001  a child must never come out of here
        os._exit(1)


def wait(child: int) -> int:
    """Exit code of a child; one that takes too long is killed."""
    end = time.monotonic() + TIME_LIMIT
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


def on_two_ranks(folder: Path, action: Callable[[Ranks], Any]) -> list[Any]:
    """What ``action`` returns or raises on each of two real ranks, which talk through gloo.

    Of an exception comes ``(type, text with notes, code of SystemExit)``.
    """
    folder.mkdir(exist_ok=True)
    results = [folder / f"result_{rank}" for rank in (0, 1)]

    def run(rank: int) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
        )
        try:
            result = action(DistributedRanks(torch.device("cpu")))
        except BaseException as error:  # noqa: BLE001  that is what some of them are for
            notes = getattr(error, "__notes__", [])
            result = (type(error), "\n".join([str(error), *notes]), getattr(error, "code", None))
        results[rank].write_bytes(pickle.dumps(result))

    children = [start(lambda rank=rank: run(rank)) for rank in (0, 1)]  # type: ignore[misc]
    assert [wait(child) for child in children] == [0, 0]
    return [pickle.loads(result.read_bytes()) for result in results]
