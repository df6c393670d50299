"""What tells one base from another."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from agilerl.llm.shared_base import SAMPLED, fingerprint
from agilerl.testing import tiny_model


def test_a_fingerprint_is_that_of_the_base_alone() -> None:
    bare = fingerprint(tiny_model())
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    wrapped = get_peft_model(tiny_model(), config)
    wrapped.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
    assert fingerprint(wrapped) == bare


def test_the_last_value_of_a_large_tensor_is_there() -> None:
    model = torch.nn.Module()
    model.register_buffer("rows", torch.zeros(1).expand(2**24 + 4))  # more than floats can count
    model.register_buffer("nothing", torch.zeros(0))
    fingerprint(model)


@pytest.mark.parametrize("size", [1, 2, SAMPLED - 1, SAMPLED, SAMPLED + 1, 1000])
def test_first_and_last_value_count(size: int) -> None:
    found = set()
    for changed in (None, 0, -1):
        model = torch.nn.Module()
        model.register_buffer("row", torch.zeros(size))
        if changed is not None:
            model.row[changed] = 1 + changed / 2
        found.add(fingerprint(model))
    assert len(found) == 3


def test_fingerprints_differ_with_values_kinds_and_sizes() -> None:
    models = [
        tiny_model(),
        tiny_model(seed=1),
        tiny_model().to(torch.bfloat16),
        tiny_model(hidden_size=32),
    ]
    with torch.no_grad():
        changed = tiny_model()
        changed.model.norm.weight[0] += 1e-3
        models.append(changed)
    assert len({fingerprint(model) for model in models}) == len(models)
