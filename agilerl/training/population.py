"""What the loop remembers: counters of each agent, and the best one so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agilerl.training.protocols import Agent, Collector


@dataclass
class Member:
    """One agent of the population and what the loop counts for it."""

    agent: Agent
    collector: Collector
    start_steps: int
    """Steps the agent had behind it before this run."""
    start_epochs: int
    """Passes its collector had behind it before this run."""
    consumed: int = 0
    """Steps of this run."""
    flat_iterations: int = 0
    """Iterations in a row in which no group had two different rewards."""

    @property
    def steps(self) -> int:
        """Steps in the agent's life."""
        return self.start_steps + self.consumed

    @property
    def epochs(self) -> int:
        """Passes over the data in this run."""
        return self.collector.num_epochs - self.start_epochs

    def state_dict(self) -> dict[str, Any]:
        """The counters and, to read, the agent's history; JSON-compatible."""
        agent = self.agent
        return {
            "index": agent.index,
            "algo": agent.algo,
            "folder": f"agent_{agent.index}",
            "steps": self.steps,
            "steps_of_run": self.consumed,
            "epochs_of_run": self.epochs,
            "flat_iterations": self.flat_iterations,
            "fitness_history": [float(value) for value in agent.fitness],
            "score_history": [float(value) for value in agent.scores],
            "step_history": [int(value) for value in agent.steps],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the counters; the collector is at its saved position already."""
        self.consumed = state["steps_of_run"]
        self.start_steps = state["steps"] - self.consumed
        self.start_epochs = self.collector.num_epochs - state["epochs_of_run"]
        self.flat_iterations = state["flat_iterations"]


@dataclass(frozen=True)
class Best:
    """The highest fitness seen in the run."""

    agent_index: int
    fitness: float
    iteration: int


def environments_of(members: list[Member]) -> list[Collector]:
    """The different collectors, in the order in which agents come to them."""
    return list({id(member.collector): member.collector for member in members}.values())
