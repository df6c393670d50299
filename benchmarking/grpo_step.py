"""Time one full GRPO step (generation, log-probs, update) of this library and of TRL, side by side.

Both sides get the same model, LoRA, prompts, lengths, sampling and reward. Each runs in a process
of its own, and they take turns, one step each, so that other load on the machine affects both.
Prints medians, their ratios and the memory that each side adds, and writes all as JSON.

    .venv/bin/python benchmarking/grpo_step.py --workload all --out build/grpo-step.json
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import asdict, replace
from typing import Any

from alternating import alternate
from report import benchmark_parser, count, run_workloads
from workloads import WORKLOADS, Workload, shrunk

SIDES = ("agilerl", "trl")
PARTS = ("total", "generation", "rest", "wall")


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
    reports = alternate(
        {name: (name, workload) for name in sides}, workload.warmup_steps, steps, threads
    )
    results = {name: _summary(reports[name], workload.warmup_steps) for name in sides}
    return {
        "settings": asdict(replace(workload, measured_steps=steps)),
        "sides": results,
        "ratio": _ratios(results),
    }


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
    parser = benchmark_parser(__doc__)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--steps", type=count, help="measured steps of each side and workload")
    parser.add_argument("--side", choices=SIDES, help="run one side, without a ratio")
    return parser.parse_args(argv)


def main() -> None:
    """Run the workloads asked for, print and write their results."""
    arguments = parse_arguments()
    # Read by OpenMP when the children load torch.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sides = (arguments.side,) if arguments.side else SIDES
    workloads = WORKLOADS
    if arguments.workload != "all":
        workloads = {arguments.workload: WORKLOADS[arguments.workload]}
    if arguments.quick:
        workloads = {name: shrunk(workload) for name, workload in workloads.items()}

    def run(name: str) -> dict[str, Any]:
        workload = workloads[name]
        steps = arguments.steps or workload.measured_steps
        return run_workload(workload, sides, steps, arguments.threads)

    steps = arguments.steps  # None: as many as each workload's settings say
    run_workloads(workloads, run, print_summary, arguments.threads, arguments.out, steps=steps)


if __name__ == "__main__":
    main()
