from __future__ import annotations

import logging

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from agilerl.llm.prompts import PromptEncoder, check_template, fill_template, render_conversation
from agilerl.testing import byte_tokenizer

TEMPLATE = [
    {"role": "system", "content": 'Answer in \\boxed{} and JSON {"a": {0}}.'},
    {"role": "user", "content": "Q: {question}\nA:"},
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def plain_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = None
    return tokenizer


def test_only_the_placeholder_is_replaced() -> None:
    filled = fill_template(TEMPLATE, "{x: 1} \\frac{1}{2} {answer} {}")
    assert filled[0]["content"] == TEMPLATE[0]["content"]
    assert filled[1]["content"] == "Q: {x: 1} \\frac{1}{2} {answer} {}\nA:"


def test_a_question_that_holds_the_placeholder_is_not_filled_again() -> None:
    filled = fill_template(TEMPLATE, "what is {question}?")
    assert filled[1]["content"] == "Q: what is {question}?\nA:"


def test_filling_leaves_the_template_as_it_was() -> None:
    before = [dict(message) for message in TEMPLATE]
    fill_template(TEMPLATE, "2+2?")
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
        encoder = PromptEncoder(plain_tokenizer, TEMPLATE)
        prompts = [*encoder.encode(["2+2?", "3+3?"]), *encoder.encode(["4+4?"])]
    assert prompts[0]["text"] == 'Answer in \\boxed{} and JSON {"a": {0}}.Q: 2+2?\nA:'
    assert len(caplog.records) == 1
    assert "no chat template" in caplog.text


def test_encoded_prompts_hold_ids_mask_and_text(tokenizer: PreTrainedTokenizerFast) -> None:
    (prompt,) = PromptEncoder(tokenizer, TEMPLATE).encode(["2+2?"])
    assert prompt["input_ids"].dtype == prompt["attention_mask"].dtype == torch.long
    assert prompt["input_ids"].shape == prompt["attention_mask"].shape
    assert prompt["attention_mask"].all()
    assert tokenizer.decode(prompt["input_ids"][0]) == prompt["text"]
    expected = tokenizer.apply_chat_template(
        fill_template(TEMPLATE, "2+2?"), add_generation_prompt=True, return_dict=False
    )
    assert prompt["input_ids"].tolist() == [expected]


def test_the_bos_is_there_once(tokenizer: PreTrainedTokenizerFast) -> None:
    """A chat template that writes the BOS and a tokenizer that adds it must not add up to two."""
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    template = [{"role": "user", "content": "{question}"}]
    tokenizer.chat_template = "<|endoftext|>{{ messages[0]['content'] }}"
    chat = PromptEncoder(tokenizer, template).encode(["hi"])[0]["input_ids"][0].tolist()
    tokenizer.chat_template = None
    plain = PromptEncoder(tokenizer, template).encode(["hi"])[0]["input_ids"][0].tolist()
    assert chat == plain == [bos, *b"hi"]


def test_no_questions_give_no_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    assert PromptEncoder(tokenizer, TEMPLATE).encode([]) == []


@pytest.mark.parametrize(
    ("template", "error", "match"),
    [
        ("Q: {question}", TypeError, "conversation_template is of type str; it must be a list"),
        (None, TypeError, "of type NoneType"),
        ({"role": "user", "content": "{question}"}, TypeError, "of type dict"),
        (["{question}"], TypeError, r"conversation_template\[0\] is .*must be a dict"),
        ([{"role": "user"}], TypeError, "'role' and 'content'"),
        ([{"role": "user", "content": [{"text": "{question}"}]}], TypeError, "are strings"),
        ([], ValueError, "has no {question}"),
        ([{"role": "user", "content": "Q: { question }"}], ValueError, "has no {question}"),
        ([{"role": "{question}", "content": "x"}], ValueError, "in any content"),
    ],
)
def test_bad_templates(template: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        check_template(template)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokenizer", [None, "Qwen/Qwen2.5-0.5B", len])
def test_bad_tokenizers(tokenizer: object) -> None:
    with pytest.raises(TypeError, match=r"tokenizer is of type .* AutoTokenizer"):
        PromptEncoder(tokenizer, TEMPLATE)  # type: ignore[arg-type]


def test_a_chat_template_that_refuses_a_role_says_so_at_once(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    with pytest.raises(ValueError, match=r"refuses .*'system', 'user'.*no system"):
        PromptEncoder(tokenizer, TEMPLATE)


def test_a_prompt_without_tokens_is_refused(plain_tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = PromptEncoder(plain_tokenizer, [{"role": "user", "content": "{question}"}])
    with pytest.raises(ValueError, match="without any token"):
        encoder.encode([""])
