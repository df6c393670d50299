from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from sums_data import TEMPLATE, sums
from transformers import PreTrainedTokenizerFast

from agilerl.llm_envs import ReasoningGym, RewardError
from agilerl.testing import (
    SPELL_BACKWARD_CONVERSATION,
    byte_tokenizer,
    spell_backward_datasets,
    spell_backward_reward,
)
from agilerl.typing import ActionResult, ReasoningPrompts

MakeEnv = Callable[..., ReasoningGym]
Complete = Callable[..., list[torch.Tensor]]


def blank(prompts: list[Any], group: int = 1) -> list[torch.Tensor]:
    """Completions of one space each."""
    return [
        torch.cat([prompt["input_ids"], torch.tensor([[32]])], dim=1).repeat(group, 1)
        for prompt in prompts
    ]


def walk(env: ReasoningGym, batches: int) -> list[list[str]]:
    """Questions of the next batches, each stepped."""
    seen = []
    if not env.questions:
        env.reset()
    for _ in range(batches):
        seen.append(env.questions)
        env.step(blank(waiting(env)))
    return seen


def waiting(env: ReasoningGym) -> list[Any]:
    """The prompts handed out last."""
    assert env._current is not None
    return env._current.prompts


# --- prompts and rewards ------------------------------------------------------------------------


def test_step_scores_the_batch_that_was_handed_out(make_env: MakeEnv, complete: Complete) -> None:
    env = make_env()
    prompts = env.reset()
    questions, answers = env.questions, env.answers
    assert [p["text"] for p in prompts] == [
        f"<|im_start|>user\nQ: {q}\nA:<|im_end|>\n<|im_start|>assistant\n" for q in questions
    ]
    texts = [[f"it is {answer}", "no"] for answer in answers]
    following, rewards = env.step(complete(prompts, texts))
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [[1.0, 0.0]] * 3
    assert env.last_completions == texts
    assert (env.last_questions, env.last_answers) == (questions, answers)
    assert len(following) == 3
    assert env.questions != questions


def test_raw_completions_are_a_third_element(make_env: MakeEnv, complete: Complete) -> None:
    env = make_env(return_raw_completions=True)
    texts = [["ä {x}", ""], ["b", "long enough"], ["c", "d"]]
    _, rewards, completions = env.step(complete(env.reset(), texts))
    assert completions == texts
    assert rewards.shape == (3, 2)


def test_reward_fn_gets_text_answer_and_question(tokenizer: PreTrainedTokenizerFast) -> None:
    """No prompt, special token or padding in the text; the answer is the dataset's own object."""
    calls = []

    def reward_fn(completion: str, answer: Any, question: str) -> float:
        calls.append((completion, answer, question))
        return 0.0

    rows = Dataset.from_list([{"question": "q{0}", "answer": {"value": 3, "unit": "m"}}])
    env = ReasoningGym(rows, rows, tokenizer, reward_fn, TEMPLATE)
    (prompt,) = env.reset()
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    start = prompt["input_ids"][0].tolist()
    env.step([torch.tensor([[*start, *b"3 m", end, pad, pad], [*start, *b"3 {m}", end]])])
    assert sorted(calls) == [
        ("3 m", {"unit": "m", "value": 3}, "q{0}"),
        ("3 {m}", {"unit": "m", "value": 3}, "q{0}"),
    ]


def test_padding_with_the_end_token(make_env: MakeEnv) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    env = make_env(tokenizer=tokenizer, train=1)
    (prompt,) = env.reset()
    ids = [*prompt["input_ids"][0].tolist(), *b"0", *[tokenizer.eos_token_id] * 3]
    _, rewards = env.step([torch.tensor([ids])])
    assert env.last_completions == [["0"]]
    assert rewards.tolist() == [[1.0]]


