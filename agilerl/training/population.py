"""The population: which agents train, what each collects from, and which was best so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agilerl.checks import missing_members, require
from agilerl.training.protocols import Agent, Collector


@dataclass(frozen=True)
class Parent:
    """The agent that a member's agent was cloned from."""

    index: int
    iteration: int
    """The last iteration before that."""


@dataclass(frozen=True)
class EarlierPasses:
    """Passes over the data of an environment that were completed before rows were appended."""

    passes: int = 0
    prompts: int = 0
    """What they took, of all agents that share it."""

    def completed(self, consumed: int, prompts: int) -> int:
        """All passes after which so many prompts are consumed, with so many in one now."""
        return self.passes + (consumed - self.prompts) // prompts

    def extended(self, consumed: int, prompts: int) -> EarlierPasses:
        """These and those after them, if rows are appended when so many prompts are consumed."""
        passes = self.completed(consumed, prompts)
        return EarlierPasses(passes, self.prompts_of(passes, prompts))

    def prompts_of(self, passes: int, prompts: int) -> int:
        """Prompts that are consumed after so many passes, with so many in one now."""
        return self.prompts + (passes - self.passes) * prompts


@dataclass(eq=False)
class Member:
    """A member of the population: its agent, its collector, and its counters."""

    agent: Agent
    collector: Collector
    start_steps: int
    """Steps that the agent had taken before this run."""
    start_epochs: int
    """Passes that its collector had completed before this run."""
    consumed: int = 0
    """Steps of this run."""
    flat_iterations: int = 0
    """Iterations in a row in which no group had two different rewards."""
    lineage: tuple[Parent, ...] = ()
    """The agent's ancestors in this run, oldest first; empty until it is replaced."""

    @property
    def steps(self) -> int:
        """Steps that the agent has taken, in earlier runs too."""
        return self.start_steps + self.consumed

    @property
    def epochs(self) -> int:
        """Passes over the data that were completed in this run, the first one begun before it."""
        return self.collector.num_epochs - self.start_epochs

    def state_dict(self) -> dict[str, Any]:
        """The counters and the lineage and, to read, the agent's history; JSON-compatible."""
        agent = self.agent
        return {
            "index": agent.index,
            "algo": agent.algo,
            "folder": f"agent_{agent.index}",
            "steps": self.steps,
            "steps_of_run": self.consumed,
            "epochs_of_run": self.epochs,
            "flat_iterations": self.flat_iterations,
            "lineage": [asdict(parent) for parent in self.lineage],
            "fitness_history": [float(value) for value in agent.fitness],
            "score_history": [float(value) for value in agent.scores],
            "step_history": [int(value) for value in agent.steps],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore counters and lineage; the collector is at its saved position already."""
        self.consumed = state["steps_of_run"]
        self.start_steps = state["steps"] - self.consumed
        self.start_epochs = self.collector.num_epochs - state["epochs_of_run"]
        self.flat_iterations = state["flat_iterations"]
        self.lineage = tuple(Parent(**parent) for parent in state["lineage"])


@dataclass(frozen=True)
class Best:
    """The highest fitness seen in the run."""

    agent_index: int
    fitness: float
    iteration: int


class Population:
    """The members that train side by side; iterates over them.

    Everything else asks it who the agents are, so that a selection step has to change nothing but
    the population, by :meth:`replace`.

    Args:
        agents: The user's list; an agent that is replaced is replaced in it, too.
        collectors: One per agent. The same object may serve several: each then consumes its own
            batches in turn.
    """

    def __init__(self, agents: list[Any], collectors: Sequence[Collector]) -> None:
        self.agents = agents
        self.members = [
            Member(
                agent=agent,
                collector=collector,
                start_steps=agent.total_steps,
                start_epochs=collector.num_epochs,
            )
            for agent, collector in zip(agents, collectors, strict=True)
        ]
        self.earlier_passes = [EarlierPasses() for _ in self.collectors]
        """Of each collector, for those that count prompts."""
        self.best: Best | None = None
        self.generations: list[dict[str, Any]] = []
        """What each selection made of the members, oldest first; JSON-compatible."""

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    @property
    def collectors(self) -> list[Collector]:
        """The different collectors, in the order of the members that use them first."""
        return list({id(member.collector): member.collector for member in self}.values())

    @property
    def collector_numbers(self) -> list[int]:
        """Of each member, the position of its collector in :attr:`collectors`."""
        numbers = {id(collector): i for i, collector in enumerate(self.collectors)}
        return [numbers[id(member.collector)] for member in self]

    @property
    def unit(self) -> str:
        """What its steps are: ``"prompts"`` or ``"turns"``."""
        return self.collectors[0].unit

    @property
    def evaluates(self) -> bool:
        """Whether there is held-out data for every member."""
        return all(collector.evaluates for collector in self.collectors)

    @property
    def seed(self) -> int:
        """The first agent's; the same in a resumed run."""
        return self.agents[0].seed

    @property
    def leader(self) -> Member:
        """The member with the highest fitness in the last evaluation."""
        return max(self, key=lambda member: member.agent.fitness[-1])

    def passes(self, member: Member) -> int:
        """Whole passes over a member's training data in this run.

        Prompts are counted where it is known how many there are, because a run may begin in the
        middle of a pass. The members that share a collector make its passes together.
        """
        prompts = member.collector.training_prompts
        if prompts is None:
            return member.epochs
        sharing = (each for each in self if each.collector is member.collector)
        earlier = self.earlier_passes[self.collectors.index(member.collector)]
        return earlier.completed(sum(each.consumed for each in sharing), prompts)

    def steps_of_passes(self, passes: int, resumed: Mapping[str, Any] | None = None) -> int | None:
        """Prompts that each agent consumes in so many passes, up to the last batch.

        None where prompts are not what is counted, or their number is not known.

        Args:
            passes: Of this run.
            resumed: The state that it will be loaded from, if any.
        """
        prompts, sharing = self.collectors[0].training_prompts, self.collector_numbers.count(0)
        if prompts is None:
            return None
        first = self.earlier_passes[0] if resumed is None else earlier_passes(resumed)[0]
        return -(-first.prompts_of(passes, prompts) // sharing)

    def replace(self, member: Member, agent: Agent, parent: Member, iteration: int) -> Agent:
        """Replace a member's agent; its collector and its count of steps stay.

        ``population.replace(worst, best.agent.clone(index=worst.agent.index), best, iteration)``
        continues from the best agent where the worst one was.

        Args:
            member: The member.
            agent: The new agent. It has the index of the old one, which names the member in logs
                and checkpoints.
            parent: The member that it was cloned from.
            iteration: The last iteration before this.

        Returns:
            The old agent, for the caller to clean up.

        Raises:
            ValueError: If the new agent has another index.
        """
        old = member.agent
        require(
            agent.index == old.index,
            f"agent has index {agent.index}, but the member that it replaces {old.index}: clone it "
            f"with index={old.index}",
        )
        self.agents[self.members.index(member)] = agent
        agent.total_steps = member.steps
        member.agent, member.flat_iterations = agent, 0
        member.lineage = (*parent.lineage, Parent(parent.agent.index, iteration))
        return old

    def state_dict(self) -> dict[str, Any]:
        """Members, collectors and best fitness; the agents' checkpoints hold the rest of them."""
        fitness = [member.agent.fitness[-1] for member in self if member.agent.fitness]
        earlier = [asdict(each) for each in self.earlier_passes]
        return {
            **({"earlier_passes": earlier} if any(each["passes"] for each in earlier) else {}),
            "fitness": float(max(fitness)) if fitness else None,
            "best": None if self.best is None else asdict(self.best),
            "generations": self.generations,
            "agents": [
                {**member.state_dict(), "environment": number}
                for member, number in zip(self, self.collector_numbers, strict=True)
            ],
            "environments": [collector.state_dict() for collector in self.collectors],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; the agents are restored already."""
        for collector, saved in zip(self.collectors, state["environments"], strict=True):
            collector.load_state_dict(saved)
        self.earlier_passes = earlier_passes(state)
        for member, saved in zip(self, state["agents"], strict=True):
            member.load_state_dict(saved)
        self.best = None if state["best"] is None else Best(**state["best"])
        self.generations = list(state["generations"])


def earlier_passes(state: Mapping[str, Any]) -> list[EarlierPasses]:
    """Of every environment in what :meth:`Population.state_dict` gave."""
    noted = state.get("earlier_passes", [{} for _ in state["environments"]])
    return [EarlierPasses(**each) for each in noted]


def check_agents(pop: Any) -> None:
    """Check that ``pop`` is a list of at least one agent, with different indices.

    Raises:
        ValueError: Naming what is wrong with it.
    """
    require(
        isinstance(pop, list),
        f"pop must be a list of agents, not {type(pop).__name__}: pass [agent] for one agent.",
    )
    require(bool(pop), "pop is empty: pass a list with at least one agent.")
    for position, agent in enumerate(pop):
        missing = missing_members(agent, Agent)
        require(
            not missing,
            f"pop[{position}] is a {type(agent).__name__}, which is not an agent (missing: "
            f"{', '.join(missing)}): pass agents such as GRPO(...).",
        )
    indices = [agent.index for agent in pop]
    require(
        len(set(indices)) == len(indices),
        f"pop holds agents with the same index, {indices}: the index names an agent in logs and "
        "checkpoints. Build them with different index=..., or with population(size).",
    )
