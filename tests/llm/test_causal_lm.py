"""How logits are made is read off the config, and compared with the model's own."""

from __future__ import annotations

import pytest
import torch
from model_families import FAMILIES, make_family
from transformers import Llama4ForCausalLM, Llama4TextConfig

from agilerl.llm.causal_lm import check_head, equal_up_to_rounding, find_head
from agilerl.llm.shared_base import SharedBase
from agilerl.testing import tiny_model


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="no output embedding"):
        find_head(tiny_model().base_model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_read_as_the_model_means_it(family: str) -> None:
    check_head(make_family(family))


def test_a_head_with_an_unknown_scale_is_refused() -> None:
    model = make_family("granite")
    forward = model.forward

    def scaled(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match=r"GraniteForCausalLM.*not supported"):
        SharedBase.of(model)


@pytest.mark.parametrize(
    ("dtype", "small", "large"),
    [(torch.float32, 1e-4, 1e-2), (torch.bfloat16, 2e-2, 2e-1)],
)
def test_differences_are_judged_by_the_dtype(
    dtype: torch.dtype, small: float, large: float
) -> None:
    expected = torch.tensor([0.0, 1.0, -50.0], dtype=dtype)
    change = torch.tensor([50.0, 0.0, 0.0], dtype=dtype)
    assert equal_up_to_rounding(expected + small * change, expected)
    assert not equal_up_to_rounding(expected + large * change, expected)


def test_nothing_equals_nan_or_another_shape() -> None:
    ones = torch.ones(3)
    assert not equal_up_to_rounding(ones * torch.nan, ones)
    assert not equal_up_to_rounding(ones, ones * torch.nan)
    assert not equal_up_to_rounding(ones, torch.ones(1))
    assert equal_up_to_rounding(torch.zeros(3), torch.zeros(3))


def test_a_model_whose_decoder_is_not_found_is_refused_by_name() -> None:
    config = Llama4TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Llama4ForCausalLM(config)
    with pytest.raises(ValueError, match=r"Llama4ForCausalLM.*'language_model'"):
        SharedBase.of(model)


def test_a_model_that_cannot_be_run_is_refused_by_name() -> None:
    model = tiny_model()
    model.model.layers[0].forward = lambda hidden: hidden
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM.*cannot be run.*TypeError"):
        SharedBase.of(model)
