"""Test sets with names, a part of the rows, sampled evaluations and their columns."""

from __future__ import annotations

import csv
import itertools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resume_helpers import TOKENIZER, After, make_agents, nothing, run_multiturn
from training_fakes import FakeAgent, FakeGym

from agilerl.algorithms.core.evaluation import EvaluationStopped
from agilerl.distributed import Ranks
from agilerl.llm_envs import ReasoningGym
from agilerl.training.callbacks import StopAtFitness
from agilerl.training.evaluation import (
    Evaluated,
    evaluate_members,
    evaluation_statistics,
    majority_is_right,
    pass_at_k,
    sizes_of_pass,
)
from agilerl.training.protocols import EvaluationPlan
from agilerl.training.train_llm import finetune_llm_multiturn, finetune_llm_reasoning
from agilerl.typing import ActionResult, Evaluation

SETS = {"easy": ["e0", "e1", "e2"], "hard": [f"h{i}" for i in range(5)]}


def rows(questions: list[str]) -> list[dict[str, str]]:
    return [{"question": question, "answer": question[0]} for question in questions]


def make_gym(
    test: Any = None, hook: Callable[[], None] = nothing, **arguments: Any
) -> ReasoningGym:
    """Rewards depend on the completion's letters alone; ``hook`` is called per test batch."""

    class HookedGym(ReasoningGym):
        def step(self, completion_ids: Any) -> Any:
            if self._test_offset is not None:
                hook()
            return super().step(completion_ids)

    return HookedGym(
        rows(["t0", "t1", "t2"]),
        {name: rows(each) for name, each in SETS.items()} if test is None else test,
        TOKENIZER,
        lambda completion: len(set(completion)) / 4,
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=2,
        **({"extract_answer": lambda text: text[:1] or None} | arguments),
    )


def metrics(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def answers_of(env: ReasoningGym, group: int = 1, **options: Any) -> Any:
    """An evaluation in which all answers are "ab"."""

    def act(prompts: Any) -> ActionResult:
        ids = [torch.cat([p["input_ids"][0], torch.tensor([97, 98])]) for p in prompts]
        masks = [torch.arange(len(row) - 1) >= len(row) - 3 for row in ids]
        return ActionResult(
            [row.expand(group, -1) for row in ids], [mask.expand(group, -1) for mask in masks]
        )

    return env.evaluate(act, **options)


@pytest.mark.parametrize("samples", range(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        draws = list(itertools.combinations([True] * right + [False] * (samples - right), k))
        expected = sum(any(draw) for draw in draws) / len(draws)
        assert pass_at_k(samples, right, k) == pytest.approx(expected)


def test_sizes_of_pass() -> None:
    assert [sizes_of_pass(k) for k in (1, 2, 3, 8)] == [[1], [2], [2, 3], [2, 4, 8]]


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["4", "5", "5"], [True, False, False], False),
        (["4", "5", "4"], [True, False, True], True),
        (["5", "4"], [False, True], False),  # a tie: the first
        ([None, None, "4"], [False, False, True], True),
        ([None, None], [False, False], False),
    ],
)
def test_majority(answers: list[str | None], right: list[bool], expected: bool) -> None:
    assert majority_is_right(answers, right) is expected


def test_statistics_by_hand() -> None:
    """Two samples of three rows: one of two right, both; the last row lost one."""
    answers = Evaluated(
        rewards=torch.tensor([1.0, 0.5, 1.0, 1.0, 0.0]),
        rows=[0, 0, 1, 1, 2],
        sets=["a", "a", "b", "b", "b"],
        final_answers=["x", "y", "z", "z", None],
    )
    assert evaluation_statistics(answers, 1.0, 2) == pytest.approx(
        {
            "eval_accuracy": 3 / 5,
            "avg@2": (1 / 2 + 1) / 2,
            "pass@2": (1 + 1) / 2,
            "maj@2": 1.0,
            "fitness/a": 0.75,
            "eval_accuracy/a": 1 / 2,
            "avg@2/a": 1 / 2,
            "pass@2/a": 1.0,
            "maj@2/a": 1.0,
            "fitness/b": 2 / 3,
            "eval_accuracy/b": 2 / 3,
            "avg@2/b": 1.0,
            "pass@2/b": 1.0,
            "maj@2/b": 1.0,
        }
    )
    plain = evaluation_statistics(Evaluated(torch.tensor([0.5, 0.0])), 0.5, None)
    assert plain == {"eval_accuracy": 0.5}


