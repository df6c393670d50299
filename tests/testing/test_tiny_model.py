from __future__ import annotations

from typing import Any

import pytest
import torch

from agilerl.testing import byte_tokenizer, tiny_model


def test_forward_and_generate() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model()
    batch = tokenizer(["hello", "hi"], padding=True, return_tensors="pt")
    assert model(**batch).logits.shape == (2, 5, len(tokenizer))
    generated = model.generate(**batch, max_new_tokens=4, do_sample=False)
    assert generated.shape[0] == 2
    assert 5 < generated.shape[1] <= 9


def test_the_model_ends_where_the_tokenizer_ends_a_turn() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model()
    assert model.config.eos_token_id == model.generation_config.eos_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == model.generation_config.pad_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_seed_decides_the_weights_and_the_global_random_state_stays() -> None:
    state = torch.get_rng_state()
    first, again, other = tiny_model(seed=1), tiny_model(seed=1), tiny_model(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_share_storage(tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    embedding = model.get_input_embeddings().weight
    assert (model.lm_head.weight.data_ptr() == embedding.data_ptr()) is tied


def test_sizes_and_dtype_are_as_asked() -> None:
    model = tiny_model(1000, 32, 3, heads=2, key_value_heads=1, dtype=torch.bfloat16)
    assert model.lm_head.weight.shape == (1000, 32)
    assert len(model.model.layers) == 3
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 259}, "vocab_size is 259; it must be at least 260"),
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"heads": 3, "hidden_size": 60}, "heads is 3; it must be a multiple of key_value_heads=2"),
        ({"hidden_size": 60}, "hidden_size is 60; it must be a multiple of 2 \\* heads = 8"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
        ({"intermediate_size": 0}, "intermediate_size is 0; it must be at least 1"),
    ],
)
def test_sizes_that_make_no_model_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model(**sizes)
