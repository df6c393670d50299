"""What tells one base from another."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from agilerl.llm.base_weights import fingerprint
from agilerl.testing import tiny_model


def test_a_fingerprint_is_that_of_the_base_alone() -> None:
    bare = fingerprint(tiny_model())
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    wrapped = get_peft_model(tiny_model(), config)
    wrapped.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
    assert fingerprint(wrapped) == bare


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
