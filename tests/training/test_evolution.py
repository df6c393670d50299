"""Selection and mutation while a population trains: what it changes, and exact resuming."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from resume_helpers import (
    RUNS,
    After,
    Hook,
    checkpoints_in,
    differences,
    everything,
    make_agents,
    nothing,
    reseed,
    rows_of,
    seed_all,
    state_of,
)
from training_fakes import FakeGym

from agilerl.algorithms import GRPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo import Mutations, PerturbOrResample, TournamentSelection, TruncationSelection
from agilerl.hpo.selection import Selection
from agilerl.training.collectors.reasoning_collector import ReasoningCollector
from agilerl.training.generation import next_generation
from agilerl.training.logs.generation_table import generation_table
from agilerl.training.population import Population

SCHEDULES: dict[str, Any] = {
    "tournament": lambda: {
        "tournament": TournamentSelection(2, elitism=True, population_size=3),
        "mutation": Mutations(0.2, 0, 0, 0, 0, 0.8, mutate_elite=False),
    },
    "truncation": lambda: {
        "tournament": TruncationSelection(3),
        "mutation": PerturbOrResample(),
    },
}


SEARCH = HyperparameterConfig(
    lr=RLParameter(1e-4, 1e-1, scale="log"),
    clip_coef=RLParameter(0.05, 0.5),
    group_size=RLParameter(2, 5, dtype=int),
    temperature=RLParameter(0.5, 1.5),
    beta=RLParameter(0.001, 0.1),
    batch_size=RLParameter(2, 6, dtype=int),
    micro_batch_size_per_gpu=RLParameter(1, 3, dtype=int),
    update_epochs=RLParameter(1, 3, dtype=int),
    max_grad_norm=RLParameter(0.01, 1.0),
    adv_clip_range=RLParameter(0.5, 2.0),
    vllm_importance_sampling_cap=RLParameter(1.0, 4.0),
)


def agents() -> list[GRPO]:
    return make_agents(3, hp_config=SEARCH, adv_clip_range=1.0, micro_batch_size_per_gpu=2)


def run(
    kind: str, path: Path, schedule: str, hook: Hook = nothing, **options: Any
) -> dict[str, Any]:
    pop = agents()
    given = {"evo_steps": 1, "keep_checkpoints": 9, **SCHEDULES[schedule](), **options}
    given = {"max_steps": {"reasoning": 8, "multiturn": 60}[kind], **given}
    found = everything(path, RUNS[kind](path, hook=hook, pop=pop, **given))
    found["lineage"] = (path / "lineage.json").read_text()
    for agent in pop:
        found[f"{agent.index} hyperparameters"] = agent.attributes(agent.hp_config or ())
        found[f"{agent.index} mut"] = agent.mut
        agent.clean_up()
    return found


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [("reasoning", "tournament"), ("reasoning", "truncation"), ("multiturn", "tournament")],
)
def test_a_run_with_evolution_is_resumed_exactly(kind: str, schedule: str, tmp_path: Path) -> None:
    seed_all()
    whole = run(kind, tmp_path / "whole", schedule)
    generations = json.loads(whole["lineage"])["generations"]
    assert len(generations) >= 3
    members = [member for each in generations for member in each["members"]]
    assert any(member["parent"] != member["agent"] for member in members)
    assert any(member["mutation"] for member in members)
    for earlier, later in pairwise(generations):
        for before, after in zip(earlier["members"], later["members"], strict=True):
            assert after["scored_hyperparameters"] == before["hyperparameters"]
    names = checkpoints_in(tmp_path / "whole")
    for name in (names[0], names[-2]):
        reseed()
        path = tmp_path / f"from_{name}"
        again = run(
            kind, path, schedule, resume_from=tmp_path / "whole" / name, elite_path=path / "elite"
        )
        assert set(differences(again, whole)) <= {"elite"}


@pytest.mark.parametrize("kind", list(RUNS))
def test_a_run_that_ended_is_made_longer_exactly(kind: str, tmp_path: Path) -> None:
    """The generation that its end made unnecessary is made up for."""
    first = {"reasoning": 4, "multiturn": 20}[kind]
    seed_all()
    whole = run(kind, tmp_path / "whole", "tournament")
    seed_all()
    shorter = run(kind, tmp_path / "run", "tournament", max_steps=first)
    reseed()
    again = run(kind, tmp_path / "run", "tournament", resume_from=tmp_path / "run")
    assert differences(again, whole) == []
    assert shorter["lineage"] != whole["lineage"]


def test_a_stop_before_a_generation_leaves_it_to_the_resumed_run(tmp_path: Path) -> None:
    """The evaluation that decides is postponed, and so is the generation."""
    seed_all()
    whole = run("reasoning", tmp_path / "whole", "tournament", evo_steps=2)
    seed_all()
    run("reasoning", tmp_path / "run", "tournament", After(5), evo_steps=2)
    saved = tmp_path / "run" / checkpoints_in(tmp_path / "run")[-1]
    assert state_of(saved)["unevaluated_rows"] is not None
    assert state_of(saved)["generations"] == []
    reseed()
    again = run(
        "reasoning", tmp_path / "run", "tournament", evo_steps=2, resume_from=tmp_path / "run"
    )
    assert differences(again, whole) == []


class BestOnly(Selection):
    """All continue from the best member."""

    def parents(self, scores: Any, rng: Any) -> list[int]:
        return [scores.index(max(scores))] * len(scores)


def test_each_generation_is_printed_as_a_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seed_all()
    run("reasoning", tmp_path, "tournament", verbose=True)
    printed = capfd.readouterr().out.splitlines()
    generations = json.loads((tmp_path / "lineage.json").read_text())["generations"]
    for number, generation in enumerate(generations, 1):
        title = f"Generation {number}, after iteration {generation['iteration']}"
        header, *lines = printed[printed.index(title) + 1 :][:4]
        names = SEARCH.names()
        assert header.split() == ["agent", "fitness", "parent", *names, "mutation"]
        for line, member in zip(lines, generation["members"], strict=True):
            agent, fitness, parent, *values = line.split(maxsplit=3 + len(names))
            assert (int(agent), int(parent)) == (member["agent"], member["parent"])
            shown = [float(fitness), *map(float, values[: len(names)])]
            expected = [member["fitness"], *(member["hyperparameters"][name] for name in names)]
            assert shown == pytest.approx(expected, rel=1e-3)
            assert values[len(names) :] == ([member["mutation"]] if member["mutation"] else [])


def test_the_table_of_members_with_different_hyperparameters() -> None:
    members = [
        {"agent": 0, "parent": 1, "fitness": None, "mutation": "lr 0.0001 -> 0.00012",
         "hyperparameters": {"lr": 0.00012, "clip_coef": [0.8, 1.25]}},
        {"agent": 1, "parent": 1, "fitness": 0.5, "mutation": None,
         "hyperparameters": {"lr": 1 / 3}},
    ]  # fmt: skip
    assert generation_table(2, {"iteration": 7, "members": members}).splitlines() == [
        "Generation 2, after iteration 7",
        "agent  fitness  parent       lr    clip_coef  mutation",
        "    0        -       1  0.00012  (0.8, 1.25)  lr 0.0001 -> 0.00012",
        "    1      0.5       1   0.3333            -",
    ]


def test_a_fitness_that_is_no_number_is_null(tmp_path: Path) -> None:
    pop = agents()
    for agent in pop:
        agent.fitness = [math.nan if agent.index == 1 else 0.5]
    population = Population(pop, [ReasoningCollector(FakeGym())] * 3)
    mutation = SCHEDULES["tournament"]()["mutation"]
    next_generation(population, BestOnly(3, 1, None), mutation, 1, 0)
    (generation,) = population.generations
    assert [member["fitness"] for member in generation["members"]] == [0.5, None, 0.5]
    json.dumps(generation, allow_nan=False)
    assert generation_table(1, generation).splitlines()[3].split()[:2] == ["1", "-"]
    for agent in pop:
        agent.clean_up()


def test_the_elite_is_saved_as_it_scored(tmp_path: Path) -> None:
    class Doubling(Mutations):
        def mutate(self, agent: Any, rng: Any) -> None:
            agent.lr, agent.mut = 2 * agent.lr, "lr doubled"

    seed_all()
    pop = agents()
    initial = [agent.lr for agent in pop]
    given = {"tournament": BestOnly(3, 1, None), "mutation": Doubling(0, 0, 0, 0, 0, 1)}
    RUNS["reasoning"](tmp_path, pop=pop, max_steps=4, evo_steps=1, **given)
    rows = [row for row in rows_of(tmp_path) if row["fitness"]]
    best = max(rows, key=lambda row: float(row["fitness"]))
    elite = GRPO.load(tmp_path / "elite", actor_network=pop[0].policy.base.model)
    assert elite.fitness[-1] == pytest.approx(float(best["fitness"]))
    # It has the hyperparameters that the generation before it was given.
    generations = json.loads((tmp_path / "lineage.json").read_text())["generations"]
    given_to = {
        (each["iteration"] + 1, member["agent"]): member["hyperparameters"]
        for each in generations
        for member in each["members"]
    }
    if int(best["iteration"]) > 1:
        assert elite.lr == given_to[int(best["iteration"]), int(best["agent"])]["lr"]
    else:
        assert elite.lr in initial


def test_members_share_one_base_and_leave_nothing_behind(tmp_path: Path) -> None:
    seed_all()
    pop = agents()
    base = pop[0].policy.base
    slots = len(base.peft.peft_config)
    RUNS["reasoning"](
        tmp_path, pop=pop, max_steps=12, evo_steps=1, evaluation_interval=50,
        checkpoint_steps=None, save_elite=None, elite_path=None, **SCHEDULES["tournament"](),
    )  # fmt: skip
    assert len(base.peft.peft_config) == slots
    assert {agent.policy.base for agent in pop} == {base}
    pointers = {tensor.data_ptr() for tensor in base.model.parameters()}
    for agent in pop:
        assert {p.data_ptr() for p in agent.policy.base.model.parameters()} == pointers
    # Nothing of one member moves when another trains.
    weights = [{n: p.clone() for n, p in agent.policy.parameters().items()} for agent in pop]
    with_new = pop[0].policy.parameters()
    for parameter in with_new.values():
        parameter.data.add_(1.0)
    for agent, before in zip(pop[1:], weights[1:], strict=True):
        assert all((p == before[n]).all() for n, p in agent.policy.parameters().items())


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"evo_steps": 2}, ValueError, "evo_steps given, tournament and mutation missing"),
        ({**SCHEDULES["tournament"](), "evo_steps": 0}, ValueError, "evo_steps is 0"),
        ({**SCHEDULES["tournament"](), "tournament": 3, "evo_steps": 2}, TypeError, "is 3; it"),
        ({**SCHEDULES["tournament"](), "mutation": 3, "evo_steps": 2}, TypeError, "is a int, wh"),
        (
            {**SCHEDULES["tournament"](), "tournament": TruncationSelection(5), "evo_steps": 2},
            ValueError,
            "population_size is 5, but the population has 3 members",
        ),
    ],
)  # fmt: skip
def test_bad_options(tmp_path: Path, options: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        RUNS["reasoning"](tmp_path, pop=agents(), **options)


class Swap(Selection):
    """The first two members exchange places."""

    def parents(self, scores: Any, rng: Any) -> list[int]:
        return [1, 0, 2]


def test_an_agent_at_the_place_of_the_best_is_mutated_if_it_is_another() -> None:
    pop = agents()
    for agent, fitness in zip(pop, (0.9, 0.1, 0.5), strict=True):
        agent.fitness.append(fitness)
    population = Population(pop, [ReasoningCollector(FakeGym())] * 3)
    mutation = Mutations(0, 0, 0, 0, 0, 1, mutate_elite=False)
    next_generation(population, Swap(3, 1, None), mutation, iteration=1, seed=0)
    assert all(agent.mut for agent in pop)
    assert [agent.fitness[-1] for agent in pop] == [0.1, 0.9, 0.5]
    for agent in pop:
        agent.clean_up()


@pytest.mark.parametrize(("seed", "same"), [(0, False), (None, True)])
def test_a_selections_own_seed_counts(seed: int | None, same: bool, tmp_path: Path) -> None:
    found = []
    for number, own in enumerate((None, seed)):
        seed_all()
        selection = TournamentSelection(1, elitism=False, population_size=3, rand_seed=own)
        path = tmp_path / str(number)
        options = {"tournament": selection, "evo_steps": 1}
        found.append(run("reasoning", path, "tournament", **options)["lineage"])
    assert (found[0] == found[1]) == same