def test_rows_that_lost_answers_are_in_no_pass_at_k() -> None:
    """Of hard rows more answers fail; were they in some pass@k only, a larger k could be worse."""
    rows = [0] * 8 + [1] * 8 + [2] * 7
    found = evaluation_statistics(
        Evaluated(torch.tensor([1.0] + [0.0] * 15 + [1.0] * 7), rows), 1.0, 8
    )
    assert found["avg@8"] == pytest.approx(1 / 16)
    passes = [found[f"pass@{k}"] for k in (2, 4, 8)]
    assert passes == pytest.approx([1 / 8, 1 / 4, 1 / 2])
    alone = evaluation_statistics(
        Evaluated(torch.ones(7), [0] * 7, final_answers=["a"] * 7), 1.0, 8
    )
    for name in ("avg@8", "pass@2", "pass@4", "pass@8", "maj@8"):
        assert math.isnan(alone[name])


def test_named_sets_are_answered_one_after_the_other() -> None:
    env = make_gym(eval_batch_size=2)  # the second batch has a row of each
    found = answers_of(env)
    assert found.questions == SETS["easy"] + SETS["hard"]
    assert found.answers == ["e"] * 3 + ["h"] * 5
    assert (found.sets, found.rows) == (["easy"] * 3 + ["hard"] * 5, list(range(8)))
    assert found.final_answers == ["a"] * 8
    assert len(env.prompt_lengths()) == 3 + 8


def test_a_single_set_has_no_name() -> None:
    found = answers_of(make_gym(rows(SETS["easy"]), extract_answer=None))
    assert (found.sets, found.rows, found.final_answers) == ([], [0, 1, 2], [])


def test_the_rows_of_a_part_are_among_those_of_a_larger_one() -> None:
    many = make_gym({"a": rows([f"a{i}" for i in range(50)]), "b": rows(["b0", "b1"])})
    parts = [answers_of(many, rows=count).questions for count in (3, 3, 10, 99)]
    assert parts[0] == parts[1]
    assert [len(part) for part in parts] == [3 + 2, 3 + 2, 10 + 2, 50 + 2]
    assert set(parts[0]) < set(parts[2]) < set(parts[3])
    assert parts[0][:3] != ["a0", "a1", "a2"]
    assert parts[2] == sorted(parts[2], key=lambda name: (name[0], int(name[1:])))
    assert len(answers_of(many).questions) == 52  # the part is of one evaluation only


def test_processes_share_a_part() -> None:
    accelerators = [SimpleNamespace(process_index=i, num_processes=2) for i in (0, 1)]
    shares = [answers_of(make_gym(accelerator=each), rows=3).rows for each in accelerators]
    assert sorted(shares[0] + shares[1]) == answers_of(make_gym(), rows=3).rows


def test_batches_hold_fewer_prompts_where_each_has_several_answers() -> None:
    calls: list[None] = []
    env = make_gym(hook=lambda: calls.append(None), eval_batch_size=6)
    found = answers_of(env, group=3, samples=3)
    assert len(calls) == 4  # two prompts each
    assert found.rows == [row for row in range(8) for _ in range(3)]


