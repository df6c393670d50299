"""Of the ways of decoding, the fastest that is exact on a model is found out before it is used."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from model_families import (
    EAGER_FAMILIES,
    FALCONS,
    FAMILIES,
    LONG_WINDOW,
    UNSHARED_FAMILIES,
    WINDOW,
    make_family,
    without_window_when_cached,
)
from rollout_helpers import random_policy
from torch import nn
from transformers import FalconForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agilerl.algorithms import GRPO
from agilerl.llm.causal_lm import PROBED_WINDOW
from agilerl.llm.generation import probe
from agilerl.llm.generation.probe import DecodingSupport, decoding_support
from agilerl.testing import tiny_model

EVERYTHING = DecodingSupport(
    left_padding=True, single_query=True, shared_prefix=True, shared_turns=True
)

WINDOWED = ("mistral", "gemma2", "gemma3")


def support_of(model: nn.Module) -> DecodingSupport:
    return decoding_support(random_policy(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_are_decoded_the_fastest_way(family: str, dtype: torch.dtype) -> None:
    # Attention sinks and soft caps are added by a model's own attention, which cannot be replaced.
    shared = family not in EAGER_FAMILIES
    turns = shared and family not in WINDOWED
    support = replace(EVERYTHING, shared_prefix=shared, shared_turns=turns)
    assert support_of(make_family(family, dtype)) == support


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FALCONS)
def test_attention_that_is_asked_for_by_name_is_not_replaced(
    family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    policy = random_policy(make_family(family, dtype))
    with caplog.at_level(logging.INFO, probe.__name__):
        assert decoding_support(policy) == DecodingSupport(left_padding=True, single_query=False)
        decoding_support(policy)  # known by now
    assert [record.getMessage() for record in caplog.records] == [
        "single-query attention is off for FalconForCausalLM: it cannot replace the model's own"
    ]


def test_attention_that_comes_out_different_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that says its attention can be replaced, and then asks for it by name."""
    monkeypatch.setattr(FalconForCausalLM, "_supports_attention_backend", True)
    model = make_family("falcon_multi_query")
    assert support_of(model) == DecodingSupport(left_padding=True, single_query=False)


def test_padding_is_avoided_where_only_it_makes_a_difference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_family("gpt2")
    # As a model without position ids: it takes columns for positions, which padding shifts.
    model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"position_ids": None}), with_kwargs=True
    )
    with caplog.at_level(logging.INFO, probe.__name__):
        assert support_of(model) == DecodingSupport(left_padding=False, single_query=True)
    (record,) = caplog.records
    assert "left padding is off for GPT2LMHeadModel" in record.getMessage()


@pytest.mark.parametrize("family", UNSHARED_FAMILIES)
def test_a_model_that_keeps_another_state_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM.*recurrent"):
        support_of(make_family(family))


def test_a_refused_model_is_left_plain() -> None:
    model = make_family("qwen3_next")
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="recurrent") as refusal:
        GRPO(pad_token_id=0, pad_token="", actor_network=model)
    assert [type(module) for module in model.modules()] == before
    del refusal


def test_a_model_in_training_mode_is_probed_without_its_dropout() -> None:
    model = make_family("gpt2").train()
    assert model.config.attn_pdrop > 0
    agent = GRPO(pad_token_id=0, pad_token="", actor_network=model, max_model_len=15)
    assert not agent.policy.base.model.training


@pytest.mark.parametrize("family", WINDOWED)
def test_rows_are_longer_than_any_window(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """A long window is short while it is probed, so that one that is forgotten is noticed."""
    model = make_family(family)
    model.config.sliding_window = LONG_WINDOW
    with caplog.at_level(logging.INFO, probe.__name__):
        assert support_of(model) == replace(EVERYTHING, shared_turns=False)
    assert "after their first turn, episodes get copies" in caplog.text
    assert model.config.sliding_window == LONG_WINDOW
    with pytest.raises(ValueError, match="cannot be continued"):
        support_of(without_window_when_cached(make_family(family)))


def test_routing_that_rounding_changes_is_no_reason_for_the_slow_way() -> None:
    """In bfloat16 a few of the tokens below go to other experts, depending on the kernel."""
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        initializer_range=0.1,
    )
    model = Qwen3MoeForCausalLM(config).bfloat16().eval()
    assert support_of(model) == EVERYTHING


def test_a_base_is_probed_once() -> None:
    policy, forwards = random_policy(tiny_model()), []
    policy.base.decoder.register_forward_pre_hook(lambda *_: forwards.append(1))
    decoding_support(policy)
    # Whole rows once; prompts, two single tokens and a block; prompts and tokens that share them;
    # prompts, a block and two single tokens.
    assert len(forwards) == 5 + 5 + 4
    decoding_support(policy)
    assert len(forwards) == 5 + 5 + 4
    assert WINDOW > PROBED_WINDOW
