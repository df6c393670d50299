from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.testing.tokenizer import SPECIAL_TOKENS, byte_tokenizer, trained_tokenizer

TEXTS = ["the higher number is 12", "the lower number is 3, the higher is 4"] * 3
SENTENCE = "Guess the number.\n"
TOKENIZER = trained_tokenizer(TEXTS, 300, sentences=[SENTENCE])


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_comes_back_unchanged(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


def test_frequent_words_and_sentences_are_one_token() -> None:
    assert len(TOKENIZER(SENTENCE + " higher").input_ids) == 2
    assert len(TOKENIZER(" the number").input_ids) == 2
    assert len(TOKENIZER("1212").input_ids) == 4


def test_bytes_and_special_tokens_keep_their_ids() -> None:
    ours = byte_tokenizer()
    special = list(SPECIAL_TOKENS)
    assert TOKENIZER.convert_tokens_to_ids(special) == ours.convert_tokens_to_ids(special)
    assert TOKENIZER("#!z").input_ids == list(b"#!z")
    assert len(TOKENIZER) <= 300
    assert max(TOKENIZER.get_vocab().values()) == len(TOKENIZER) - 1


def test_the_same_texts_give_the_same_tokenizer() -> None:
    again = trained_tokenizer(TEXTS, 300, sentences=[SENTENCE])
    assert again.get_vocab() == TOKENIZER.get_vocab()


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 260; it must be at least 261"):
        trained_tokenizer(TEXTS, 260, sentences=[SENTENCE])
    with pytest.raises(ValueError, match="model_max_length is 0; it must be at least 1"):
        trained_tokenizer(TEXTS, model_max_length=0)
