"""What the rewards of a ReasoningGym see, and what it says of several of them."""

from __future__ import annotations

import copy
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from agilerl.llm_envs import ReasoningGym
from agilerl.llm_envs.rewards.calls import own_copy
from agilerl.rewards import batched_reward
from agilerl.testing import byte_tokenizer
from agilerl.typing import ActionResult

MakeEnv = Callable[..., ReasoningGym]
Complete = Callable[..., list[torch.Tensor]]

ROWS = {
    "question": ["1+1?", "2+2?", "a longer question than fits"],
    "answer": ["2", "4", "x"],
    "tests": [["t1"], ["t2", "t3"], []],
    "level": [1, 2, 3],
    "completion": ["of the dataset"] * 3,
}


def data(**changes: Any) -> dict[str, Dataset]:
    """Both splits the same, so that every batch has a known answer."""
    rows = Dataset.from_dict(ROWS | changes)
    return {"train_dataset": rows, "test_dataset": rows}


def scored(env: ReasoningGym, complete: Complete) -> torch.Tensor:
    """Rewards of the waiting batch, each prompt completed with "a" and "bb"."""
    return env.step(complete(env.reset(), [["a", "bb"]] * len(env.questions)))[1]


def test_a_reward_sees_the_columns_of_its_own_row(make_env: MakeEnv, complete: Complete) -> None:
    seen = []

    def reward(question: str, tests: list[str], completion: str, level: int) -> float:
        seen.append((question, tests, completion, level))
        return level

    env = make_env(reward_fn=reward, max_context_length=35, **data())
    questions = env.reset() and env.questions
    assert len(questions) == 2  # the long one is dropped, and its columns with it
    rewards = scored(env, complete)
    levels = {"1+1?": 1.0, "2+2?": 2.0}
    assert rewards.tolist() == [[levels[q]] * 2 for q in questions]
    assert sorted(seen) == [
        ("1+1?", ["t1"], "a", 1), ("1+1?", ["t1"], "bb", 1),
        ("2+2?", ["t2", "t3"], "a", 2), ("2+2?", ["t2", "t3"], "bb", 2),
    ]  # fmt: skip


def test_evaluation_gives_the_test_splits_columns(make_env: MakeEnv, complete: Complete) -> None:
    env = make_env(
        reward_fn={"level": lambda level: level},
        train_dataset=Dataset.from_dict(ROWS),
        test_dataset=Dataset.from_dict(ROWS | {"level": [10, 20, 30]}),
        eval_batch_size=2,
    )
    evaluation = env.evaluate(
        lambda prompts: ActionResult(complete(prompts, [["a"]] * len(prompts)), [])
    )
    assert evaluation.rewards.tolist() == [10.0, 20.0, 30.0]


@pytest.mark.parametrize("own_column", [False, True])
def test_info(make_env: MakeEnv, complete: Complete, own_column: bool) -> None:
    """The dataset's column of the name, or else what its other columns hold."""
    seen = []
    changes = {"info": [{"id": 1}, {"id": 2}, {"id": 3}]} if own_column else {}
    env = make_env(reward_fn=lambda info: seen.append(info) or 0.0, **data(**changes))
    scored(env, complete)
    expected = changes.get("info") or [
        {"tests": tests, "level": level}
        for tests, level in zip(ROWS["tests"], ROWS["level"], strict=True)
    ]
    assert all(seen.count(row) == 2 for row in expected) and len(seen) == 6


def test_batched_rewards_get_the_groups_side_by_side(make_env: MakeEnv, complete: Complete) -> None:
    seen: dict[str, list[Any]] = {}

    @batched_reward
    def reward(**columns: list[Any]) -> list[float]:
        seen.update(columns)
        return list(range(len(columns["level"])))

    env = make_env(reward_fn=reward, **data())
    rewards = scored(env, complete)
    assert rewards.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert seen["completion"] == ["a", "bb"] * 3
    assert seen["question"] == [q for q in env.last_questions for _ in range(2)]
    assert [ROWS["question"][level - 1] for level in seen["level"]] == seen["question"]
    assert seen["finish_reason"] == ["stop"] * 6


def test_unasked_columns_are_not_read(make_env: MakeEnv, complete: Complete) -> None:
    """They may be images, or hold what Python cannot."""
    env = make_env(reward_fn=lambda completion, level: level, **data())
    assert env._train.dataset.batch([0, 2]).columns == {"level": [1, 3]}
    assert make_env(**data())._train.dataset.batch([0]).columns == {}


def test_a_column_of_one_split_only_is_refused(make_env: MakeEnv) -> None:
    splits = data()
    splits["test_dataset"] = splits["test_dataset"].remove_columns("level")
    with pytest.raises(TypeError, match=r"unknown parameter 'level'.* info, tests; rename"):
        make_env(reward_fn=lambda completion, level: 0.0, **splits)


