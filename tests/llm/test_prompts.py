from __future__ import annotations

import datetime
import decimal
import logging
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from agilerl.llm.prompts import (
    PromptEncoder,
    as_text,
    check_template,
    fill_template,
    render_conversation,
)
from agilerl.testing import byte_tokenizer

TEMPLATE = [
    {"role": "system", "content": 'Answer in \\boxed{} and JSON {"a": {0}}.'},
    {"role": "user", "content": "Q: {question}\nA:"},
]


def asked(*questions: str) -> list[list[dict[str, Any]]]:
    return [fill_template(TEMPLATE, {"question": question}) for question in questions]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def plain_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = None
    return tokenizer


def test_only_the_placeholder_is_replaced() -> None:
    filled = fill_template(TEMPLATE, {"question": "{x: 1} \\frac{1}{2} {answer} {}"})
    assert filled[0]["content"] == TEMPLATE[0]["content"]
    assert filled[1]["content"] == "Q: {x: 1} \\frac{1}{2} {answer} {}\nA:"


def test_a_question_that_holds_the_placeholder_is_not_filled_again() -> None:
    filled = fill_template(TEMPLATE, {"question": "what is {question}?"})
    assert filled[1]["content"] == "Q: what is {question}?\nA:"


def test_filling_leaves_the_template_as_it_was() -> None:
    before = [dict(message) for message in TEMPLATE]
    fill_template(TEMPLATE, {"question": "2+2?"})
    assert before == TEMPLATE


def test_chat_template_opens_the_assistants_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    text = render_conversation([{"role": "user", "content": "{{ 7*7 }} {% x %}"}], tokenizer)
    assert text == "<|im_start|>user\n{{ 7*7 }} {% x %}<|im_end|>\n<|im_start|>assistant\n"


def test_a_started_answer_is_left_open(tokenizer: PreTrainedTokenizerFast) -> None:
    conversation = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "Let me think. <think>"},
    ]
    assert render_conversation(conversation, tokenizer) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nLet me think. <think>"
    )


def test_without_chat_template_contents_are_concatenated_with_one_log_line(
    plain_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        encoder = PromptEncoder(plain_tokenizer)
        prompts = [*encoder.encode(asked("2+2?", "3+3?")), *encoder.encode(asked("4+4?"))]
    assert prompts[0]["text"] == 'Answer in \\boxed{} and JSON {"a": {0}}.Q: 2+2?\nA:'
    assert len(caplog.records) == 1
    assert "no chat template" in caplog.text


def test_encoded_prompts_hold_ids_mask_and_text(tokenizer: PreTrainedTokenizerFast) -> None:
    (prompt,) = PromptEncoder(tokenizer).encode(asked("2+2?"))
    assert prompt["input_ids"].dtype == prompt["attention_mask"].dtype == torch.long
    assert prompt["input_ids"].shape == prompt["attention_mask"].shape
    assert prompt["attention_mask"].all()
    assert tokenizer.decode(prompt["input_ids"][0]) == prompt["text"]
    expected = tokenizer.apply_chat_template(
        fill_template(TEMPLATE, {"question": "2+2?"}), add_generation_prompt=True, return_dict=False
    )
    assert prompt["input_ids"].tolist() == [expected]


def test_the_bos_is_there_once(tokenizer: PreTrainedTokenizerFast) -> None:
    """A chat template that writes the BOS and a tokenizer that adds it must not add up to two."""
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    conversations = [[{"role": "user", "content": "hi"}]]
    tokenizer.chat_template = "<|endoftext|>{{ messages[0]['content'] }}"
    chat = PromptEncoder(tokenizer).encode(conversations)[0]["input_ids"][0].tolist()
    tokenizer.chat_template = None
    plain = PromptEncoder(tokenizer).encode(conversations)[0]["input_ids"][0].tolist()
    assert chat == plain == [bos, *b"hi"]


def test_no_questions_give_no_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    assert PromptEncoder(tokenizer).encode([]) == []


@pytest.mark.parametrize(
    ("template", "error", "match"),
    [
        ("Q: {question}", TypeError, "conversation_template is of type str; it must be a list"),
        (None, TypeError, "of type NoneType"),
        ({"role": "user", "content": "{question}"}, TypeError, "of type dict"),
        (["{question}"], TypeError, r"conversation_template\[0\] is .*must be a dict"),
        ([{"role": "user"}], TypeError, "'role' and 'content'"),
        ([{"role": "user", "content": [{"text": "{question}"}]}], TypeError, "are strings"),
    ],
)
def test_bad_templates(template: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        check_template(template)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokenizer", [None, "Qwen/Qwen2.5-0.5B", len])
def test_bad_tokenizers(tokenizer: object) -> None:
    with pytest.raises(TypeError, match=r"tokenizer is of type .* AutoTokenizer"):
        PromptEncoder(tokenizer)  # type: ignore[arg-type]


def test_a_chat_template_that_refuses_a_role_says_so_at_once(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    with pytest.raises(ValueError, match=r"refuses .*'system', 'user'.*no system"):
        PromptEncoder(tokenizer).encode(asked("2+2?"))


def test_a_prompt_without_tokens_is_refused(plain_tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = PromptEncoder(plain_tokenizer)
    with pytest.raises(ValueError, match="without any token"):
        encoder.encode([[{"role": "user", "content": ""}]])


# --- values as text -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("{x}", "{x}"),
        (24, "24"),
        (0.5, "0.5"),
        (True, "true"),
        ([3, 5, 7], "[3, 5, 7]"),
        ((1, "é"), '[1, "é"]'),
        ({"x": [1, None]}, '{"x": [1, null]}'),
        (np.arange(3), "[0, 1, 2]"),
        (np.int64(4), "4"),
        (torch.tensor([[1, 2]]), "[[1, 2]]"),
        (datetime.date(2024, 5, 1), "2024-05-01"),
        ({"when": datetime.date(2024, 5, 1)}, '{"when": "2024-05-01"}'),
        (decimal.Decimal("1.10"), "1.10"),
    ],
)
def test_a_value_as_text(value: Any, text: str) -> None:
    template = [{"role": "user", "content": "<{value}>{"}]
    assert fill_template(template, {"value": value})[0]["content"] == f"<{text}>{{"


@pytest.mark.parametrize("value", [object(), [object()], b"bytes"])
def test_what_is_no_text(value: Any) -> None:
    with pytest.raises(TypeError, match=r"of type (object|bytes) cannot be shown as text"):
        as_text(value)


# --- arguments of the chat template -------------------------------------------------------------


def test_the_chat_template_gets_its_arguments(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ '/no_think' if not thinks }}"
    conversation = [{"role": "user", "content": "hi"}]
    assert PromptEncoder(tokenizer, {"thinks": False}).render(conversation) == "hi/no_think"
    assert PromptEncoder(tokenizer, {"thinks": True}).render(conversation) == "hi"


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "messages", "chat_template"])
def test_arguments_that_the_renderer_sets(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    with pytest.raises(ValueError, match=f"chat_template_kwargs has '{name}'"):
        PromptEncoder(tokenizer, {name: True})


def test_arguments_without_a_chat_template(
    plain_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    PromptEncoder(plain_tokenizer, {"unheard_of": False})
    assert "chat_template_kwargs ['unheard_of'] have no effect" in caplog.text