@pytest.mark.parametrize(
    ("test", "error", "message"),
    [
        ({}, ValueError, "test_dataset is an empty dict"),
        ({"": rows(["a"])}, ValueError, "a set without a name"),
        ({3: rows(["a"])}, TypeError, "test_dataset has the name 3"),
        ({"a": []}, ValueError, r"test_dataset\['a'\] has no rows"),
        ({"a": rows(["a"]), "b": [{"q": "a"}]}, ValueError, r"test_dataset\['b'\] has no column"),
    ],
)
def test_bad_test_sets(test: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_gym(test)


def test_bad_extract_answer() -> None:
    with pytest.raises(TypeError, match="extract_answer is 'answer'"):
        make_gym(extract_answer="answer")


def finetune(path: Path, env: Any = None, size: int = 1, **options: Any) -> list[Any]:
    settings = {"max_steps": 4, "evaluation_interval": 1, "verbose": False}
    pop = make_agents(size, max_output_tokens=3)
    made = make_gym() if env is None else env
    return finetune_llm_reasoning(pop, made, checkpoint_path=path, **(settings | options))


def weights(agent: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in agent.policy.parameters().values()])


def test_columns_of_a_run(tmp_path: Path) -> None:
    (agent,) = finetune(tmp_path, max_reward=0.5)
    for row, fitness in zip(metrics(tmp_path), agent.fitness, strict=True):
        of_sets = [float(row["fitness/easy"]), float(row["fitness/hard"])]
        assert float(row["fitness"]) == pytest.approx((3 * of_sets[0] + 5 * of_sets[1]) / 8)
        assert float(row["fitness"]) == fitness
        of_sets = [float(row[f"eval_accuracy/{name}"]) for name in SETS]
        right = (3 * of_sets[0] + 5 * of_sets[1]) / 8
        assert float(row["eval_accuracy"]) == pytest.approx(right)
        assert not [name for name in row if "@" in name]


def test_a_sampled_evaluation(tmp_path: Path) -> None:
    """It does not change what is trained, and is another one every time."""
    (greedy,) = finetune(tmp_path / "greedy", max_reward=0.5)
    (agent,) = finetune(tmp_path / "run", max_reward=0.5, evaluation_samples=4)
    (again,) = finetune(tmp_path / "again", max_reward=0.5, evaluation_samples=4)
    assert torch.equal(weights(agent), weights(greedy))
    assert agent.fitness == again.fitness
    assert agent.fitness != greedy.fitness
    table = metrics(tmp_path / "run")
    for row in table:
        found = [float(row[name]) for name in ("avg@4", "pass@2", "pass@4")]
        assert found == sorted(found)
        assert found[0] == pytest.approx(float(row["eval_accuracy"]))
        assert 0 <= float(row["maj@4"]) <= float(row["pass@4"])
        for name in ("avg@4", "pass@2", "pass@4", "maj@4"):  # 3 easy rows and 5 hard ones
            of_sets = [float(row[f"{name}/{each}"]) for each in SETS]
            whole = (3 * of_sets[0] + 5 * of_sets[1]) / 8
            assert float(row[name]) == pytest.approx(whole)
    # Hardly trained in between: what differs is what was sampled.
    assert len({row["fitness"] for row in table}) == len(table) == 4


def test_a_test_set_ends_a_run(tmp_path: Path) -> None:
    stop = StopAtFitness(0.0, metric="pass@4/hard")
    (agent,) = finetune(tmp_path, evaluation_samples=4, callbacks=[stop])
    assert len(agent.scores) == 0


def test_rows_that_lost_answers_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = itertools.count()

    def judge(completion: str) -> float:
        if env._test_offset is not None and next(calls) % 16 == 0:
            raise TimeoutError
        return 1.0

    env = ReasoningGym(
        rows(["t0", "t1", "t2"]),
        rows(SETS["hard"]),
        TOKENIZER,
        judge,
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=2,
        on_failure="drop",
    )
    with caplog.at_level(logging.WARNING, "agilerl.training.evaluation"):
        finetune(tmp_path, env, evaluation_samples=4, max_steps=2)
    says = "of 5 rows of the evaluation have fewer than 4 answers"
    assert sum(says in record.message for record in caplog.records) == 2
    assert {float(row["pass@4"]) for row in metrics(tmp_path)} == {1.0}