def test_answers_never_enter_prompts(make_env: MakeEnv) -> None:
    data = Dataset.from_list([{"question": f"q{i}", "answer": f"secret{i}"} for i in range(9)])
    template = [{"role": "user", "content": "{question} {answer} {}"}]
    env = make_env(train_dataset=data, test_dataset=data, conversation_template=template)
    prompts = env.reset()
    with env.eval_mode():
        prompts += env.reset()
    assert len(prompts) == 12
    for prompt in prompts:
        assert "secret" not in prompt["text"]
        assert "{answer} {}" in prompt["text"]


def test_async_rewards_and_group_order(make_env: MakeEnv, complete: Complete) -> None:
    async def reward_fn(completion: str, answer: str, question: str) -> float:
        await asyncio.sleep(0.001 * (10 - len(completion)))
        return len(completion)

    env = make_env(reward_fn=reward_fn)
    _, rewards = env.step(complete(env.reset(), [["a", "bb"], ["ccc", "dddd"], ["", "e"]]))
    assert rewards.tolist() == [[1.0, 2.0], [3.0, 4.0], [0.0, 1.0]]
    env.close()


def test_a_hung_or_failing_reward(make_env: MakeEnv, complete: Complete) -> None:
    def reward_fn(completion: str, answer: str, question: str) -> float:
        if completion == "hang":
            time.sleep(30)
        return 1.0 / len(completion)

    texts = [["a", "hang"], ["", "bb"], ["a", "a"]]
    env = make_env(reward_fn=reward_fn, reward_timeout=1.0, on_failure=-1.0)
    _, rewards = env.step(complete(env.reset(), texts))
    assert rewards.tolist() == [[1.0, -1.0], [-1.0, 0.5], [1.0, 1.0]]
    assert env.last_sample_mask is not None and bool(env.last_sample_mask.all())
    (good, hung), (broken, fine), others = env.last_failures
    assert hung == "reward_fn failed with TimeoutError: no result after reward_timeout=1 s"
    assert broken == "reward_fn failed with ZeroDivisionError: float division by zero"
    assert [good, fine, *others] == [None] * 4

    strict = make_env(reward_fn=reward_fn)
    prompts, questions = strict.reset(), strict.questions
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        strict.step(complete(prompts, [["a"], [""], ["a"]]))
    assert strict.questions == questions  # Still the same batch: nothing was lost.


@pytest.mark.parametrize("value", [None, float("nan"), [1.0]])
def test_wrong_reward_values(make_env: MakeEnv, value: Any) -> None:
    env = make_env(reward_fn=lambda *args: value, on_failure=0.0)
    with pytest.raises((TypeError, ValueError), match="reward_fn returned"):
        env.step(blank(env.reset()))


def test_a_real_task(tokenizer: PreTrainedTokenizerFast, complete: Complete) -> None:
    train, test = spell_backward_datasets(train_size=20, test_size=10)
    env = ReasoningGym(
        train, test, tokenizer, spell_backward_reward, SPELL_BACKWARD_CONVERSATION, 4
    )
    prompts = env.reset()
    assert all(q in p["text"] for q, p in zip(env.questions, prompts, strict=True))
    _, rewards = env.step(complete(prompts, [[answer, "?"] for answer in env.answers]))
    assert (rewards[:, 0] == 1.0).all()
    assert (rewards[:, 1] < 1.0).all()


