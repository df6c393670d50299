"""Markdown tables of the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Result = dict[str, Any]
"""What a benchmark wrote, see ``report.run_workloads``."""


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Lay out a Markdown table."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(result: Result) -> str:
    """Say on what the figures were measured, and how."""
    versions = result["versions"]
    packages = [f"{name} {versions[name]}" for name in ("torch", "trl") if name in versions]
    shares = [workload.get("stolen_time_share") for workload in result["workloads"].values()]
    stolen = ""
    if None not in shares:
        stolen = f", at most {max(shares):.0%} of the time stolen by other machines"
    threads = "one thread" if result["threads"] == 1 else f"{result['threads']} threads"
    return (
        f"`{result['command']}`: {threads}, {result['cpu']}, {', '.join(packages)}, "
        f"{result['date'][:10]}; load at the start {result['load_average_at_start'][0]:.1f}"
        f"{stolen}."
    )


def machine(result: Result) -> str:
    """Say briefly on what the figures were measured."""
    versions = result["versions"]
    trl = f"TRL {versions['trl']}, " if "trl" in versions else ""
    return f"{trl}torch {versions['torch']}, {result['cpu']}, {result['date'][:10]}."


def grpo_step(result: Result) -> str:
    """Ours / TRL of every workload."""
    rows = [
        [
            f"`{name}`",
            _over(found, lambda side: f"{side['median_seconds']['total']:.2f} s", "total"),
            *(f"{found['ratio'][part]:.2f}" for part in ("generation", "rest")),
            _over(found, lambda side: _megabytes(side["memory_bytes"]), "memory_added"),
        ]
        for name, found in result["workloads"].items()
    ]
    return table(["workload", "CPU time", "generation", "rest", "added memory"], rows)


def _over(found: Result, figure: Callable[[Result], str], ratio: str) -> str:
    ours, theirs = (figure(found["sides"][side]) for side in ("agilerl", "trl"))
    return f"{ours} / {theirs} = {found['ratio'][ratio]:.2f}"


def time_shares(result: Result) -> str:
    """Shares of a step by kind of operator."""
    kinds = list(next(iter(result["workloads"].values()))["share"])
    rows = [
        [
            f"`{name}`",
            f"{found['median_seconds']:.2f} s",
            *(f"{found['share'][kind]:.0%}" for kind in kinds),
        ]
        for name, found in result["workloads"].items()
    ]
    return table(["workload", "CPU time", *kinds], rows)


def token_cost(result: Result) -> str:
    """Time and memory per token, relative to the smallest step."""
    rows = []
    for axis, found in result["workloads"].items():
        for factor, cost in found["factors"].items():
            relative = cost["relative_to_1x"]
            rows.append(
                [
                    axis if cost["tokens"] == _fewest_tokens(found) else "",
                    f"{factor}x",
                    f"{cost['tokens']:,}",
                    f"{cost['median_seconds']:.2f} s",
                    f"{relative['seconds_per_token']:.2f}",
                    f"{relative['arithmetic_per_token']:.2f}",
                    _megabytes(cost["memory_bytes"]),
                    f"{relative['added_bytes_per_token']:.2f}",
                ]
            )
    header = ["what grows", "", "new tokens", "CPU time", "time per token", "arithmetic per token"]
    fits = [
        f"{axis} {found['fit']['median_seconds']['largest_deviation']:.0%} (time) and "
        f"{found['fit']['added_bytes']['largest_deviation']:.0%} (memory)"
        for axis, found in result["workloads"].items()
    ]
    off = f"Largest distance of a point from a straight line: {'; '.join(fits)}."
    return table([*header, "added memory", "memory per token"], rows) + f"\n\n{off}"


def _fewest_tokens(found: Result) -> int:
    return min(cost["tokens"] for cost in found["factors"].values())


def logprob_memory(result: Result) -> str:
    """Added memory and seconds of every side."""
    sides = list(next(iter(result["workloads"].values()))["sides"])
    rows = [
        [
            f"{found['settings']['vocab_size']:,} × {found['settings']['tokens']:,}",
            *(_logprob_cell(found["sides"][side]) for side in sides),
        ]
        for found in result["workloads"].values()
    ]
    return table(["vocabulary × tokens", *sides], rows)


def _logprob_cell(figures: Result) -> str:
    if "skipped" in figures:
        return figures["skipped"]
    return f"{_megabytes(figures['memory_bytes'])}, {figures['median_seconds']:.2f} s"


def memory_estimate(result: Result) -> str:
    """Predicted / measured of every workload."""
    rows = [
        [
            f"`{name}`",
            *(
                f"{found['predicted'][stage] / 1e6:.0f} MB / "
                f"{found['measured'][stage] / 1e6:.0f} MB = {found['ratio'][stage]:.2f}"
                for stage in ("rollout", "update")
            ),
            f"{found['ratio']['peak']:.2f}",
        ]
        for name, found in result["workloads"].items()
    ]
    return table(["workload", "rollout", "update", "peak of both"], rows)


def multiturn_cache(result: Result) -> str:
    """Kept / recomputed of every workload."""
    rows = []
    for name, found in result["workloads"].items():
        kept, recomputed = found["sides"]["kept"], found["sides"]["recomputed"]
        seconds = [side["median_seconds_per_play"] for side in (kept, recomputed)]
        memory = [_megabytes(side["memory_bytes"]) for side in (kept, recomputed)]
        ratio = found["ratio"]
        rows.append(
            [
                f"`{name}`",
                f"{seconds[0]:.2f} s / {seconds[1]:.2f} s = {ratio['seconds']:.2f}",
                f"{ratio['tokens_run']:.2f}",
                f"{memory[0]} / {memory[1]} = {ratio['memory_added']:.2f}",
            ]
        )
    return table(["workload", "CPU time of a play", "tokens through the model", "memory"], rows)


def turns(result: Result) -> str:
    """Seconds of single turns of the longest episodes."""
    found = max(result["workloads"].values(), key=lambda found: found["settings"]["turns"])
    last = found["settings"]["turns"]
    shown = [turn for turn in (1, 2, 4, 8, 16, 32) if turn <= last]
    rows = [
        [side, *(f"{figures['median_seconds_per_turn'][turn - 1]:.2f} s" for turn in shown)]
        for side, figures in found["sides"].items()
    ]
    return table([f"`{found['settings']['name']}`", *(f"turn {turn}" for turn in shown)], rows)


def population(result: Result) -> str:
    """Rollouts and memory of populations."""
    rows = []
    for name, workload in result["workloads"].items():
        for size, found in workload["population"].items():
            cpu, memory = found["median_cpu_seconds"], found["memory_bytes"]
            rows.append(
                [
                    name.replace(" x ", " × ") if size == min(workload["population"]) else "",
                    size,
                    f"{cpu['one by one']:.2f} s / {cpu['batched']:.2f} s",
                    f"{found['rollouts_one_by_one_over_batched']:.2f}",
                    " / ".join(_megabytes(memory[mode]) for mode in ("batched", "one by one")),
                    f"{found['memory_ratio_to_smallest']['batched']:.2f}",
                ]
            )
    header = ["workload, prompts × completions per agent", "agents"]
    header += ["rollouts: one by one / batched", "times as fast"]
    return table([*header, "memory: batched / one by one", "over that of one agent"], rows)


def _megabytes(memory: dict[str, int]) -> str:
    return f"{memory['added'] / 1e6:.0f} MB"


TABLES: dict[str, tuple[str, tuple[Callable[[Result], str], ...]]] = {
    "grpo_step": ("grpo-step-cpu.json", (grpo_step, provenance)),
    "grpo_step ratios": ("grpo-step-cpu.json", (grpo_step, machine)),
    "time_shares": ("time-shares-cpu.json", (time_shares, provenance)),
    "token_cost": ("token-cost-cpu.json", (token_cost, provenance)),
    "logprob_memory": ("logprob-memory-cpu.json", (logprob_memory, provenance)),
    "memory_estimate": ("memory-estimate-cpu.json", (memory_estimate, provenance)),
    "multiturn_cache": ("multiturn-cache-cpu.json", (multiturn_cache, turns, provenance)),
    "population": ("population-cpu.json", (population, provenance)),
}
"""By the name of the block: file in ``results/``, and what is made of it."""
