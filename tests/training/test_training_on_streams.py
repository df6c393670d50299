"""Training on a stream of rows: bounds, populations, exact resumption."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import IterableDataset
from resume_helpers import (
    TOKENIZER,
    After,
    checkpoints_in,
    dataset,
    differences,
    everything,
    make_agents,
    reseed,
    rows_of,
    seed_all,
)

from agilerl.llm_envs import ReasoningGym
from agilerl.training.train_llm import finetune_llm_reasoning

SCORINGS = 2 * 2 * 3
"""Completions of an iteration: of two agents, two prompts in groups of three."""


def rows(count: int = 7) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {"question": f"stream{number}?", "answer": "a"}


def gym(hook: Any = None, length: int = 100, shuffled: bool = True, count: int = 7) -> ReasoningGym:
    """Seven rows, two at a time."""

    def reward(completion: str) -> float:
        if hook is not None:
            hook()
        return len(set(completion)) / 8

    stream = IterableDataset.from_generator(rows, gen_kwargs={"count": count})
    return ReasoningGym(
        stream.shuffle(seed=5, buffer_size=3) if shuffled else stream,
        dataset("test", 3),
        TOKENIZER,
        reward,
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=2,
        reward_workers=1,
        max_context_length=length,
    )


def train(path: Path, pop: list[Any], env: ReasoningGym | None = None, **options: Any) -> None:
    settings = {
        "evaluation_interval": 2,
        "checkpoint_steps": 1,
        "checkpoint_path": path,
        "verbose": False,
    }
    finetune_llm_reasoning(pop, env, **(settings | options))


@pytest.mark.parametrize("shared", [True, False])
def test_num_epochs_counts_passes(tmp_path: Path, shared: bool) -> None:
    pop = make_agents(2)
    if shared:
        train(tmp_path, pop, gym(), num_epochs=2)
    else:
        train(tmp_path, pop, env_fn=gym, num_epochs=2)
    # Batches of 2, 2, 2 and 1; agents that share an environment get one in turn.
    steps = {
        agent: [r["steps"] for r in rows_of(tmp_path) if r["agent"] == agent] for agent in "01"
    }
    if shared:
        assert steps == {"0": list("02468"), "1": list("02356")}
    else:
        assert steps["0"] == steps["1"] == ["0", "2", "4", "6", "7", "9", "11", "13", "14"]


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_run_resumes_exactly(tmp_path: Path, shuffled: bool) -> None:
    options = {"max_steps": 9}
    whole = make_agents()
    seed_all()
    train(tmp_path / "whole", whole, gym(shuffled=shuffled), **options)
    expected = everything(tmp_path / "whole", whole)
    seed_all()
    hook = After(2 * (SCORINGS + 3) + 1)  # after evaluations, in a later iteration
    train(tmp_path / "parts", make_agents(), gym(hook, shuffled=shuffled), **options)
    stopped = len(checkpoints_in(tmp_path / "parts"))
    assert 0 < stopped < 5
    resumed = make_agents()
    reseed()
    parts = tmp_path / "parts"
    train(parts, resumed, gym(shuffled=shuffled), **options, resume_from=parts)
    assert not differences(everything(parts, resumed), expected)


def test_a_prompt_that_could_be_too_long_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"160 tokens.*max_model_len=160.*at most 159"):
        train(tmp_path / "run", make_agents(1), gym(length=160), max_steps=2)
    assert not (tmp_path / "run").exists()


def test_another_stream_is_refused_on_resuming(tmp_path: Path) -> None:
    train(tmp_path, make_agents(1), gym(), max_steps=2)
    with pytest.raises(ValueError, match="checkpoint of another run: questions_and_answers"):
        train(tmp_path, make_agents(1), gym(shuffled=False), max_steps=4, resume_from=tmp_path)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_stream_that_has_grown_is_read_to_its_new_end(allowed: bool, tmp_path: Path) -> None:
    """It is known by its first rows alone."""

    def run(count: int, **options: Any) -> None:
        env = gym(shuffled=False, count=count)
        train(tmp_path, make_agents(1), env, num_epochs=1, **options)

    run(8, max_steps=4)
    run(10, resume_from=tmp_path, allow_appended_rows=allowed)
    assert [row["steps"] for row in rows_of(tmp_path)] == ["0", "2", "4", "6", "8", "10"]
    lines = (tmp_path / "completions.jsonl").read_text().splitlines()
    asked = dict.fromkeys(json.loads(line)["question"] for line in lines)
    assert list(asked) == [f"stream{number}?" for number in range(10)]


def test_rows_appended_to_a_stream_of_few_are_refused(tmp_path: Path) -> None:
    """What stands there is among its first rows."""
    train(tmp_path, make_agents(1), gym(count=2), max_steps=2)
    with pytest.raises(ValueError, match="is a stream with other first rows, columns or templ"):
        train(
            *(tmp_path, make_agents(1), gym(count=5)),
            max_steps=4,
            resume_from=tmp_path,
            allow_appended_rows=True,
        )
