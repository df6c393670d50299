"""The table that a run prints of each generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agilerl.hpo.mutation import value_text


def generation_table(number: int, generation: Mapping[str, Any]) -> str:
    """A generation as text, a line per member.

    For instance::

        Generation 2, after iteration 20
        agent  fitness  parent       lr  group_size  mutation
            0   0.4375       0   0.0001           8
            1   0.3125       0  0.00012           8  lr 0.0001 -> 0.00012

    Args:
        number: Of the generation, from 1.
        generation: As in ``lineage.json``. The fitness is that before the selection, of the agent
            that stood at the member's place; the hyperparameters are those it goes on with.
    """
    members: Sequence[Mapping[str, Any]] = generation["members"]
    names = list(dict.fromkeys(name for member in members for name in member["hyperparameters"]))
    rows = [["agent", "fitness", "parent", *names, "mutation"]]
    rows += [
        [
            str(member["agent"]),
            "-" if member["fitness"] is None else value_text(member["fitness"]),
            str(member["parent"]),
            *(_text(member["hyperparameters"], name) for name in names),
            member["mutation"] or "",
        ]
        for member in members
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    title = f"Generation {number}, after iteration {generation['iteration']}"
    return "\n".join([title, *(_line(row, widths) for row in rows)])


def _text(hyperparameters: Mapping[str, Any], name: str) -> str:
    return value_text(hyperparameters[name]) if name in hyperparameters else "-"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Numbers are aligned on the right, what was mutated on the left."""
    *numbers, mutation = cells
    aligned = [cell.rjust(width) for cell, width in zip(numbers, widths, strict=False)]
    return "  ".join([*aligned, mutation]).rstrip()