def test_the_fingerprint_knows_the_columns_that_rewards_see(make_env: MakeEnv) -> None:
    changed = data(level=[1, 2, 4])
    assert make_env(**data()).fingerprint() == make_env(**changed).fingerprint()
    first, second = (
        make_env(reward_fn=lambda level: level, **splits).fingerprint()
        for splits in (data(), changed)
    )
    assert first != second


# --- ids and the reason of the end --------------------------------------------------------------


def seen_of(
    tokenizer: PreTrainedTokenizerFast,
    rows: list[list[int]],
    lengths: list[int] | None = None,
    reasons: list[str] | None = None,
    **kwargs: Any,
) -> list[tuple[str, list[int], str]]:
    """What a reward sees of the completions of one prompt."""
    seen: dict[int, Any] = {}

    @batched_reward
    def reward(completions: list[str], completion_ids: Any, finish_reasons: Any) -> list[float]:
        seen.update(enumerate(zip(completions, completion_ids, finish_reasons, strict=True)))
        return [0.0] * len(completions)

    one = Dataset.from_dict({"question": ["q"], "answer": ["a"]})
    template = [{"role": "user", "content": "{question}"}]
    env = ReasoningGym(one, one, tokenizer, reward, template, **kwargs)
    (prompt,) = env.reset()
    start = prompt["input_ids"][0].tolist()
    ids, action = torch.tensor([start + row for row in rows]), None
    if lengths is not None:
        position = torch.arange(ids.shape[1] - 1) - len(start) + 1
        mask = (position >= 0) & (position < torch.tensor(lengths)[:, None])
        action = ActionResult([ids], [mask], None, None if reasons is None else [reasons])
    env.step([ids], action)
    return [seen[i] for i in range(len(rows))]


def test_ids_and_finish_reasons_without_word_from_the_agent() -> None:
    tokenizer = byte_tokenizer()
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    x, y = b"xy"
    rows = [[x, end, pad, pad], [x, y, x, end], [x, y, x, y], [x, y, pad, pad]]
    assert seen_of(tokenizer, rows) == [
        ("x", [x, end], "stop"),
        ("xyx", [x, y, x, end], "stop"),
        ("xyxy", [x, y, x, y], "length"),
        ("xy", [x, y], "stop"),  # shorter than another: a stop sequence
    ]


def test_what_the_agent_says_of_its_completions_wins() -> None:
    """It may pad with any special token, and sample one where its completion ends."""
    tokenizer = byte_tokenizer()
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    x, y = b"xy"
    rows = [[x, end, other, other], [x, pad, other, other], [x, y, x, y], [x, y, other, other]]
    reasons = ["stop", "stop", "stop", "length"]
    seen = seen_of(tokenizer, rows, [2, 2, 4, 2], reasons, skip_special_tokens=False)
    assert seen == [
        ("x", [x, end], "stop"),
        ("x<|pad|>", [x, pad], "stop"),
        ("xyxy", [x, y, x, y], "stop"),
        ("xy", [x, y], "length"),
    ]
    inferred = [reason for _, _, reason in seen_of(tokenizer, rows, [2, 2, 4, 2])]
    assert inferred == ["stop", "stop", "length", "stop"]


@pytest.mark.parametrize("overridden", [False, True])
def test_step_may_be_overridden_with_ids_alone(overridden: bool) -> None:
    class Gym(ReasoningGym):
        def step(self, completion_ids: Any) -> Any:  # type: ignore[override]
            return super().step(completion_ids)

    tokenizer = byte_tokenizer()
    one = Dataset.from_dict({"question": ["q"], "answer": ["a"]})
    template = [{"role": "user", "content": "{question}"}]
    kind = Gym if overridden else ReasoningGym
    env = kind(one, one, tokenizer, lambda finish_reason: finish_reason == "stop", template)

    def act(prompts: Any) -> ActionResult:
        ids = torch.cat([prompts[0]["input_ids"], torch.tensor([[ord("x")]])], 1)
        return ActionResult([ids], [], None, [["stop"]])

    # From the ids alone a single token without an end looks cut off.
    assert env.evaluate(act).rewards.tolist() == [0.0 if overridden else 1.0]


def test_ids_where_the_end_of_sequence_is_the_padding() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    end, x = tokenizer.eos_token_id, ord("x")
    rows = [[x, end, end], [x, x, end], [x, x, x], [end, end, end]]
    expected = seen_of(tokenizer, rows)
    assert seen_of(byte_tokenizer(), rows) == expected  # and where the agent pads with it
    assert expected == [
        ("x", [x, end], "stop"),
        ("xx", [x, x, end], "stop"),
        ("xxx", [x, x, x], "length"),
        ("", [end], "stop"),
    ]


