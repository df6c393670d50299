"""A run checkpoint as one of data to which rows were appended since it was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agilerl.training.population import earlier_passes
from agilerl.training.protocols import Collector


def with_appended_rows(
    state: Mapping[str, Any], collectors: Sequence[Collector]
) -> tuple[dict[str, Any], str]:
    """The state of a run, at the same place in the data that it would be resumed with.

    Args:
        state: Content of ``run_state.json``.
        collectors: Of the run that would be resumed, as many as there.

    Returns:
        The state; and why that of an environment is as it was, though its data are others: they do
        not begin with those that it was saved with. ``""``: they all do.
    """
    environments, earlier, obstacle = [], earlier_passes(state), ""
    for number, (saved, collector) in enumerate(
        zip(state["environments"], collectors, strict=True)
    ):
        try:
            grown = collector.with_appended_rows(saved)
        except ValueError as error:
            grown, obstacle = dict(saved), obstacle or f"environment {number}: {error}"
        environments.append(grown)
        if collector.training_prompts is not None and grown != saved:
            rows, before = saved["position"]["rows"], earlier[number]
            agents = [agent for agent in state["agents"] if agent["environment"] == number]
            consumed = sum(agent["steps_of_run"] for agent in agents)
            earlier[number] = before.extended(consumed, rows)
    with_data = {**state, "environments": environments}
    if any(each.passes for each in earlier):
        with_data["earlier_passes"] = [asdict(each) for each in earlier]
    return with_data, obstacle


def count_appended(state: Mapping[str, Any], grown: Mapping[str, Any]) -> list[int]:
    """Rows that each environment has more in the second state; ``[]`` if none has."""
    pairs = zip(state["environments"], grown["environments"], strict=True)
    positions = [(saved["position"], now["position"]) for saved, now in pairs]
    counts = [now.get("rows", 0) - saved.get("rows", 0) for saved, now in positions]
    return counts if any(counts) else []