def test_sampled_with_the_temperature_of_training(tmp_path: Path) -> None:
    agents = []
    for temperature in (0.9, 1e-4):
        (agent,) = make_agents(1, max_output_tokens=3, temperature=temperature)
        agents.append(agent)
    env = make_gym()
    sampled = [agent.test(env, samples=3) for agent in agents]
    greedy = [agent.test(env) for agent in agents]
    assert [len(rewards) for rewards in sampled] == [24, 24]
    assert sampled[1].reshape(8, 3).T.tolist() == [greedy[1].tolist()] * 3
    assert sampled[0].tolist() != sampled[1].tolist()


def test_a_sampled_evaluation_that_was_stopped_is_repeated(tmp_path: Path) -> None:
    options = {"evaluation_samples": 2, "evaluation_rows": 2, "checkpoint_steps": 1}
    (whole,) = finetune(tmp_path / "whole", make_gym(eval_batch_size=2), **options)
    run = tmp_path / "run"
    hook = After(6)  # the second of four batches after the first iteration
    finetune(run, make_gym(hook=hook, eval_batch_size=2), **options)
    assert hook.left == 0
    (agent,) = finetune(run, make_gym(eval_batch_size=2), **options, resume_from=run)
    assert (agent.fitness, agent.steps) == (whole.fitness, whole.steps)
    assert torch.equal(weights(agent), weights(whole))


def test_sampled_episodes(tmp_path: Path) -> None:
    (agent,) = run_multiturn(tmp_path, pop=make_agents(1), max_steps=9, evaluation_samples=3)
    for row in metrics(tmp_path):
        assert {"avg@3", "pass@2", "pass@3"} <= {name for name in row if row[name]}
        assert not row.get("maj@3")
    assert len(agent.fitness) == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"evaluation_rows": 0}, ValueError, "evaluation_rows is 0"),
        ({"evaluation_samples": 1.0}, TypeError, r"evaluation_samples is 1.0"),
        ({"evaluation_rows": 2}, TypeError, "evaluate of FakeGym has no argument rows"),
        ({"evaluation_samples": 2}, TypeError, "evaluate of FakeGym has no argument samples"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        finetune_llm_reasoning([FakeAgent()], FakeGym(), verbose=False, **options)


def test_options_of_evaluations_without_held_out_rows() -> None:
    env = ReasoningGym(
        rows(["t0"]),
        None,
        TOKENIZER,
        lambda completion: 1.0,
        [{"role": "user", "content": "{question}"}],
    )
    for name in ("evaluation_rows", "evaluation_samples"):
        with pytest.raises(ValueError, match=f"{name}=2 was given, but there is no held-out data"):
            finetune_llm_reasoning(make_agents(1), env, verbose=False, **{name: 2})


def test_bad_samples_of_episodes() -> None:
    with pytest.raises(ValueError, match="evaluation_samples is 0"):
        finetune_llm_multiturn([FakeAgent()], 2, lambda: None, evaluation_samples=0)


def test_a_stopped_evaluation_shows_nothing_and_leaves_no_trace() -> None:
    """Also of the agents that were evaluated before the stop; the resumed run shows them."""

    def evaluate(agent: FakeAgent, plan: EvaluationPlan) -> Any:
        if agent.index == 1 and stopping:
            raise EvaluationStopped
        return agent.test(FakeGym()), Evaluation(torch.zeros(3))

    agents, shown = [FakeAgent(0), FakeAgent(1)], []
    members: Any = [
        SimpleNamespace(agent=agent, collector=SimpleNamespace(evaluate=evaluate))
        for agent in agents
    ]

    def evaluated() -> Any:
        plan = EvaluationPlan(nothing)
        return evaluate_members(members, plan, Ranks(), 1.0, lambda *each: shown.append(each[0]))

    stopping = True
    assert evaluated() is None
    assert shown == []
    assert [(agent.fitness, agent.steps) for agent in agents] == [([], [])] * 2
    stopping = False
    assert len(evaluated()) == 2
    assert shown == agents
