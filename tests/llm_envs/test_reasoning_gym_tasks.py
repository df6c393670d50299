"""Tasks of reasoning-gym as they are: their rows, held-out questions, and own scores."""

from __future__ import annotations

from typing import Any

import pytest
import reasoning_gym
import torch
from reasoning_gym.factory import DATASETS

from agilerl.llm_envs import ReasoningGym
from agilerl.testing import byte_tokenizer
from agilerl.typing import ActionResult

QUESTION_ONLY = [{"role": "user", "content": "{question}"}]


def make(task: Any, **settings: Any) -> ReasoningGym:
    return ReasoningGym.from_reasoning_gym(task, byte_tokenizer(), **settings)


def step_with(env: ReasoningGym, texts: list[str]) -> list[float]:
    """Rewards of one completion for each waiting prompt."""
    prompts = env.reset()
    ids = []
    for prompt, text in zip(prompts, texts, strict=True):
        completion = env.tokenizer(text + env.tokenizer.eos_token, return_tensors="pt").input_ids
        ids.append(torch.cat([prompt["input_ids"], completion], dim=1))
    return env.step(ids)[1].flatten().tolist()


@pytest.mark.parametrize("task", sorted(set(DATASETS) - {"composite"}))
def test_every_task_is_scored_by_itself(task: str) -> None:
    env = make(task, size=2, test_size=1, data_batch_size_per_gpu=2)
    env.reset()
    # Tasks with many right answers name none.
    right = [answer is not None for answer in env.answers]
    rewards = step_with(env, [f"So <answer>{answer}</answer>" for answer in env.answers])
    assert [reward == 1.0 for reward in rewards] == right
    assert step_with(env, ["no tag", "<answer>5"])[0] < 1.0
    for odd in ("", "{}", "1/0", "[[1,2],[3]]"):  # on some of these some tasks raise
        rewards = step_with(env, [f"<answer>{odd}</answer>"] * 2)
        assert all(0.0 <= reward <= 1.0 for reward in rewards)


def test_the_whole_completion_is_the_answer() -> None:
    env = make("chain_sum", size=4, test_size=1, answer_tag=None, data_batch_size_per_gpu=4)
    env.reset()
    assert step_with(env, [f" {answer}\n" for answer in env.answers]) == [1.0] * 4


def test_questions_are_given_by_the_seed_and_held_out_ones_are_others() -> None:
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    env, again, other = (
        make("chain_sum", size=80, test_size=20, seed=seed, config=config) for seed in (3, 3, 4)
    )
    assert env.fingerprint() == again.fingerprint() != other.fingerprint()
    assert env.name == "chain_sum"
    source = reasoning_gym.create_dataset("chain_sum", size=80, seed=3, **config)
    trained = {entry["question"] for entry in source}
    with env.eval_mode():
        env.reset()
        held_out = env.questions
    assert len(set(held_out)) == len(held_out) == 20
    assert not trained & set(held_out)


def test_many_training_questions_leave_others_to_be_held_out() -> None:
    env = make("chain_sum", size=3000, test_size=3, answer_tag=None)
    assert (len(env), len(env.evaluate(answer_nothing).questions)) == (3000, 3)


def answer_nothing(prompts: Any) -> ActionResult:
    end = torch.tensor([[byte_tokenizer().eos_token_id]])
    return ActionResult([torch.cat([p["input_ids"], end], 1) for p in prompts], [])


@pytest.mark.parametrize(("error", "failures"), [(ValueError, 0), (ConnectionError, 2)])
def test_only_what_cannot_be_read_is_worth_nothing(
    error: type[Exception], failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make("chain_sum", size=2, test_size=0, on_failure="drop", max_failure_share=1.0)

    def fail(self: Any, answer: str, entry: Any) -> float:
        raise error

    monkeypatch.setattr(type(reasoning_gym.create_dataset("chain_sum")), "score_answer", fail)
    assert step_with(env, ["<answer>1</answer>"] * 2) == [0.0, 0.0]
    assert sum(reason is not None for (reason,) in env.last_failures) == failures


def test_a_dataset_goes_in_as_it_is() -> None:
    spec = reasoning_gym.composite.DatasetSpec
    dataset = reasoning_gym.create_dataset(
        "composite",
        size=6,
        seed=5,
        datasets=[
            spec(name="chain_sum", weight=1, config={"max_terms": 2}),
            spec(name="boxnet", weight=1, config={}),
        ],
    )
    env = make(dataset, test_size=3, data_batch_size_per_gpu=6)
    env.reset()
    assert sorted(env.questions) == sorted(entry["question"] for entry in dataset)
    expected = [float(answer is not None) for answer in env.answers]
    assert step_with(env, [f"<answer>{answer}</answer>" for answer in env.answers]) == expected


def test_several_tasks() -> None:
    config = {"chain_sum": {"min_terms": 2, "max_terms": 2}}
    env = make(["chain_sum", "spell_backward"], size=40, test_size=5, config=config)
    kinds = {question.split()[0] for question in evaluated(env) + trained(env)}
    assert kinds == {"State", "Spell"}
    sums = [text.split(":")[1] for text in trained(env) if text.startswith("State")]
    assert all(text.count(" + ") + text.count(" - ") == 1 for text in sums)


def trained(env: ReasoningGym) -> list[str]:
    return [prompt["text"].split("user\n")[1] for prompts in env.upcoming(5) for prompt in prompts]


def evaluated(env: ReasoningGym) -> list[str]:
    return env.evaluate(answer_nothing).questions


def test_further_rewards() -> None:
    def short(completion: str, metadata: dict[str, Any], entry: dict[str, Any]) -> float:
        assert entry["metadata"] == metadata
        return float(len(completion) < 5)

    env = make(
        "chain_sum",
        size=2,
        test_size=0,
        answer_tag=None,
        reward_fn=[short],
        reward_weights=[1.0, 0.5],
        conversation_template=QUESTION_ONLY,
        data_batch_size_per_gpu=2,
    )
    assert step_with(env, ["no", "a long answer"]) == [0.5, 0.0]
    assert list(env.last_rewards) == ["score_answer", "short"]


def test_few_questions(caplog: pytest.LogCaptureFixture) -> None:
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    make("chain_sum", size=5, test_size=300, config=few)
    assert "of 300 held-out questions found" in caplog.text
    with pytest.raises(ValueError, match="chain_sum has too few questions: all of 20 drawn are"):
        make("chain_sum", size=5000, test_size=1, config=few)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"task": "chain_sums"}, ValueError, "no task 'chain_sums'; did you mean 'chain_sum'"),
        ({"task": ["ab"], "config": {"chain_sum": {}}}, ValueError, "config names .'chain_sum'."),
        ({"task": 3}, TypeError, "task is 3; it must be the name"),
        ({"config": {"terms": 2}}, ValueError, "chain_sum does not take {'terms': 2}"),
        ({"config": {"min_terms": 0}}, ValueError, "chain_sum does not take {'min_terms': 0}"),
        ({"size": 0}, ValueError, "size"),
        ({"reward_fn": {"score_answer": len}}, ValueError, "reward_fn has the name 'score_answer'"),
        ({"test_size": -1}, ValueError, "test_size"),
        ({"answer_tag": 2}, TypeError, "answer_tag"),
        (
            {"task": reasoning_gym.create_dataset("ab", size=2, seed=1), "seed": 2},
            ValueError,
            "task is a dataset with its own seed",
        ),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**{"task": "chain_sum", **arguments})
