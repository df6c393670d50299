"""A run that goes on from a checkpoint: all is read and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agilerl.algorithms.checkpoint.resume import (
    SavedAgent,
    read_saved_agent,
)
from agilerl.distributed import Ranks
from agilerl.llm.checkpoint.schema import DamagedCheckpointError
from agilerl.training.checkpoint.run_checkpoint import (
    RunCheckpoint,
    damaged,
    read_checkpoint,
)
from agilerl.training.population import Population


@dataclass(frozen=True)
class Resume:
    """A checkpoint that fits the population."""

    checkpoint: RunCheckpoint
    agents: list[SavedAgent]

    @property
    def state(self) -> dict[str, Any]:
        """The state of the run."""
        return self.checkpoint.state

    def restore_agents(self) -> None:
        """Set the agents back."""
        for agent in self.agents:
            agent.restore()


def read_resume(path: Path, population: Population, env_name: str, ranks: Ranks) -> Resume:
    """Read the checkpoint that a run is to be resumed from; changes nothing.

    Args:
        path: The checkpoint.
        population: Who is to train on.
        env_name: Name of the environment.
        ranks: The processes of the run; each reads it, and what one refuses, all do.

    Raises:
        ValueError: If a file is damaged, or it is a checkpoint of other agents or environments.
    """
    checkpoint = ranks.on_all_ranks(lambda: _read_run(path, population, env_name))
    return Resume(checkpoint, [_read_agent(checkpoint, agent) for agent in population.agents])


def _read_run(path: Path, population: Population, env_name: str) -> RunCheckpoint:
    """All but the agents."""
    checkpoint = read_checkpoint(path)
    state = checkpoint.state
    _check_population(checkpoint, population)
    if state["environment"] != env_name:
        raise _another(checkpoint, "environment", state["environment"], env_name)
    for collector, saved in zip(population.collectors, state["environments"], strict=True):
        _check_data(checkpoint, saved, collector.state_dict())
    return checkpoint


def _read_agent(checkpoint: RunCheckpoint, agent: Any) -> SavedAgent:
    try:
        return read_saved_agent(agent, checkpoint.path / f"agent_{agent.index}")
    except DamagedCheckpointError as error:
        raise damaged(checkpoint.path, str(error)) from error


def _check_population(checkpoint: RunCheckpoint, population: Population) -> None:
    saved = checkpoint.state["agents"]
    pairs = {
        "agents": (
            [f"{agent['algo']} {agent['index']}" for agent in saved],
            [f"{agent.algo} {agent.index}" for agent in population.agents],
        ),
        "environment of each agent": (
            [agent["environment"] for agent in saved],
            population.collector_numbers,
        ),
    }
    for what, (theirs, own) in pairs.items():
        if theirs != own:
            raise _another(checkpoint, what, theirs, own)


def _check_data(
    checkpoint: RunCheckpoint, saved: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    """Compare what does not change while a run goes on: prompts, number of rows, seed."""
    facts = [
        {**_fixed(state.get("position")), **{k: v for k, v in state.items() if k != "position"}}
        for state in (saved, own)
    ]
    for name in facts[0] | facts[1]:
        theirs, mine = (each.get(name) for each in facts)
        if theirs != mine:
            raise _another(checkpoint, f"{name} of the environment", theirs, mine)


def _fixed(position: Any) -> dict[str, Any]:
    known = position if isinstance(position, Mapping) else {}
    return {name: known[name] for name in ("rows", "seed") if name in known}


def _another(checkpoint: RunCheckpoint, what: str, theirs: Any, own: Any) -> ValueError:
    return ValueError(
        f"{checkpoint.path} is a checkpoint of another run: {what}: {theirs!r} there, {own!r} "
        "here. Pass the population and the environments that the run was started with, or leave "
        "resume_from out to start a new run."
    )