def test_special_tokens_are_shown_on_request() -> None:
    tokenizer = byte_tokenizer()
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    rows = [[start, *b"x", start, end, pad], [*b"ab", start, *b"cd"], [end, *b"abc", end]]
    shown = [text for text, _, _ in seen_of(tokenizer, rows, skip_special_tokens=False)]
    assert shown == ["<|im_start|>x<|im_start|>", "ab<|im_start|>cd", "<|im_end|>abc"]
    assert [text for text, _, _ in seen_of(tokenizer, rows)] == ["x", "abcd", "abc"]


# --- several rewards ----------------------------------------------------------------------------


def test_several_rewards(make_env: MakeEnv, complete: Complete) -> None:
    def short(completion: str) -> float:
        return float(len(completion) == 1)

    def hard(level: int) -> float | None:
        return None if level < 3 else -1.0

    env = make_env(reward_fn=[short, hard], reward_weights=[2, 0.25], **data())
    rewards = scored(env, complete)
    third = [q == ROWS["question"][2] for q in env.last_questions]
    assert rewards.tolist() == [[1.75, -0.25] if last else [2.0, 0.0] for last in third]
    assert env.last_rewards["short"].tolist() == [[1.0, 0.0]] * 3
    parts = env.last_rewards["hard"].tolist()
    for last, group in zip(third, parts, strict=True):
        assert group == [-1.0, -1.0] if last else all(map(math.isnan, group))


def test_a_row_without_any_reward_leaves_the_batch_waiting(
    make_env: MakeEnv, complete: Complete
) -> None:
    env = make_env(reward_fn=[lambda level: 1.0 if level < 3 else None], **data())
    env.reset()
    questions = env.questions
    with pytest.raises(ValueError, match=r"(?s)no reward applies.*a longer question"):
        scored(env, complete)
    assert env.questions == questions


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "q"}, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"),
        ({"question": "q", "prompt": "own"}, "own"),
    ],
)
def test_a_function_written_for_trl(row: dict[str, str], expected: str, complete: Complete) -> None:
    seen = []

    @batched_reward
    def length(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        seen.extend(prompts)
        return [float(len(completion)) for completion in completions]

    template = [{"role": "user", "content": "{question}"}]
    env = ReasoningGym([row], None, byte_tokenizer(), length, template)
    assert env.step(complete(env.reset(), [["a", "bb"]]))[1].tolist() == [[1.0, 2.0]]
    assert seen == [expected] * 2


NUMBERS = [{"nums": [1, 2, 3], "meta": {"seed": [7]}}, {"nums": [4, 5], "meta": {"seed": [8]}}]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_reward_may_change_what_it_gets(
    make_env: MakeEnv, complete: Complete, batched: bool, as_list: bool
) -> None:
    """Neither other completions, nor another reward, nor the user's rows see it."""
    mine: Any = copy.deepcopy(NUMBERS)
    rows = mine if as_list else Dataset.from_list(mine)

    def spoils(nums: list[int], meta: dict[str, Any], info: dict[str, Any]) -> float:
        whole = {"nums": nums, "meta": meta} in NUMBERS and {"nums": nums, "meta": meta} == info
        nums.clear()
        meta["seed"].pop()
        info.clear()
        return float(whole)

    @batched_reward
    def spoils_all(nums: list[Any], meta: list[Any], info: list[Any]) -> list[float]:
        return [spoils(*each) for each in zip(nums, meta, info, strict=True)]

    env = make_env(
        reward_fn={"one": spoils_all if batched else spoils, "other": spoils},
        train_dataset=rows,
        test_dataset=None,
        conversation_template=[{"role": "user", "content": "{nums}"}],
    )
    for _ in range(2):
        assert sorted(env.reset()[i]["text"].splitlines()[1] for i in (0, 1)) == [
            "[1, 2, 3]<|im_end|>", "[4, 5]<|im_end|>"
        ]  # fmt: skip
        env.step(complete(env.reset(), [["a", "b", "c"]] * 2))
        assert {name: each.tolist() for name, each in env.last_rewards.items()} == {
            "one": [[1.0] * 3] * 2, "other": [[1.0] * 3] * 2
        }  # fmt: skip
    assert mine == NUMBERS


def test_copies_of_values() -> None:
    lock = threading.Lock()
    held = OrderedDict(client=lock)
    for value in ([1, "a"], [[1], {"a": (2, [3])}], {1}, np.zeros(2), torch.zeros(2)):
        copied = own_copy(value)
        assert copied is not value and str(copied) == str(value)
    assert own_copy([[1]])[0] is not own_copy([[1]])[0]
    nested = ([1],)
    assert own_copy(nested)[0] is not nested[0]
    for shared in ("a", None, lock, held):
        assert own_copy(shared) is shared
