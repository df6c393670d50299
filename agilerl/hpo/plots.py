"""Pictures of a run with evolution, made from its ``lineage.json``; they need matplotlib."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agilerl.checks import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_family_tree(run: str | Path, file: str | Path | None = None) -> Figure:
    """Draw who descends from whom: a column per generation, fitness as colour.

    Args:
        run: The run directory.
        file: Where to save the picture, such as ``tree.png``; None: nowhere.

    Returns:
        The figure.

    Raises:
        FileNotFoundError: If the run has no ``lineage.json``.
        ValueError: If it has no generation yet.
        ImportError: If matplotlib is not installed.
    """
    generations = read_generations(run)
    figure = _new_figure()
    axes = figure.subplots()
    row = {member["agent"]: n for n, member in enumerate(generations[0]["members"])}
    xs, ys, fitness = [], [], []
    for column, generation in enumerate(generations):
        for member in generation["members"]:
            xs.append(column)
            ys.append(row[member["agent"]])
            fitness.append(_number(member["fitness"]))
            moved = member["parent"] != member["agent"]
            axes.plot(
                [column, column + 1],
                [row[member["parent"]], row[member["agent"]]],
                color="tab:orange" if moved else "lightgray",
                linewidth=1.5 if moved else 1.0,
                zorder=1,
            )
    points = axes.scatter(xs, ys, c=fitness, cmap="viridis", s=70, zorder=2)
    figure.colorbar(points, ax=axes, label="fitness")
    iterations = [str(generation["iteration"]) for generation in generations]
    axes.set_xticks(range(len(iterations)), iterations)
    axes.set_yticks(list(row.values()), [f"agent {index}" for index in row])
    axes.set_xlabel("iteration of the selection")
    return _saved(figure, file)


def plot_hyperparameters(run: str | Path, file: str | Path | None = None) -> Figure:
    """Draw each hyperparameter's path over the generations, a line per member, from the start.

    Args:
        run: The run directory.
        file: Where to save the picture, such as ``hyperparameters.png``; None: nowhere.

    Returns:
        The figure.

    Raises:
        FileNotFoundError: If the run has no ``lineage.json``.
        ValueError: If it has no generation yet, or no hyperparameter that is mutated.
        ImportError: If matplotlib is not installed.
    """
    generations = read_generations(run)
    names = list(generations[0]["members"][0]["hyperparameters"])
    require(bool(names), f"the agents of {run} have no hyperparameters that are mutated")
    figure = _new_figure(height=2.2 * len(names))
    iterations = [0, *(generation["iteration"] for generation in generations)]
    agents = [member["agent"] for member in generations[0]["members"]]
    for name, axes in zip(names, figure.subplots(len(names), 1, squeeze=False)[:, 0], strict=True):
        paths = [
            [
                _number(generations[0]["members"][n]["scored_hyperparameters"][name]),
                *(_number(each["members"][n]["hyperparameters"][name]) for each in generations),
            ]
            for n in range(len(agents))
        ]
        for agent, path in zip(agents, paths, strict=True):
            # A value holds until the next selection.
            axes.step(iterations, path, "o-", where="post", markersize=3, label=f"agent {agent}")
        values = [value for path in paths for value in path]
        if min(values) > 0 and max(values) > 10 * min(values):
            axes.set_yscale("log")
        axes.set_ylabel(name)
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("iteration of the selection")
    figure.axes[0].legend(fontsize="small")
    return _saved(figure, file)


def read_generations(run: str | Path) -> list[dict[str, Any]]:
    """The generations in a run's ``lineage.json``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it holds none yet.
    """
    path = Path(run).expanduser() / "lineage.json"
    generations: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["generations"]
    require(bool(generations), f"{path} holds no generation yet")
    return generations


def _number(value: Any) -> float:
    """A band's upper bound; another value as it is, and NaN where there is none."""
    if isinstance(value, list):
        return float(value[1])
    return math.nan if value is None else float(value)


def _new_figure(height: float = 4.0) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error
    return Figure(figsize=(9.0, height), layout="constrained")


def _saved(figure: Figure, file: str | Path | None) -> Figure:
    if file is not None:
        figure.savefig(Path(file).expanduser(), dpi=120)
    return figure
