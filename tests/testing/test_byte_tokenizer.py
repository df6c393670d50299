from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from agilerl.testing import byte_tokenizer
from agilerl.testing.tokenizer import (
    DOCUMENT_END_TOKEN_ID,
    PAD_TOKEN_ID,
    SPECIAL_TOKENS,
    TURN_END_TOKEN_ID,
    TURN_START_TOKEN_ID,
    VOCAB_SIZE,
)

TOKENIZER = byte_tokenizer()


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_comes_back_unchanged(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


def test_ids_are_the_bytes() -> None:
    text = "".join(map(chr, range(0x250))) + "\u20ac e\u0301 \u4f60\u597d \U0001f389"
    assert TOKENIZER(text).input_ids == list(text.encode())


def test_special_tokens_have_the_ids_after_the_bytes() -> None:
    ids = [PAD_TOKEN_ID, TURN_START_TOKEN_ID, TURN_END_TOKEN_ID, DOCUMENT_END_TOKEN_ID]
    assert TOKENIZER.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == ids == [256, 257, 258, 259]
    assert len(TOKENIZER) == VOCAB_SIZE
    assert set(TOKENIZER.all_special_ids) == set(ids)
    assert TOKENIZER.pad_token_id == PAD_TOKEN_ID
    assert TOKENIZER.eos_token_id == TURN_END_TOKEN_ID


def test_the_chat_template_adds_no_system_message() -> None:
    messages = [{"role": "user", "content": "Hi {there}"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi {there}<|im_end|>\n<|im_start|>assistant\n"
    ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == TOKENIZER(text).input_ids
    assert ids[0] == TURN_START_TOKEN_ID


def test_the_chat_template_keeps_every_turn() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    assert TOKENIZER.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\ns<|im_end|>\n"
        "<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n"
    )


def test_padding_is_on_the_left() -> None:
    batch = TOKENIZER(["ab", "c"], padding=True)
    assert batch.input_ids == [[97, 98], [PAD_TOKEN_ID, 99]]
    assert batch.attention_mask == [[1, 1], [0, 1]]


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "<|im_start|>user\ne\u0301<|im_end|>"
    assert loaded(text).input_ids == TOKENIZER(text).input_ids
    assert loaded.decode(loaded(text).input_ids) == text
    assert loaded.chat_template == TOKENIZER.chat_template
    assert loaded.padding_side == "left"


def test_a_length_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="model_max_length is 0; it must be at least 1"):
        byte_tokenizer(model_max_length=0)
