"""Models by name are loaded once; what agents change about a model is put back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_helpers import lora, random_batch, random_policy
from torch import nn
from transformers import PreTrainedModel
from update_helpers import FORWARD

from agilerl.llm.policy import Policy
from agilerl.llm.shared_base import SharedBase, load_base
from agilerl.testing import tiny_model


def test_the_same_path_is_loaded_once_while_in_use(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    first = load_base(str(tmp_path), {"dtype": torch.float32}, "cpu")
    assert load_base(str(tmp_path), {"dtype": torch.float32}, "cpu") is first
    assert load_base(str(tmp_path), {"dtype": torch.bfloat16}, "cpu") is not first


def user_model(*, checkpointing: bool = False) -> PreTrainedModel:
    """In training mode but for a part, with some parameters frozen."""
    model = tiny_model().train()
    model.model.layers[0].eval()
    model.model.embed_tokens.requires_grad_(False)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def everything_of(model: nn.Module) -> dict[str, Any]:
    """Class, attributes and hooks of every module, and what requires gradients."""
    found: dict[str, Any] = {n: p.requires_grad for n, p in model.named_parameters()}
    for name, module in model.named_modules():
        values = {
            attribute: list(value) if attribute.endswith("_hooks") else None
            for attribute, value in vars(module).items()
        }
        found[f"module {name}"] = (type(module), module.training, values)
    return found


def use(policy: Policy) -> None:
    forward = replace(FORWARD, recompute_layers=True)
    policy.logprobs(random_batch(), forward).logp.sum().backward()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("released", [True, False])
def test_the_last_policy_leaves_the_model_as_it_was_found(
    released: bool, checkpointing: bool
) -> None:
    model = user_model(checkpointing=checkpointing)
    before = everything_of(model)
    for _ in range(2):
        first, second = random_policy(model), random_policy(model, seed=1)
        assert not model.training
        use(first)
        if released:
            first.release()
        del first
        assert not model.training and not model.lm_head.weight.requires_grad
        use(second)
        if released:
            second.release()
        else:
            del second
        assert everything_of(model) == before


def test_a_model_that_is_refused_is_left_as_it_was_found() -> None:
    model = user_model()
    model.forward = lambda hidden: hidden
    before = everything_of(model)
    with pytest.raises(ValueError, match="cannot be run"):
        SharedBase.of(model)
    assert everything_of(model) == before


def test_an_adapter_that_is_refused_leaves_the_model_as_it_was_found() -> None:
    model = user_model()
    before = everything_of(model)
    roles = {"actor": lora(), "critic": lora(target_modules="nowhere")}
    with pytest.raises(ValueError, match="nowhere"):
        Policy(SharedBase.of(model), roles, seed=0)
    assert everything_of(model) == before
