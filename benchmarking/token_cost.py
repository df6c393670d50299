"""Time and memory of a training step with 1 to 16 times the tokens, this library alone.

The workload ``tiny`` with longer completions, then with more prompts. The sizes take turns, each in
a process of its own. The results include cost per token relative to 1x and the deviation from
linear growth.

    .venv/bin/python benchmarking/token_cost.py --out build/token-cost.json
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from alternating import alternate
from report import benchmark_parser, count, run_workloads
from workloads import WORKLOADS, Workload, shrunk

FACTORS = (1, 2, 4, 8, 16)
AXES = {"completion length": "new_tokens", "batch": "prompts"}
"""What grows, and the field of the workload."""


def run_axis(
    base: Workload, field: str, factors: Sequence[int], steps: int, threads: int
) -> dict[str, Any]:
    """Measure one axis, all sizes in turn.

    Args:
        base: The smallest step.
        field: Of the workload; multiplied by each factor.
        factors: From 1 up.
        steps: Measured steps of each size, after one to warm up.
        threads: CPU threads of torch.

    Returns:
        Settings, the figures of each factor, and the straight lines through them.
    """
    sizes = {n: replace(base, **{field: n * getattr(base, field)}) for n in factors}
    sides = {f"{n}x": ("agilerl", workload) for n, workload in sizes.items()}
    reports = alternate(sides, 1, steps, threads)
    by_factor = {
        str(n): _cost(reports[f"{n}x"][1:], base, workload) for n, workload in sizes.items()
    }
    found = list(by_factor.values())
    for cost in found:
        cost["relative_to_1x"] = {
            key: cost[key] / found[0][key]
            for key in (
                "seconds_per_token",
                "added_bytes_per_token",
                "arithmetic_per_token",
            )
        }
    tokens = [cost["tokens"] for cost in found]
    return {
        "settings": asdict(replace(base, warmup_steps=1, measured_steps=steps)),
        "field": field,
        "factors": by_factor,
        "fit": {
            key: line(tokens, [cost[key] for cost in found])
            for key in ("median_seconds", "added_bytes")
        },
    }


def _cost(reports: list[dict[str, Any]], base: Workload, workload: Workload) -> dict[str, Any]:
    tokens = workload.sequences * workload.new_tokens
    seconds = statistics.median(report["seconds"]["total"] for report in reports)
    memory = reports[-1]["memory_bytes"]
    return {
        "tokens": tokens,
        "median_seconds": seconds,
        "median_seconds_generation": statistics.median(
            report["seconds"]["generation"] for report in reports
        ),
        "memory_bytes": memory,
        "added_bytes": memory["added"],
        "seconds_per_token": seconds / tokens,
        "added_bytes_per_token": memory["added"] / tokens,
        "arithmetic_per_token": arithmetic_per_token(workload),
        "seconds": [report["seconds"]["total"] for report in reports],
    }


def arithmetic_per_token(workload: Workload) -> float:
    """Multiply-adds of one forward of a completion token: weights, and attention to what precedes.

    It is what the model itself costs: where this grows with the length, no code is linear.
    """
    width, layers = workload.hidden_size, workload.layers
    weights = layers * (4 + 3 * workload.intermediate_factor) * width**2
    weights += width * workload.vocab_size
    prompt = (workload.shortest_prompt + workload.longest_prompt) / 2
    attended = prompt + workload.new_tokens / 2
    return weights + layers * 2 * width * attended


def line(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Fit ``y = intercept + slope * x``, every point weighted by 1 / y.

    Returns:
        Slope, intercept, and the largest deviation of a point from the line, as a share of it.
    """
    weights = [1 / value**2 for value in y]
    total = sum(weights)
    mean_x = sum(w * value for w, value in zip(weights, x, strict=True)) / total
    mean_y = sum(w * value for w, value in zip(weights, y, strict=True)) / total
    spread = sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    shared = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True))
    slope = shared / spread
    intercept = mean_y - slope * mean_x
    deviations = [abs(intercept + slope * a - b) / b for a, b in zip(x, y, strict=True)]
    return {"slope": slope, "intercept": intercept, "largest_deviation": max(deviations)}


def print_summary(name: str, result: dict[str, Any]) -> None:
    """Print a line per factor and the fits."""
    print(f"{name}: CPU seconds and added memory of a step, per token relative to 1x")
    for factor, cost in result["factors"].items():
        relative = cost["relative_to_1x"]
        print(
            f"  {factor:>3}x {cost['median_seconds']:8.2f} s {cost['added_bytes'] / 1e6:6.0f} MB, "
            f"per token {relative['seconds_per_token']:.2f} and "
            f"{relative['added_bytes_per_token']:.2f}, "
            f"arithmetic {relative['arithmetic_per_token']:.2f}"
        )
    for key, fit in result["fit"].items():
        print(f"  {key}: at most {fit['largest_deviation']:.1%} off a straight line")


def main() -> None:
    """Measure both axes, print and write the result."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--axis", choices=AXES, action="append", help="by default both")
    parser.add_argument("--steps", type=count, default=5, help="measured steps of each size")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # read when the children load torch
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    base, factors, steps, axes = WORKLOADS["tiny"], FACTORS, given.steps, given.axis or AXES
    if given.quick:
        base, factors, steps, axes = shrunk(base), (1, 2), 1, ("completion length",)

    def run(axis: str) -> dict[str, Any]:
        return run_axis(base, AXES[axis], factors, steps, given.threads)

    run_workloads(axes, run, print_summary, given.threads, given.out, steps=steps)


if __name__ == "__main__":
    main()
