"""The dimensionless figures of the results: those by which two machines can be compared.

They are the ratios and shares that ``tables.py`` shows, and the ratios to the other sides of
``logprob_memory``, of which the table shows megabytes and seconds. Left out is what the settings
alone decide: ratios of a case to itself and the arithmetic per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Workload = dict[str, Any]
"""What a benchmark found on one workload, see ``report.run_workloads``."""


@dataclass(frozen=True)
class Figures:
    """The figures of a workload by their path in its result, such as ``tiny.generation``."""

    ratios: dict[str, float] = field(default_factory=dict)
    """Of two quantities of the same unit."""
    shares: dict[str, float] = field(default_factory=dict)
    """Of a whole, between 0 and 1."""


def grpo_step(found: Workload) -> Figures:
    """To TRL. Not of the time by the clock, in which other programs take part."""
    ratios = found["ratio"] or {}
    return Figures({part: ratio for part, ratio in ratios.items() if part != "wall"})


def time_shares(found: Workload) -> Figures:
    """Of a step."""
    return Figures(shares=found["share"])


def token_cost(found: Workload) -> Figures:
    """To 1x, and how far the points are from a straight line."""
    ratios = {
        f"{factor}x.{key}": cost["relative_to_1x"][key]
        for factor, cost in found["factors"].items()
        if factor != "1"
        for key in ("seconds_per_token", "added_bytes_per_token")
    }
    fits = {
        f"{key}.largest_deviation": fit["largest_deviation"] for key, fit in found["fit"].items()
    }
    return Figures(ratios, fits)


def logprob_memory(found: Workload) -> Figures:
    """To the other sides that ran."""
    return Figures(
        {
            f"{side}.{key}": ratio
            for side, ratios in found["ratio"].items()
            if side != "agilerl"
            for key, ratio in ratios.items()
        }
    )


def memory_estimate(found: Workload) -> Figures:
    """Predicted to measured."""
    return Figures(found["ratio"])


def multiturn_cache(found: Workload) -> Figures:
    """Kept to recomputed, of whole plays."""
    return Figures({key: found["ratio"][key] for key in ("seconds", "tokens_run", "memory_added")})


def population(found: Workload) -> Figures:
    """One by one to batched (time), and to a single agent (memory)."""
    ratios = {}
    for size, cost in found["population"].items():
        ratios[f"{size}.times_as_fast"] = cost["rollouts_one_by_one_over_batched"]
        ratios[f"{size}.memory"] = cost["memory_ratio_to_smallest"]["batched"]
    return Figures(ratios)


FIGURES: dict[str, Callable[[Workload], Figures]] = {
    "grpo-step-cpu.json": grpo_step,
    "time-shares-cpu.json": time_shares,
    "token-cost-cpu.json": token_cost,
    "logprob-memory-cpu.json": logprob_memory,
    "memory-estimate-cpu.json": memory_estimate,
    "multiturn-cache-cpu.json": multiturn_cache,
    "population-cpu.json": population,
}
"""By the file in ``results/``: the figures of one of its workloads."""
