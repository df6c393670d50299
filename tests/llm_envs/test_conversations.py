"""Rows as people have them: templates over any column, conversations, lists of dicts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from agilerl import checks
from agilerl.llm_envs import ReasoningGym
from agilerl.rewards import batched_reward

MakeEnv = Callable[..., ReasoningGym]
Complete = Callable[..., list[torch.Tensor]]
Row = dict[str, Any]

ASK = {"role": "user", "content": "2+2?"}
BRIEF = {"role": "system", "content": "Be brief."}


def nothing(completion: str) -> float:
    return 0.0


def texts(env: ReasoningGym) -> list[str]:
    """The contents of the prompts, without what the chat template adds."""
    prompts = [prompt["text"] for prompt in env.reset()]
    plain = [text.removesuffix("<|im_end|>\n<|im_start|>assistant\n") for text in prompts]
    return [text.removeprefix("<|im_start|>user\n") for text in plain]


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_warned", set())


@pytest.fixture
def make(make_env: MakeEnv) -> Callable[..., ReasoningGym]:
    """``make(rows, template)``: both splits have the rows."""

    def made(rows: Any, template: Any = None, **arguments: Any) -> ReasoningGym:
        if isinstance(template, str):
            template = [{"role": "user", "content": template}]
        return make_env(
            **{"reward_fn": nothing, "conversation_template": template}
            | {"train_dataset": rows, "test_dataset": rows}
            | arguments
        )

    return made


# --- templates over columns ---------------------------------------------------------------------


def test_any_column_is_filled_once(make: MakeEnv) -> None:
    row = {"nums": [3, 5, 7], "target": 24, "hint": "{target} {{x}}", "answer": "secret"}
    template = r"{nums} -> {target}; \frac{a}{b} {} {{target}} {hint} {unknown}"
    for rows in ([row], Dataset.from_list([row])):
        env = make(rows, template)
        shown = r"[3, 5, 7] -> 24; \frac{a}{b} {} {24} {target} {{x}} {unknown}"
        assert texts(env) == [shown]
        assert env.questions == [shown]


@pytest.mark.parametrize(
    ("question", "shown"),
    [([3, 5, 7], "[3, 5, 7]"), (24, "24"), (1.5, "1.5"), (True, "true"), ({"x": 1}, '{"x": 1}')],
)
def test_questions_that_are_no_text(
    make: MakeEnv, complete: Complete, question: Any, shown: str
) -> None:
    """Prompts and logs have their text, rewards the value itself."""
    seen = []
    env = make(
        [{"question": question}],
        "{question}",
        reward_fn=lambda completion, question: float(seen.append(question) or 0.0),
    )
    assert texts(env) == env.questions == [shown]
    env.step(complete(env.reset(), [["a"]]))
    assert seen == [question]
    assert env.last_questions == [shown]


def test_the_answer_is_never_filled_in(make: MakeEnv, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": "q", "answer": "secret"}]
    for _ in range(2):
        assert texts(make(rows, "{question} {answer}")) == ["q {answer}"]
    messages = [record.getMessage() for record in caplog.records if "{answer}" in record.message]
    assert len(messages) == 1
    assert "rename_column('answer', 'hint')" in messages[0]


def test_a_placeholder_that_nearly_names_a_column(
    make: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": "q", "Target": 1}]
    assert texts(make(rows, "{question} {quesion} {target} {set}")) == [
        "q {quesion} {target} {set}"
    ]
    assert "{quesion} in conversation_template names no column" in caplog.text
    assert "did you mean {Target}?" in caplog.text
    assert "{set}" not in caplog.text


@pytest.mark.parametrize("template", ["Q:", "Q: { question }", "{answer}", ""])
def test_a_template_that_shows_no_column(make: MakeEnv, template: str) -> None:
    with pytest.raises(ValueError, match=r"no \{question\}, nor another column of train_dataset"):
        make([{"question": "q", "answer": "a"}], template)


@pytest.mark.parametrize(
    ("row", "example"),
    [({"answer": "a", "problem": "p"}, "{problem}"), ({"answer": "a"}, "{quest")],
)
def test_no_template_for_rows_that_need_one(make: MakeEnv, row: Row, example: str) -> None:
    with pytest.raises(ValueError, match=rf'is None, but .*"user", "content": "\{example}'):
        make([row])


def test_none_in_a_shown_column(make: MakeEnv) -> None:
    rows = [{"question": "q", "hint": "h"}, {"question": "q"}]
    with pytest.raises(ValueError, match=r"train_dataset row 1: hint is None"):
        make(rows, "{question} {hint}")
    assert len(make(rows, "{question}")) == 2


def test_a_value_that_is_no_text(make: MakeEnv) -> None:
    with pytest.raises(TypeError, match=r"train_dataset row 0: .*type object cannot be shown"):
        make([{"question": "q", "image": object()}], "{question} {image}")


def test_rows_of_different_keys_stay_python_objects(make: MakeEnv, complete: Complete) -> None:
    """Arrow would give every row the keys of all, and refuse the last one."""
    extra = [{"a": (1, 2)}, {"b": {3}}, "text"]
    rows = [{"question": f"q{i}", "metadata": value} for i, value in enumerate(extra)]
    seen: dict[str, Any] = {}
    env = make(
        rows,
        "{question}",
        reward_fn=lambda completion, question, metadata: seen.update({question: metadata}) or 0.0,
    )
    env.step(complete(env.reset(), [["x"]] * 3))
    assert all(seen[f"q{i}"] == value for i, value in enumerate(extra))


# --- answers ------------------------------------------------------------------------------------


def test_answers_are_needed_only_if_asked_for(make: MakeEnv, complete: Complete) -> None:
    env = make([{"question": "q"}], "{question}")
    env.step(complete(env.reset(), [["x"]]))
    assert env.last_answers == [None]
    everything: dict[str, Any] = {}
    env = make([{"question": "q"}], "{question}", reward_fn=lambda **k: everything.update(k) or 0.0)
    env.step(complete(env.reset(), [["x"]]))
    assert everything["answer"] is None
    for asking in (lambda completion, answer: 0.0, lambda a, b, c: 0.0):
        with pytest.raises(ValueError, match=r"train_dataset has no column 'answer', only"):
            make([{"question": "q"}], "{question}", reward_fn=asking)


# --- conversations ------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["prompt", "messages"])
@pytest.mark.parametrize("listed", [True, False])
def test_a_column_of_conversations(make: MakeEnv, column: str, listed: bool) -> None:
    rows = [
        {column: [BRIEF, ASK]},
        {
            column: [
                ASK,
                {"role": "assistant", "content": "4"},
                {"role": "user", "content": "Sure?"},
            ]
        },
    ]
    env = make(rows if listed else Dataset.from_list(rows))
    expected = {
        "2+2?": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?",
        "Sure?": "2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nSure?",
    }
    found = texts(env)
    assert dict(zip(env.questions, found, strict=True)) == expected


@pytest.mark.parametrize("form", [None, "torch", "numpy", "pandas", "arrow"])
def test_formats_of_a_dataset(make: MakeEnv, form: str | None) -> None:
    rows = Dataset.from_list([{"prompt": [BRIEF, ASK], "level": 3}]).with_format(form)
    assert make(rows).reset()[0]["text"] == make([{"prompt": [BRIEF, ASK]}]).reset()[0]["text"]
    assert texts(make(rows, "Level {level}")) == ["Level 3"]
    as_pandas_reads_it = rows.to_pandas().to_dict("records")
    assert texts(make(as_pandas_reads_it)) == texts(make(rows))


def test_a_template_in_front_of_conversations(make: MakeEnv) -> None:
    env = make([{"prompt": [ASK], "topic": "sums"}], [BRIEF])
    assert texts(env) == ["<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?"]
    filled = [{"role": "system", "content": "Know {topic}."}]
    env = make([{"prompt": [ASK], "topic": "sums"}], filled)
    assert texts(env) == ["<|im_start|>system\nKnow sums.<|im_end|>\n<|im_start|>user\n2+2?"]
    with pytest.raises(ValueError, match="row 0: prompt has a system message, and conv"):
        make([{"prompt": [BRIEF, ASK]}], [BRIEF])


def test_a_template_that_shows_columns_comes_before_conversations(make: MakeEnv) -> None:
    """As rows of supervised finetuning have: messages with the answer beside the question."""
    messages = [ASK, {"role": "assistant", "content": "4"}]
    env = make([{"question": "2+2?", "messages": messages}], "Q: {question}")
    assert texts(env) == ["Q: 2+2?"]
    with pytest.raises(ValueError, match=r"messages is a conversation, which \{messages\} cannot"):
        make([{"question": "2+2?", "messages": messages}], "{messages}")


def test_a_prompt_that_is_text_is_the_question(make: MakeEnv) -> None:
    for template in ("{question}", "{prompt}"):
        env = make([{"prompt": "2+2?"}], template)
        assert texts(env) == env.questions == ["2+2?"]
    with pytest.raises(ValueError, match=r"conversation_template is None.*\{prompt\}"):
        make([{"prompt": "2+2?"}])


def test_which_column_is_the_question(make: MakeEnv) -> None:
    env = make([{"prompt": "in verse", "problem": "2+2?"}], "{problem}")
    assert texts(env) == env.questions == ["2+2?"]
    for question, shown in (("sum", "sum"), (None, "2+2?")):
        env = make([{"prompt": [ASK], "question": question}])
        env.reset()
        assert env.questions == [shown]


def test_parts_and_further_keys_of_messages(
    make: MakeEnv, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}"
        "{% if 'name' in m %}({{ m.name }}){% endif %};{% endfor %}"
    )
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    rows = [
        {
            "prompt": [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
                {"role": "tool", "content": "4", "name": "add", "tool_call_id": "1"},
            ]
        }
    ]
    env = make(rows, tokenizer=tokenizer)
    assert env.reset()[0]["text"] == "user:2+2?;assistant:add;tool:4(add);"
    assert env.questions == ["2+2?"]


@pytest.mark.parametrize(
    ("conversation", "error", "match"),
    [
        ([ASK, {"role": "assistant", "content": "4"}], ValueError, "ends with a message of the as"),
        ([], ValueError, "row 1: prompt has no messages"),
        ("2+2?", TypeError, "row 1: prompt is '2\\+2\\?'; it must be a list of messages"),
        (None, TypeError, "row 1: prompt is None"),
        ([ASK, "x"], TypeError, r"row 1: prompt\[1\] is 'x'; a message is a dict"),
        ([{"role": "user"}], TypeError, r"row 1: prompt\[0\] is"),
        ([{"role": "user", "content": 4}], TypeError, r"has the content 4; it must be a string"),
        ([{"role": "user", "content": None}], TypeError, r"has the content None"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            ValueError,
            r"prompt\[0\] has a part of the type 'image'",
        ),
    ],
)
def test_bad_conversations(
    make: MakeEnv, conversation: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=f"train_dataset {match}" if "row" in match else match):
        make([{"prompt": [ASK]}, {"prompt": conversation}])


def test_two_columns_of_conversations(make: MakeEnv) -> None:
    with pytest.raises(ValueError, match=r"conversations in the columns \['prompt', 'messages'\]"):
        make([{"prompt": [ASK], "messages": [ASK]}])


def test_a_row_that_the_chat_template_refuses(
    make: MakeEnv, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ messages[-1]['content'] }}"
    )
    rows = [{"prompt": [ASK]}, {"prompt": [BRIEF, ASK]}]
    env = make(rows, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"train_dataset row 1: .*'system', 'user'.*no system"):
        env.prompt_lengths()
    with pytest.raises(ValueError, match=r"train_dataset row 0: .*no system"):
        make(rows[::-1], tokenizer=tokenizer)


def test_rewards_as_trl_calls_them(make: MakeEnv, complete: Complete) -> None:
    seen: dict[str, Any] = {}

    @batched_reward
    def reward(prompts: list[Any], completions: list[str], **kwargs: Any) -> list[float]:
        seen.update(kwargs, prompts=prompts)
        return [
            float(text == truth) for text, truth in zip(completions, kwargs["truth"], strict=True)
        ]

    env = make([{"prompt": [ASK], "truth": "4"}], reward_fn=reward)
    _, rewards = env.step(complete(env.reset(), [["4", "5"]]))
    assert rewards.tolist() == [[1.0, 0.0]]
    assert seen["prompts"] == [[ASK], [ASK]]


# --- splits -------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_what_is_shown(make: MakeEnv) -> None:
    def digest(hint: str = "h", **arguments: Any) -> str:
        return make(
            [{"question": "q", "hint": hint}], "{question}{hint}", **arguments
        ).fingerprint()

    assert digest() == digest()
    thinking = digest(chat_template_kwargs={"enable_thinking": True})
    silent = digest(chat_template_kwargs={"enable_thinking": False})
    assert len({digest(), digest("g"), thinking, silent}) == 4
    conversations = {make([{"prompt": [m, ASK]}]).fingerprint() for m in (BRIEF, ASK)}
    assert len(conversations) == 2


def test_chat_template_kwargs_reach_both_splits(
    make: MakeEnv, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ mood }}"
    env = make(
        [{"question": "q"}], "{question}", tokenizer=tokenizer, chat_template_kwargs={"mood": "!"}
    )
    assert env.reset()[0]["text"] == "q!"
    with env.eval_mode():
        assert env.reset()[0]["text"] == "q!"


def test_without_test_rows(make: MakeEnv, make_env: MakeEnv) -> None:
    env = make([{"question": "q"}], "{question}", test_dataset=None)
    assert env.prompt_lengths() == [len(env.reset()[0]["input_ids"][0])]
    assert env.fingerprint() != make([{"question": "q"}], "{question}").fingerprint()
    with pytest.raises(ValueError, match="test_dataset is None, so there is nothing to evaluate"):
        env.evaluate(lambda prompts: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="test_dataset is None"), env.eval_mode():
        pass


@pytest.mark.parametrize(("shared", "warned"), [(0, False), (1, False), (2, True), (20, True)])
def test_test_prompts_that_are_trained_on(
    make: MakeEnv, caplog: pytest.LogCaptureFixture, shared: int, warned: bool
) -> None:
    def rows(first: int) -> list[Row]:
        # Unlike those of any other case, as it is said once only.
        return [{"question": f"{shared} shared: {i}"} for i in range(first, first + 20)]

    with caplog.at_level(logging.WARNING):
        make(rows(0), "{question}", test_dataset=rows(20 - shared))
    assert ("are in train_dataset too" in caplog.text) == warned
