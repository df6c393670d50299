"""Plots of the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Result = dict[str, Any]


def draw_all(results: Path) -> Iterator[Path]:
    """Draw a PNG beside every file of results; yields their paths."""
    for stem, (draw, panels, width) in PLOTS.items():
        file = results / f"{stem}.json"
        if not file.is_file():
            continue
        workloads = json.loads(file.read_text())["workloads"]
        figure, axes = plt.subplots(
            1, panels, figsize=(width, 3.2), layout="constrained", squeeze=False
        )
        draw(workloads, list(axes[0]))
        for axis in axes[0]:
            axis.set_visible(axis.has_data())
        path = results / f"{stem}.png"
        # Without a date and a version in it, equal plots are equal files.
        figure.savefig(path, dpi=90, metadata={"Software": None})
        plt.close(figure)
        yield path


def grpo_step(workloads: Result, axes: list[Axes]) -> None:
    """Bars of the ratios to TRL."""
    parts = {"total": "time", "generation": "generation", "rest": "rest", "memory_added": "memory"}
    for offset, (part, label) in enumerate(parts.items()):
        ratios = [found["ratio"][part] for found in workloads.values()]
        axes[0].bar([n + 0.2 * offset for n in range(len(ratios))], ratios, 0.18, label=label)
    axes[0].set_xticks([n + 0.3 for n in range(len(workloads))], list(workloads), fontsize=8)
    axes[0].axhline(1.0, color="black", linewidth=0.8)
    axes[0].set(ylabel="this library / TRL", ylim=(0, 1.25))
    axes[0].legend(fontsize=8, ncols=4, loc="upper center")


def time_shares(workloads: Result, axes: list[Axes]) -> None:
    """A stacked bar of every workload."""
    left = dict.fromkeys(workloads, 0.0)
    for kind in next(iter(workloads.values()))["share"]:
        widths = [found["share"][kind] for found in workloads.values()]
        axes[0].barh(list(workloads), widths, left=list(left.values()), label=kind)
        left = {name: left[name] + found["share"][kind] for name, found in workloads.items()}
    axes[0].invert_yaxis()
    axes[0].set(xlabel="share of the CPU time of a step", xlim=(0, 1))
    figure = axes[0].figure
    figure.legend(fontsize=7, ncols=3, loc="outside upper center")


def token_cost(workloads: Result, axes: list[Axes]) -> None:
    """Per token against the factor, a panel for each axis."""
    curves = {
        "seconds_per_token": "CPU time",
        "added_bytes_per_token": "added memory",
        "arithmetic_per_token": "arithmetic of the model",
    }
    for axis, (name, found) in zip(axes, workloads.items(), strict=False):
        factors = [int(factor) for factor in found["factors"]]
        for key, label in curves.items():
            values = [cost["relative_to_1x"][key] for cost in found["factors"].values()]
            axis.plot(factors, values, marker="o", label=label)
        axis.axhspan(0.9, 1.1, color="gray", alpha=0.2, label="within 10%")
        axis.set_xscale("log", base=2)
        axis.set_xticks(factors, [f"{factor}x" for factor in factors])
        axis.set(title=name, ylabel="per token, 1x = 1", ylim=(0, None))
    axes[0].legend(fontsize=8)


def logprob_memory(workloads: Result, axes: list[Axes]) -> None:
    """Added memory against the vocabulary, a panel for each length."""
    lengths = sorted({found["settings"]["tokens"] for found in workloads.values()})
    for axis, length in zip(axes, lengths, strict=False):
        cases = [found for found in workloads.values() if found["settings"]["tokens"] == length]
        for side in cases[0]["sides"]:
            points = [
                (case["settings"]["vocab_size"], case["sides"][side]["memory_bytes"]["added"] / 1e6)
                for case in cases
                if "skipped" not in case["sides"][side]
            ]
            if points:
                axis.loglog(*zip(*points, strict=True), marker="o", label=side, base=10)
        axis.set(title=f"{length} tokens", xlabel="vocabulary", ylabel="added memory, MB")
    axes[0].legend(fontsize=7)


def multiturn_cache(workloads: Result, axes: list[Axes]) -> None:
    """Seconds of every turn of the longest episodes."""
    found = max(workloads.values(), key=lambda found: found["settings"]["turns"])
    for side, figures in found["sides"].items():
        seconds = figures["median_seconds_per_turn"]
        axes[0].plot(range(1, len(seconds) + 1), seconds, label=side)
    axes[0].set(
        title=found["settings"]["name"], xlabel="turn", ylabel="CPU seconds", ylim=(0, None)
    )
    axes[0].legend(fontsize=8)


def population(workloads: Result, axes: list[Axes]) -> None:
    """Memory against the number of agents."""
    for name, workload in workloads.items():
        sizes = [int(size) for size in workload["population"]]
        memory = [
            found["memory_ratio_to_smallest"]["batched"]
            for found in workload["population"].values()
        ]
        axes[0].plot(sizes, memory, marker="o", label=name)
    axes[0].set(xlabel="agents", ylabel="memory, one agent = 1", ylim=(0, None))
    axes[0].legend(fontsize=8)


PLOTS: dict[str, tuple[Callable[[Result, list[Axes]], None], int, float]] = {
    "grpo-step-cpu": (grpo_step, 1, 8.0),
    "time-shares-cpu": (time_shares, 1, 8.0),
    "token-cost-cpu": (token_cost, 2, 9.0),
    "logprob-memory-cpu": (logprob_memory, 3, 12.0),
    "multiturn-cache-cpu": (multiturn_cache, 1, 5.0),
    "population-cpu": (population, 1, 5.0),
}
"""By the stem of the file of results: how it is drawn, on how many panels, inches of width."""
