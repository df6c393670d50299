"""A run that is resumed: its checkpoint is read and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agilerl.algorithms.checkpoint.resume import SavedAgent, read_saved_agent
from agilerl.distributed import Ranks
from agilerl.llm.checkpoint.schema import DamagedCheckpointError
from agilerl.training.checkpoint.run_checkpoint import RunCheckpoint, damaged, read_checkpoint
from agilerl.training.population import Population


def read_resume(
    path: Path, population: Population, env_name: str, ranks: Ranks
) -> tuple[RunCheckpoint, list[SavedAgent]]:
    """Read the checkpoint that a run is to be resumed from, on all ranks; changes nothing.

    Returns:
        The checkpoint and its agents, which fit the population.

    Raises:
        ValueError: If a file is damaged, or it is a checkpoint of other agents or environments.
    """
    checkpoint = ranks.on_all_ranks(lambda: _read_run(path, population, env_name))
    folders = {checkpoint.path / f"agent_{agent.index}": agent for agent in population.agents}
    try:
        return checkpoint, [read_saved_agent(agent, folder) for folder, agent in folders.items()]
    except DamagedCheckpointError as error:
        raise damaged(checkpoint.path, str(error)) from error


def _read_run(path: Path, population: Population, env_name: str) -> RunCheckpoint:
    """All but the agents."""
    checkpoint = read_checkpoint(path)
    state = checkpoint.state
    saved = state["agents"]
    _check_same(
        checkpoint,
        {
            "agents": [f"{agent['algo']} {agent['index']}" for agent in saved],
            "environment of each agent": [agent["environment"] for agent in saved],
            "environment": state["environment"],
        },
        {
            "agents": [f"{agent.algo} {agent.index}" for agent in population.agents],
            "environment of each agent": population.collector_numbers,
            "environment": env_name,
        },
    )
    for collector, theirs in zip(population.collectors, state["environments"], strict=True):
        _check_same(checkpoint, _data(theirs), _data(collector.state_dict()))
    return checkpoint


def _data(state: Mapping[str, Any]) -> dict[str, Any]:
    """What does not change in a collector's state while a run trains."""
    fixed = {name: state["position"].get(name) for name in ("rows", "seed")} | dict(state)
    del fixed["position"]
    return {f"{name} of the environment": value for name, value in fixed.items()}


def _check_same(checkpoint: RunCheckpoint, theirs: dict[str, Any], own: dict[str, Any]) -> None:
    for what in theirs | own:
        if theirs.get(what) != own.get(what):
            raise ValueError(
                f"{checkpoint.path} is a checkpoint of another run: {what}: {theirs.get(what)!r} "
                f"there, {own.get(what)!r} here. Pass the population and the environments that the "
                "run was started with, or leave resume_from out to start a new run."
            )
