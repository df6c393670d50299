"""Pictures of a run's lineage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agilerl.hpo.plots import plot_family_tree, plot_hyperparameters

RATES = [[1e-4, 1e-3], [1e-4, 1.2e-4], [8e-5, 1.2e-4]]
PARENTS = [[0, 0], [0, 1], [1, 1]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    generations = [
        {
            "iteration": 10 * (n + 1),
            "members": [
                {
                    "agent": agent,
                    "parent": PARENTS[n][agent],
                    "fitness": 0.1 * (n + agent),
                    "scored_hyperparameters": {"lr": 5e-4, "clip_coef": [0.8, 1.1]},
                    "mutation": None,
                    "hyperparameters": {"lr": RATES[n][agent], "clip_coef": [0.8, 1.2 + n]},
                }
                for agent in range(2)
            ],
        }
        for n in range(3)
    ]
    (tmp_path / "lineage.json").write_text(json.dumps({"generations": generations}))
    return tmp_path


def test_the_family_tree(run: Path) -> None:
    figure = plot_family_tree(run, run / "tree.png")
    assert (run / "tree.png").read_bytes().startswith(b"\x89PNG")
    axes = figure.axes[0]
    edges = [tuple(map(tuple, line.get_xydata())) for line in axes.lines]
    assert ((0, 0), (1, 1)) in edges  # agent 1 became a clone of agent 0
    assert ((2, 1), (3, 0)) in edges
    assert [text.get_text() for text in axes.get_xticklabels()] == ["10", "20", "30"]
    (points,) = axes.collections
    assert points.get_array().tolist() == pytest.approx([0.0, 0.1, 0.1, 0.2, 0.2, 0.3])


def test_paths_of_hyperparameters(run: Path) -> None:
    figure = plot_hyperparameters(run, run / "paths.png")
    assert (run / "paths.png").stat().st_size > 1000
    rates, bands = figure.axes
    paths = [[5e-4, *path] for path in zip(*RATES, strict=True)]
    assert [list(line.get_ydata()) for line in rates.lines] == paths
    assert list(rates.lines[0].get_xdata()) == [0, 10, 20, 30]
    assert (rates.get_yscale(), bands.get_yscale()) == ("log", "linear")
    assert list(bands.lines[1].get_ydata()) == [1.1, 1.2, 2.2, 3.2]


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        plot_family_tree(tmp_path)
    (tmp_path / "lineage.json").write_text('{"generations": []}')
    with pytest.raises(ValueError, match="no generation yet"):
        plot_hyperparameters(tmp_path)
