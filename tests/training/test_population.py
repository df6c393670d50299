"""A selection step changes nothing but the population: loop, checkpoints and resuming follow."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_helpers import (
    RUNS,
    After,
    checkpoints_in,
    differences,
    everything,
    make_agents,
    reseed,
    rows_of,
    run_reasoning,
    seed_all,
    state_of,
)
from training_fakes import FakeAgent, FakeGym

from agilerl.algorithms import GRPO
from agilerl.training import run
from agilerl.training.collectors.reasoning_collector import ReasoningCollector
from agilerl.training.interrupts import GracefulStop
from agilerl.training.loop import TrainingLoop
from agilerl.training.population import Parent, Population


class SelectingLoop(TrainingLoop):
    """Before iteration 3 the worst agent gives way to a mutated clone of the best one."""

    def _run_iteration(self, stop: GracefulStop) -> bool:
        if self.iteration == 2:
            best = self.population.leader
            (worst,) = (member for member in self.population if member is not best)
            clone = best.agent.clone(index=worst.agent.index)
            clone.lr = 0.5 * clone.lr
            self.population.replace(worst, clone, best, self.iteration).clean_up()
        return super()._run_iteration(stop)


@pytest.mark.parametrize("kind", list(RUNS))
def test_a_selection_step_between_two_iterations(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "TrainingLoop", SelectingLoop)
    train = RUNS[kind]
    seed_all()
    pop = first, second = make_agents()
    train(tmp_path / "whole", pop=pop, keep_checkpoints=9)
    whole = everything(tmp_path / "whole", pop)

    # The user's list holds the new agent, a clone of the best one at the end of iteration 2.
    (replaced,) = (i for i, agent in enumerate((first, second)) if pop[i] is not agent)
    best = 1 - replaced
    assert pop[replaced].lr == 0.5 * pop[best].lr
    assert pop[replaced].fitness[:2] == pop[best].fitness[:2]
    assert pop[replaced].scores[:2] == pop[best].scores[:2]
    assert [agent.index for agent in pop] == [0, 1]

    # Rows go on under the same index, with the same count of steps.
    steps = [int(row["steps"]) for row in rows_of(tmp_path / "whole") if row["agent"] == "1"]
    assert steps == sorted(set(steps))

    # Its checkpoints are the new agent's, and say where it comes from.
    members = state_of(tmp_path / "whole" / "iteration_00000003")["agents"]
    assert members[replaced]["lineage"] == [{"index": best, "iteration": 2}]
    assert members[best]["lineage"] == []
    saved = GRPO.load(
        tmp_path / "whole" / "iteration_00000003" / f"agent_{replaced}",
        actor_network=pop[0].policy.base.model,
    )
    assert saved.lr == pop[replaced].lr
    saved.clean_up()

    # From before the selection it is repeated, from after it not; both times to the same bit.
    for iteration in (2, 3):
        name = f"iteration_{iteration:08d}"
        reseed()
        path = tmp_path / f"from_{iteration}"
        again = make_agents()
        train(path, pop=again, resume_from=tmp_path / "whole" / name, elite_path=path / "elite")
        assert set(differences(everything(path, again), whole)) <= {"elite"}
        last = checkpoints_in(path)[-1]
        assert state_of(path / last)["agents"] == state_of(tmp_path / "whole" / last)["agents"]


def test_a_run_that_a_stop_interrupts_after_a_selection_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "TrainingLoop", SelectingLoop)
    seed_all()
    whole = everything(tmp_path / "whole", run_reasoning(tmp_path / "whole"))
    seed_all()
    run_reasoning(tmp_path / "run", hook=After(5))
    assert checkpoints_in(tmp_path / "run")[-1] == "iteration_00000003"
    reseed()
    pop = run_reasoning(tmp_path / "run", resume_from=tmp_path / "run")
    assert differences(everything(tmp_path / "run", pop), whole) == []


def population_of(size: int) -> Population:
    env = ReasoningCollector(FakeGym())
    return Population([FakeAgent(index) for index in range(size)], [env] * size)


def test_a_lineage_grows_with_each_generation() -> None:
    population = population_of(3)
    first, second, third = population
    population.replace(second, FakeAgent(1), first, iteration=4)
    population.replace(third, FakeAgent(2), second, iteration=8)
    assert second.lineage == (Parent(0, 4),)
    assert third.lineage == (Parent(0, 4), Parent(1, 8))
    # What comes to its parent's place later is not its ancestor.
    population.replace(second, FakeAgent(1), first, iteration=9)
    assert third.lineage == (Parent(0, 4), Parent(1, 8))
    again = population_of(3)
    again.load_state_dict(population.state_dict())
    assert [member.lineage for member in again] == [member.lineage for member in population]


def test_a_replaced_agent_keeps_place_collector_and_steps() -> None:
    population = population_of(2)
    member, parent = population
    member.consumed, member.flat_iterations = 6, 3
    old, new, collector = member.agent, FakeAgent(0), member.collector
    assert population.replace(member, new, parent, iteration=1) is old
    assert population.agents[0] is member.agent is new
    assert member.collector is collector
    assert (member.steps, member.flat_iterations) == (6, 0)


def test_an_agent_with_another_index_is_refused() -> None:
    population = population_of(2)
    member, parent = population
    with pytest.raises(ValueError, match=r"agent has index 7.*clone it with index=0"):
        population.replace(member, FakeAgent(7), parent, iteration=1)
    assert population.agents[0] is member.agent
