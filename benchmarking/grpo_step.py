"""Time one full GRPO step (generation, log-probs, update) of this library and of TRL, side by side.

Both sides get the same model, LoRA, prompts, lengths, sampling and reward. Each lives in a process
of its own that stays up; they take turns, one step each, so that a busy moment of the machine hits
both. Prints medians, their ratio and the memory each adds to its start, and writes all as JSON.

    python benchmarking/grpo_step.py --workload all --out benchmarking/results/NAME.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from measure import StolenTime
from report import run_workloads
from workloads import WORKLOADS, Workload, completion_lengths

SIDES = ("agilerl", "trl")
PARTS = ("total", "generation", "rest", "wall")


class Side:
    """The parent's end of one side: starts its process and asks it for steps."""

    def __init__(self, name: str, workload: Workload, steps: int, threads: int) -> None:
        self.name = name
        # A fresh interpreter each: with fork, both would start from this process's memory.
        context = multiprocessing.get_context("spawn")
        self._connection: Connection
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_run_in_child, args=(name, theirs, workload, steps, threads), daemon=True
        )
        self._process.start()
        theirs.close()
        self._receive()

    def step(self) -> dict[str, Any]:
        """Let the side do one step and return its report."""
        self._connection.send("step")
        return self._receive()

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
                f"the {self.name} side ended with exit code {self._process.exitcode}; "
                "its error is printed above"
            ) from None
        return report


def _run_in_child(*args: Any) -> None:
    from sides import run_side  # torch is imported in the children only

    run_side(*args)


def run_workload(
    workload: Workload, sides: tuple[str, ...], steps: int, threads: int
) -> dict[str, Any]:
    """Run one workload on the given sides, a step of each in turn.

    Args:
        workload: What to run.
        sides: Names out of :data:`SIDES`, in the order of their turns.
        steps: Steps that count, after the workload's warm-up steps.
        threads: CPU threads of each side; only one works at a time.

    Returns:
        Settings, the reports of every step per side, medians, and with two sides the ratios.
    """
    rounds = workload.warmup_steps + steps
    stolen = StolenTime()
    workers = [Side(name, workload, rounds, threads) for name in sides]
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(rounds):
        kind = "warm-up" if number < workload.warmup_steps else "step"
        for worker in workers:
            report = worker.step()
            _check_lengths(worker.name, report, workload, number)
            reports[worker.name].append(report)
            print(
                f"  {kind} {number}: {worker.name} {report['seconds']['total']:.2f} s", flush=True
            )
    for worker in workers:
        worker.close()
    results = {name: _summary(reports[name], workload.warmup_steps) for name in sides}
    return {
        "settings": asdict(workload),
        "sides": results,
        "ratio": _ratios(results),
        "stolen_time_share": round(stolen.share(), 3),
    }


def _check_lengths(name: str, report: dict[str, Any], workload: Workload, step: int) -> None:
    lengths, wanted = report.pop("lengths"), completion_lengths(workload, step)
    if lengths != wanted:
        raise RuntimeError(f"{name} made completions of {lengths} tokens, not of {wanted}")


def _summary(reports: list[dict[str, Any]], warmup_steps: int) -> dict[str, Any]:
    measured = [report["seconds"] for report in reports[warmup_steps:]]
    return {
        "median_seconds": {part: statistics.median(s[part] for s in measured) for part in PARTS},
        "memory_bytes": reports[-1]["memory_bytes"],
        "warmup_steps": reports[:warmup_steps],
        "steps": reports[warmup_steps:],
    }


def _ratios(results: dict[str, dict[str, Any]]) -> dict[str, float] | None:
    """Return this library over TRL, below 1 where it is better; None with one side only."""
    if set(results) != set(SIDES):
        return None
    ours, theirs = results["agilerl"], results["trl"]
    ratios = {part: ours["median_seconds"][part] / theirs["median_seconds"][part] for part in PARTS}
    memory = ours["memory_bytes"]["added"] / theirs["memory_bytes"]["added"]
    return {**ratios, "memory_added": memory}


def print_summary(name: str, result: dict[str, Any]) -> None:
    """Print one line per side and one with the ratios."""
    print(f"{name}: median CPU seconds per step, memory added at the peak")
    for side, summary in result["sides"].items():
        times = ", ".join(f"{part} {summary['median_seconds'][part]:.3f}" for part in PARTS)
        print(f"  {side:8} {times}, {summary['memory_bytes']['added'] / 1e6:.0f} MB")
    if result["ratio"]:
        print("  ratio    " + ", ".join(f"{k} {v:.2f}" for k, v in result["ratio"].items()))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--steps", type=int, help="measured steps of each side and workload")
    parser.add_argument("--only", choices=SIDES, help="run one side, without a ratio")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where to write the JSON; nowhere by default")
    arguments = parser.parse_args(argv)
    for name in ("steps", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; it must be 1 or more")
    return arguments


def main() -> None:
    """Run the workloads asked for, print and write their results."""
    arguments = parse_arguments()
    # Read by OpenMP when the children load torch.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sides = (arguments.only,) if arguments.only else SIDES
    names = list(WORKLOADS) if arguments.workload == "all" else [arguments.workload]

    def run(name: str) -> dict[str, Any]:
        workload = WORKLOADS[name]
        steps = arguments.steps or workload.measured_steps
        return run_workload(workload, sides, steps, arguments.threads)

    run_workloads(names, run, print_summary, arguments.threads, arguments.out)


if __name__ == "__main__":
    main()