# --- training order -----------------------------------------------------------------------------


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(make_env: MakeEnv) -> None:
    env = make_env(train=7)
    assert len(env) == 7
    epochs = [walk(env, 3) for _ in range(3)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [3, 3, 1]
        assert sorted(q for batch in epoch for q in batch) == sorted(sums(0, 7)["question"])
    assert len({str(epoch) for epoch in epochs}) == 3


def test_num_epochs_counts_completed_passes(make_env: MakeEnv) -> None:
    env = make_env(train=7)
    counts = [env.num_epochs]
    for _ in range(7):
        walk(env, 1)
        counts.append(env.num_epochs)
    assert counts == [0, 0, 0, 1, 1, 1, 2, 2]


def test_the_order_is_given_by_the_seed(make_env: MakeEnv) -> None:
    assert walk(make_env(), 6) == walk(make_env(), 6)
    assert walk(make_env(), 6) != walk(make_env(seed=43), 6)


@pytest.mark.parametrize("done", range(8))
def test_reset_hands_out_a_waiting_batch_again(make_env: MakeEnv, done: int) -> None:
    expected = walk(make_env(), 9)
    env = make_env()
    walk(env, done)
    before = env.state_dict(), env.num_epochs
    for _ in range(3):
        env.reset()
        assert env.questions == expected[done]
    assert (env.state_dict(), env.num_epochs) == before
    assert walk(env, 9 - done) == expected[done:]


def test_reset_hands_out_a_batch_again_whose_scoring_failed(make_env: MakeEnv) -> None:
    answers = iter(["not a number"])

    def reward_fn(completion: str, answer: str, question: str) -> Any:
        return next(answers, 0.0)

    env = make_env(reward_fn=reward_fn)
    prompts, questions = env.reset(), env.questions
    with pytest.raises(TypeError, match="not a number"):
        env.step(blank(prompts))
    env.reset()
    assert env.questions == questions


def test_reset_dataloaders_goes_back(make_env: MakeEnv) -> None:
    expected = walk(make_env(), 1)
    env = make_env()
    walk(env, 4)
    assert env.num_epochs == 1
    env.reset(reset_dataloaders=True)
    assert env.questions == expected[0]
    assert env.num_epochs == 0


def test_batch_larger_than_the_dataset(make_env: MakeEnv) -> None:
    env = make_env(train=2, data_batch_size_per_gpu=100)
    assert len(env.reset()) == 2
    walk(env, 1)
    assert env.num_epochs == 1


@pytest.mark.parametrize("done", range(8))
def test_state_resumes_at_the_batch_that_waited(make_env: MakeEnv, done: int) -> None:
    whole = walk(make_env(), 10)
    first = make_env()
    walk(first, done)
    state = json.loads(json.dumps(first.state_dict()))

    second = make_env(seed=7)
    second.reset()
    second.load_state_dict(state)
    with pytest.raises(RuntimeError, match="reset"):
        second.step([])
    assert second.num_epochs == first.num_epochs
    assert walk(second, 10 - done) == whole[done:]


def test_state_of_other_rows_is_refused(make_env: MakeEnv) -> None:
    state = make_env(train=7).state_dict()
    with pytest.raises(ValueError, match="rows=7, this environment has 8"):
        make_env(train=8).load_state_dict(state)
    with pytest.raises(ValueError, match=r"state has the keys \['epoch'\]"):
        make_env().load_state_dict({"epoch": 1})
    env = make_env(train=7)
    with env.eval_mode(), pytest.raises(RuntimeError, match="leave eval_mode first"):
        env.load_state_dict(state)


# --- evaluation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "size"), [(5, 2), (4, 2), (1, 2), (5, 5), (5, None), (130, None)])
@pytest.mark.parametrize("group", [1, 3])
def test_every_test_row_is_scored_once_in_order(
    make_env: MakeEnv, rows: int, size: int | None, group: int
) -> None:
    scored = []

    def reward_fn(completion: str, answer: str, question: str) -> float:
        scored.append(question)
        return float(answer)

    env = make_env(test=rows, eval_batch_size=size, reward_fn=reward_fn)
    rewards = []
    with env.eval_mode():
        prompts = env.reset()
        while prompts:
            prompts, batch_rewards = env.step(blank(prompts, group))
            rewards.append(batch_rewards)
        with pytest.raises(RuntimeError, match="call reset"):
            env.step([])
        assert env.questions == env.answers == []
    assert torch.cat(rewards).tolist() == [[2.0 * (100 + i)] * group for i in range(rows)]
    assert sorted(scored) == sorted(list(sums(100, rows)["question"]) * group)


@pytest.mark.parametrize("group", [1, 2])
def test_evaluate_answers_the_test_split_and_says_what_was_asked(
    make_env: MakeEnv, complete: Complete, group: int
) -> None:
    env = make_env(eval_batch_size=2, return_raw_completions=True)
    waiting = env.reset()

    def act(prompts: list[ReasoningPrompts]) -> ActionResult:
        texts = [[f"{'204' if '102' in prompt['text'] else 'no'}"] * group for prompt in prompts]
        return ActionResult(complete(prompts, texts), [])

    evaluation = env.evaluate(act, loop=2)
    expected = [0.0, 0.0, 1.0, 0.0, 0.0]
    numbers = [100 + i for i in range(5) for _ in range(group)] * 2
    assert evaluation.rewards.tolist() == [r for r in expected for _ in range(group)] * 2
    assert evaluation.rewards.dtype == torch.float32
    assert evaluation.questions == [f"{i}+{i}?" for i in numbers]
    assert evaluation.answers == [str(2 * i) for i in numbers]
    assert evaluation.completions == ["204" if i == 102 else "no" for i in numbers]
    assert [p["text"] for p in env.reset()] == [p["text"] for p in waiting]


def test_default_evaluation_batch(make_env: MakeEnv) -> None:
    assert make_env().eval_batch_size == 64
    assert make_env(data_batch_size_per_gpu=100).eval_batch_size == 100


def test_reset_in_evaluation_starts_from_the_top(make_env: MakeEnv) -> None:
    env = make_env(eval_batch_size=2)
    with env.eval_mode():
        env.step(blank(env.reset()))
        assert env.questions == ["102+102?", "103+103?"]
        for flag in (False, True):
            env.reset(reset_dataloaders=flag)
            assert env.questions == ["100+100?", "101+101?"]


@pytest.mark.parametrize("when", range(8))
def test_evaluation_leaves_training_where_it_was(make_env: MakeEnv, when: int) -> None:
    expected = walk(make_env(), 8)
    env = make_env(eval_batch_size=2)
    seen = walk(env, when)
    prompts = waiting(env)
    before = (env.questions, env.answers, env.num_epochs, env.state_dict())
    with env.eval_mode():
        assert env.state_dict() == before[-1]
        env.step(blank(env.reset()))  # Not even to its end.
    assert (env.questions, env.answers, env.num_epochs, env.state_dict()) == before
    seen.append(env.questions)
    env.step(blank(prompts))
    assert (seen + walk(env, 8))[:8] == expected


def test_evaluation_before_the_first_reset(make_env: MakeEnv) -> None:
    env = make_env()
    with env.eval_mode():
        env.reset()
    with pytest.raises(RuntimeError, match="reset"):
        env.step([])
    assert walk(env, 3) == walk(make_env(), 3)


def test_evaluation_that_fails_gives_training_back(make_env: MakeEnv) -> None:
    env = make_env()
    env.reset()
    questions = env.questions
    with pytest.raises(KeyError), env.eval_mode():
        env.reset()
        raise KeyError("model")
    assert env.questions == questions


def test_evaluation_inside_evaluation(make_env: MakeEnv) -> None:
    env = make_env(eval_batch_size=2)
    with env.eval_mode():
        env.step(blank(env.reset()))
        with env.eval_mode():
            env.reset()
        assert env.questions == ["102+102?", "103+103?"]


# --- several processes --------------------------------------------------------------------------


def test_processes_share_the_rows(make_env: MakeEnv) -> None:
    ranks = [
        make_env(
            train=8,
            test=7,
            accelerator=SimpleNamespace(process_index=rank, num_processes=3),
            data_batch_size_per_gpu=2,
        )
        for rank in range(3)
    ]
    assert {len(env) for env in ranks} == {8}
    trained = [walk(env, 1)[0] for env in ranks]
    # Batches of 6; the rest of 2 rows would leave a process without any, so it joins the batch.
    assert [len(questions) for questions in trained] == [3, 3, 2]
    assert sorted(q for questions in trained for q in questions) == sorted(sums(0, 8)["question"])
    assert {env.num_epochs for env in ranks} == {1}
    assert ranks[0].state_dict() == ranks[2].state_dict()
    tested = []
    for env in ranks:
        with env.eval_mode():
            env.reset()
            tested += env.questions
    assert sorted(tested) == sorted(sums(100, 7)["question"])


def test_more_processes_than_rows(make_env: MakeEnv) -> None:
    with pytest.raises(ValueError, match="2 rows for 3 processes"):
        make_env(train=2, accelerator=SimpleNamespace(process_index=0, num_processes=3))


# --- filtering ----------------------------------------------------------------------------------


def test_long_prompts_are_left_out_with_their_count(
    make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    """ChatML and the template put 25 tokens around the question: 27 leave room for two letters."""
    train = Dataset.from_dict({"question": ["xxx", "x", "xxxx", "xx"], "answer": list("3142")})
    test = Dataset.from_dict({"question": ["x", "xxx", "x"], "answer": list("131")})
    env = make_env(train_dataset=train, test_dataset=test, max_context_length=27)
    assert len(env) == 2
    assert sorted(prompt["input_ids"].shape[1] for prompt in env.reset()) == [26, 27]
    assert sorted(zip(env.questions, env.answers, strict=True)) == [("x", "1"), ("xx", "2")]
    with env.eval_mode():
        assert len(env.reset()) == 2
    assert "train_dataset: dropped 2 of 4 rows" in caplog.text
    assert "test_dataset: dropped 1 of 3 rows" in caplog.text


def test_rows_that_are_too_long_do_not_count_where_rows_are_appended(make_env: MakeEnv) -> None:
    """Positions count the rows that fit: another limit that keeps other ones is noticed."""

    def make(questions: list[str], limit: int = 27) -> Any:
        train = Dataset.from_dict({"question": questions, "answer": ["1"] * len(questions)})
        splits = {"train_dataset": train, "test_dataset": None}
        return make_env(**splits, max_context_length=limit, data_batch_size_per_gpu=1)

    saved = make(["xxx", "x", "y", "yyy"])
    saved.step([torch.tensor([[*prompt["input_ids"][0], 65]]) for prompt in saved.reset()])
    state, fingerprint = saved.state_dict(), saved.fingerprint()
    assert (state["rows"], state["offset"]) == (2, 1)
    more = make(["xxx", "x", "y", "yyy", "zzz", "z"])
    more.load_state_dict(more.with_appended_rows(state, fingerprint))
    assert more.state_dict() == {**state, "rows": 3, "segments": [2, 1]}
    saved.reset()
    more.reset()
    assert more.questions == saved.questions
    questions = ["xxx", "x", "y", "z"]
    assert make(questions, 26).with_appended_rows(state, fingerprint)["rows"] == 3
    with pytest.raises(ValueError, match="the first 2 of the 4 rows of train_dataset are not"):
        make(questions, 28).with_appended_rows(state, fingerprint)


def test_nothing_is_said_when_all_prompts_fit(
    make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(make_env(max_context_length=100)) == 7
    assert not caplog.records


def test_nothing_fits(make_env: MakeEnv) -> None:
    with pytest.raises(ValueError, match=r"train_dataset: none of the 7 .*max_context_length=5"):
        make_env(max_context_length=5)


@pytest.mark.parametrize("limit", [None, 27])
def test_prompt_lengths_count_the_template_once(make_env: MakeEnv, limit: int | None) -> None:
    """25 tokens around the question; the training rows come first."""
    train = Dataset.from_dict({"question": ["xx", "xxxx"], "answer": ["1", "2"]})
    test = Dataset.from_dict({"question": ["x", "xxx"], "answer": ["3", "4"]})
    env = make_env(train_dataset=train, test_dataset=test, max_context_length=limit)
    expected = [27, 29, 26, 28] if limit is None else [27, 26]
    assert env.prompt_lengths() == expected
    env.tokenizer.chat_template = "longer {{ messages }}"
    assert env.prompt_lengths() == expected


def test_the_fingerprint_is_of_questions_answers_and_templates(make_env: MakeEnv) -> None:
    def rows(question: str = "2+2", answer: Any = "4") -> Dataset:
        return Dataset.from_dict({"question": ["1+1", question], "answer": [["2"], [answer]]})

    own = make_env(train_dataset=rows(), data_batch_size_per_gpu=2).fingerprint()
    assert make_env(train_dataset=rows(), data_batch_size_per_gpu=1, seed=9).fingerprint() == own
    others = (
        {"train_dataset": rows(question="3+1")},
        {"train_dataset": rows(answer="5")},
        {"train_dataset": rows().select([1, 0])},
        {"train_dataset": rows(), "test_dataset": sums(101, 5)},
        {
            "train_dataset": rows(),
            "conversation_template": [{"role": "user", "content": "{question}"}],
        },
    )
    assert len({own, *(make_env(**other).fingerprint() for other in others)}) == 6


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"train_dataset": None}, TypeError, "train_dataset is .*must be a datasets.Dataset"),
        ({"test_dataset": [{"question": "q"}]}, ValueError, "test_dataset has no column 'answer'"),
        ({"train_dataset": ["2+2?"]}, TypeError, r"train_dataset\[0\] is '2\+2\?'; each row must"),
        ({"train_dataset": []}, ValueError, "train_dataset has no rows"),
        ({"train_dataset": DatasetDict(train=sums(0, 2))}, TypeError, "one split"),
        (
            {"train_dataset": sums(0, 2).to_iterable_dataset()},
            ValueError,
            "max_context_length is None, but train_dataset is a stream",
        ),
        ({"test_dataset": sums(0, 2).to_iterable_dataset()}, TypeError, "test_dataset is a stream"),
        ({"train_dataset": Dataset.from_list([])}, ValueError, "train_dataset has no rows"),
        ({"test_dataset": sums(0, 0)}, ValueError, "test_dataset has no rows"),
        (
            {"train_dataset": sums(0, 2).rename_column("question", "problem")},
            ValueError,
            "train_dataset has no column 'question', only .*'problem'",
        ),
        (
            {"test_dataset": sums(0, 2).rename_column("question", "problem")},
            ValueError,
            "test_dataset has no column 'question', of which prompts are made",
        ),
        ({"test_dataset": sums(0, 2).remove_columns("answer")}, ValueError, "no column 'answer'"),
        (
            {"train_dataset": Dataset.from_dict({"question": ["a", None], "answer": ["", ""]})},
            ValueError,
            "train_dataset row 1: question is None, and conversation_template shows it; drop",
        ),
        ({"tokenizer": None}, TypeError, "tokenizer is of type NoneType"),
        ({"reward_fn": 1.0}, TypeError, "reward_fn is 1.0; pass a function"),
        ({"reward_fn": lambda text, truth: 0.0}, TypeError, "three arguments"),
        ({"reward_weights": [1.0]}, TypeError, "reward_fn is not a list or a dict"),
        ({"skip_special_tokens": None}, TypeError, "skip_special_tokens is None"),
        ({"conversation_template": []}, ValueError, "has no {question}"),
        ({"conversation_template": None}, ValueError, "is None, .* no conversations.*for example"),
        ({"chat_template_kwargs": {"tokenize": True}}, ValueError, "chat_template_kwargs has"),
        ({"chat_template_kwargs": [1]}, TypeError, r"chat_template_kwargs is \[1\]"),
        ({"conversation_template": "{question}"}, TypeError, "list of messages"),
        (
            {"data_batch_size_per_gpu": 0},
            ValueError,
            "data_batch_size_per_gpu is .*must be at least 1",
        ),
        (
            {"data_batch_size_per_gpu": 2.5},
            TypeError,
            "data_batch_size_per_gpu is .*must be an integer",
        ),
        ({"eval_batch_size": -1}, ValueError, "eval_batch_size is .*must be at least 1"),
        ({"max_context_length": 0}, ValueError, "max_context_length is .*must be at least 1"),
        ({"max_context_length": "9"}, TypeError, "max_context_length is .*must be an integer"),
        ({"seed": -1}, ValueError, "seed is .*must be at least 0"),
        ({"seed": None}, TypeError, "seed is .*must be an integer"),
        ({"reward_timeout": -1}, ValueError, "reward_timeout is -1"),
        ({"on_failure": float("inf")}, ValueError, "on_failure is inf"),
        ({"reward_workers": 0}, ValueError, "reward_workers is .*must be at least 1"),
        ({"accelerator": "cpu"}, TypeError, "accelerator must be"),
    ],
)
def test_bad_arguments(
    make_env: MakeEnv, kwargs: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make_env(**kwargs)


def test_a_tokenizer_without_pad_token(make_env: MakeEnv) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match=r"no pad token.*tokenizer\.pad_token ="):
        make_env(tokenizer=tokenizer)


