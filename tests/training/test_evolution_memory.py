"""What a population holds while agents are replaced: no more than at its start."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from held_tensors import tensors_held
from resume_helpers import make_agents, run_reasoning, seed_all

from agilerl.algorithms import GRPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo import Mutations, TournamentSelection
from agilerl.testing import tiny_model
from agilerl.training.generation import next_generation
from agilerl.training.population import Population

SIZE = 8
SEARCH = HyperparameterConfig(lr=RLParameter(1e-4, 1e-1), temperature=RLParameter(0.5, 1.5))


def learn(agent: GRPO, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(97, 123, (3, 6), generator=rng)
    ids[:, :3] = ids[0, :3]
    actions = torch.tensor([[False, False, True, True, True]] * 3)
    agent.learn((ids, actions, torch.rand(3, generator=rng)))


def base_weights(agent: GRPO) -> dict[str, tuple[int, torch.dtype, torch.Tensor]]:
    state = agent.policy.base.model.state_dict()
    return {
        name: (tensor.data_ptr(), tensor.dtype, tensor.clone())
        for name, tensor in state.items()
        if "lora" not in name
    }


@pytest.mark.slow
def test_fifty_generations_of_eight_leave_nothing_behind() -> None:
    """Not even until Python next looks for cycles: on a GPU that would be too late."""
    model = tiny_model(hidden_size=16, layers=1, heads=2, key_value_heads=1, dtype=torch.bfloat16)
    pop = make_agents(SIZE, actor_network=model, hp_config=SEARCH)
    base, at_first = pop[0].policy.base, base_weights(pop[0])
    dtypes = {name: p.dtype for name, p in pop[0].policy.parameters().items()}
    collector: Any = SimpleNamespace(num_epochs=0)
    population = Population(pop, [collector] * SIZE)
    selection = TournamentSelection(2, elitism=True, population_size=SIZE)
    mutation = Mutations(0.2, 0, 0, 0, 0, 0.8)
    chance, process = random.Random(0), psutil.Process()
    dropped: weakref.WeakSet[Any] = weakref.WeakSet()
    replaced, held, resident = 0, [], []
    for agent in pop:
        learn(agent, seed=agent.index)
    gc.collect()
    gc.disable()
    try:
        for iteration in range(1, 51):
            before = [(a, a.policy, a.engine, a.optimizer, a.lr_scheduler) for a in pop]
            for agent in pop:
                agent.fitness.append(chance.random())
                if iteration % 10 == 0:
                    learn(agent, seed=iteration)
            next_generation(population, selection, mutation, iteration, seed=0)
            for parts, agent in zip(before, pop, strict=True):
                if parts[0] is not agent:
                    replaced += 1
                    dropped.update(parts)
            del before, parts, agent
            assert len(base.peft.peft_config) == 2 * SIZE
            if iteration in (5, 50):
                held.append(tensors_held())
                resident.append(process.memory_info().rss)
    finally:
        gc.enable()
    gc.collect()
    assert replaced > 100
    assert not dropped
    assert held[0] == held[1]
    assert resident[1] < 1.05 * resident[0]
    for agent in pop:
        assert agent.policy.base is base
        assert {name: p.dtype for name, p in agent.policy.parameters().items()} == dtypes
    for name, (pointer, dtype, tensor) in base_weights(pop[0]).items():
        assert (pointer, dtype) == at_first[name][:2] and dtype == torch.bfloat16
        assert torch.equal(tensor, at_first[name][2])


class Weighing(Mutations):
    """Notes what the process holds in each generation."""

    def __init__(self) -> None:
        super().__init__(0, 0, 0, 0, 0, 1)
        self.held: list[tuple[int, int]] = []

    def mutate(self, agent: Any, rng: random.Random) -> None:
        if agent.index == 0:
            gc.collect()
            self.held.append(tensors_held())
        super().mutate(agent, rng)


def test_a_resumed_run_holds_no_more_than_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """Nor do the agents that it was resumed with stay once they are replaced."""
    found = []
    for resume_from in (None, tmp_path / "0" / "iteration_00000001"):
        seed_all()
        mutation = Weighing()
        pop = make_agents(3, hp_config=SEARCH)
        run_reasoning(
            tmp_path / str(len(found)), pop=pop, max_steps=8, evo_steps=1, keep_checkpoints=9,
            tournament=TournamentSelection(2, elitism=True, population_size=3), mutation=mutation,
            resume_from=resume_from,
        )  # fmt: skip
        for agent in pop:
            agent.clean_up()
        found.append(mutation.held)
        del pop, agent
    whole, resumed = found
    assert len(resumed) >= 2
    assert resumed == whole[-len(resumed) :]
