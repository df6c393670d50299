"""Adapters as sets of tensors."""

from __future__ import annotations

import warnings

import pytest
import torch
from rollout_helpers import PLAIN, lora, random_batch, random_policy

from agilerl.llm.adapters import (
    copy_adapter,
    default_lora_config,
    scope_lora_config,
)
from agilerl.testing import tiny_model


def test_adapters_of_other_shapes_or_layers_are_not_copied() -> None:
    model = tiny_model()
    small, large = random_policy(model, lora(r=2)), random_policy(model, lora(r=4))
    with pytest.raises(ValueError, match="differ in shape at"):
        copy_adapter(small.parameters(), large.parameters())
    narrow = random_policy(model, lora(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="differ in parameters"):
        copy_adapter(small.parameters(), narrow.parameters())


def test_a_scope_confines_the_targets() -> None:
    model = tiny_model(layers=2)
    config = scope_lora_config(lora(target_modules=["q_proj", "up_proj"]), model, "self_attn")
    assert config.target_modules == {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    everything = scope_lora_config(default_lora_config(), model, "model")
    assert everything.target_modules is not None
    assert len(everything.target_modules) == 14
    assert not any("lm_head" in name for name in everything.target_modules)
    pattern = scope_lora_config(lora(target_modules=r".*\.1\..*_proj"), model, "mlp")
    assert pattern.target_modules == {
        f"model.layers.1.mlp.{n}_proj" for n in ("gate", "up", "down")
    }


def test_without_a_scope_the_config_is_copied_as_it_is() -> None:
    config = lora()
    scoped = scope_lora_config(config, tiny_model(), None)
    assert scoped is not config
    assert scoped.to_dict() == config.to_dict()


def test_a_scope_without_targets_and_a_trained_bias_are_refused() -> None:
    with pytest.raises(ValueError, match="lora_target_scope 'vision_tower'"):
        scope_lora_config(lora(), tiny_model(), "vision_tower")
    with pytest.raises(ValueError, match="bias"):
        scope_lora_config(lora(bias="all"), tiny_model(), None)


def test_modules_to_save_belong_to_their_slot() -> None:
    model = tiny_model(tie_word_embeddings=False)
    config = lora(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = random_policy(model, config)
    assert "lm_head.modules_to_save.weight" in policy.parameters()
    batch = random_batch()
    policy.set_role("actor")
    logp = policy.logprobs(batch, PLAIN).logp
    gradient = torch.autograd.grad(
        logp.sum(), policy.parameters()["lm_head.modules_to_save.weight"]
    )[0]
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("init", ["pissa", "olora", "corda", "eva", "loftq"])
def test_an_initialisation_that_rewrites_the_base_is_refused(init: str) -> None:
    config = lora()
    config.init_lora_weights = init
    with pytest.raises(ValueError, match=rf"init_lora_weights is '{init}'.*shared"):
        scope_lora_config(config, tiny_model(), None)


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal"])
def test_other_initialisations_leave_the_base_as_it_was(init: object) -> None:
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    policy = random_policy(model, scope_lora_config(lora(r=4, init_lora_weights=init), model, None))
    policy.release()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_scope_finds_the_layers_that_another_agent_has_wrapped() -> None:
    model = tiny_model()
    alone = scope_lora_config(lora(), model, "mlp").target_modules
    random_policy_kept = random_policy(model)
    assert scope_lora_config(lora(), model, "mlp").target_modules == alone
    assert random_policy_kept.roles