def test_completions_that_do_not_belong_to_the_batch(make_env: MakeEnv) -> None:
    env = make_env()
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        env.step([])
    good = blank(env.reset(), 2)
    cases: list[tuple[Any, type[Exception], str]] = [
        (
            torch.stack([g[0, :5] for g in good]),
            TypeError,
            "of type Tensor; it must be a list of tensors",
        ),
        (good[:2], ValueError, "2 entries for the 3 prompts"),
        ([*good[:2], good[2].float()], TypeError, r"completion_ids\[2\] is of type torch.float32"),
        ([*good[:2], good[2].tolist()], TypeError, r"completion_ids\[2\] is of type list"),
        ([good[0], good[2], good[1]], ValueError, r"completion_ids\[1\] does not start with"),
        ([good[0][0], *good[1:]], ValueError, r"\(G, T\)"),
        ([good[0][:, :4], *good[1:]], ValueError, "start with the"),
        ([good[0][:0], *good[1:]], ValueError, r"\(0, "),
        ([good[0][:1], *good[1:]], ValueError, r"sizes \[1, 2\]"),
    ]
    for completion_ids, error, match in cases:
        with pytest.raises(error, match=match):
            env.step(completion_ids)
    _, rewards = env.step(good)
    assert rewards.shape == (3, 2)


def test_the_contracts_signature() -> None:
    parameters = inspect.signature(ReasoningGym).parameters
    contract = {
        "train_dataset": inspect.Parameter.empty,
        "test_dataset": inspect.Parameter.empty,
        "tokenizer": inspect.Parameter.empty,
        "reward_fn": inspect.Parameter.empty,
        "conversation_template": inspect.Parameter.empty,
        "data_batch_size_per_gpu": 8,
        "accelerator": None,
        "return_raw_completions": False,
        "max_context_length": None,
        "seed": 42,
    }
    assert {name: p.default for name, p in list(parameters.items())[:10]} == contract
    ours = {
        "reward_timeout": 60.0, "reward_workers": 16,
        "eval_batch_size": None, "reward_weights": None, "skip_special_tokens": True,
        "chat_template_kwargs": None, "on_failure": "raise", "max_failure_share": 0.5,
        "failure_retries": 0, "extract_answer": None,
    }  # fmt: skip
    rest = dict(list(parameters.items())[10:])
    assert {name: parameter.default for name, parameter in rest.items()} == ours
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in rest.values())
