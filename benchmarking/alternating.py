"""Run benchmarks in separate processes, so that the memory of one does not count for another."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from workloads import Workload, completion_lengths


class Side:
    """The parent's end of one library on one workload: starts its process and asks for steps.

    Args:
        library: ``"agilerl"`` or ``"trl"``.
        workload: What it runs.
        steps: How many steps it will be asked for, warm-up included.
        threads: CPU threads torch may use there.
    """

    def __init__(self, library: str, workload: Workload, steps: int, threads: int) -> None:
        self.library, self.workload = library, workload
        # A fresh interpreter each: with fork, both would start from this process's memory.
        context = multiprocessing.get_context("spawn")
        self._connection: Connection
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_run_in_child, args=(library, theirs, workload, steps, threads), daemon=True
        )
        self._process.start()
        theirs.close()
        self._receive()

    def step(self, number: int) -> dict[str, Any]:
        """Let the side do one step and return its report.

        Raises:
            RuntimeError: Its process ended, or completions have other lengths than the workload's.
        """
        self._connection.send("step")
        report = self._receive()
        lengths, wanted = report.pop("lengths"), completion_lengths(self.workload, number)
        if lengths != wanted:
            raise RuntimeError(
                f"{self.library} made completions of {lengths} tokens, not of {wanted}"
            )
        return report

    def close(self) -> None:
        """Wait for the process, which ends by itself after its last step."""
        self._process.join(timeout=60)
        self._process.terminate()

    def _receive(self) -> dict[str, Any]:
        try:
            report: dict[str, Any] = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"the {self.library} side ended with exit code {self._process.exitcode}; "
                "its error is printed above"
            ) from None
        return report


def _run_in_child(*args: Any) -> None:
    from sides import run_side  # torch is imported in the children only

    run_side(*args)


def alternate(
    sides: Mapping[str, tuple[str, Workload]], warmup_steps: int, steps: int, threads: int
) -> dict[str, list[dict[str, Any]]]:
    """Let sides take turns, one step each, so that other load on the machine affects all of them.

    Args:
        sides: By label, the library and its workload, in the order of their turns.
        warmup_steps: Steps of each before those that count.
        steps: Steps that count.
        threads: CPU threads of each side; only one works at a time.

    Returns:
        The reports of all steps by label, warm-up first.
    """
    rounds = warmup_steps + steps
    workers = {
        label: Side(library, workload, rounds, threads)
        for label, (library, workload) in sides.items()
    }
    reports: dict[str, list[dict[str, Any]]] = {label: [] for label in sides}
    for number in range(rounds):
        kind = "warm-up" if number < warmup_steps else "step"
        for label, worker in workers.items():
            report = worker.step(number)
            reports[label].append(report)
            print(f"  {kind} {number}: {label} {report['seconds']['total']:.2f} s", flush=True)
    for worker in workers.values():
        worker.close()
    return reports


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
