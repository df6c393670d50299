"""Rollouts with the adapter merged into copies of weights; nothing is left of them afterwards."""

from __future__ import annotations

import pytest
import torch
from model_families import make_family
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from rollout_helpers import PLAIN, lora, random_batch, random_policy
from transformers import PreTrainedModel

from agilerl.llm.generation.merged_weights import merged_adapter, rollout_weights
from agilerl.testing import tiny_model


def branches(model: torch.nn.Module) -> int:
    return sum(isinstance(module, LoraLayer) for module in model.modules())


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen2", lora()),
        ("qwen2", lora(target_modules=["q_proj", "lm_head"])),
        ("qwen2", lora(use_rslora=True, r=4)),
        ("gpt2", lora(fan_in_fan_out=True)),
    ],
    ids=["linear", "head", "rslora", "conv1d"],
)
def test_a_merged_adapter_equals_its_branches(family: str, config: LoraConfig) -> None:
    model = make_family(family)
    policy = random_policy(model, config)
    batch = random_batch()
    expected = policy.frozen_logprobs(batch, "actor", PLAIN)
    with rollout_weights(policy), torch.no_grad():
        assert branches(policy.model) == 0
        merged = policy.logprobs(batch, PLAIN).logp
    torch.testing.assert_close(merged, expected[batch.action_mask], rtol=1e-6, atol=1e-6)
    assert branches(policy.model) > 0


def test_fifty_rounds_leave_base_and_adapters_bit_identical() -> None:
    policy = random_policy(tiny_model())
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    for _ in range(50):
        with rollout_weights(policy):
            pass
    now = dict(policy.model.named_parameters())
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], before[name]) for name in before)


def test_the_branches_are_back_after_an_error() -> None:
    policy = random_policy(tiny_model())
    count = branches(policy.model)
    with pytest.raises(RuntimeError, match="inside"), rollout_weights(policy):
        raise RuntimeError("inside")
    assert branches(policy.model) == count


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (tiny_model(), lora(use_dora=True)),
        (tiny_model(), lora(lora_bias=True, target_modules=["q_proj", "v_proj"])),
        (tiny_model(dtype=torch.bfloat16), lora()),
    ],
    ids=["dora", "lora_bias", "bfloat16"],
)
def test_what_cannot_be_merged_exactly_keeps_its_branches(
    model: PreTrainedModel, config: LoraConfig
) -> None:
    policy = random_policy(model, config)
    batch = random_batch()
    expected = policy.frozen_logprobs(batch, "actor", PLAIN)
    with rollout_weights(policy), torch.no_grad():
        assert branches(policy.model) > 0
        again = policy.logprobs(batch, PLAIN).logp
    assert torch.equal(again, expected[batch.action_mask])


def test_only_the_given_slot_is_merged() -> None:
    model = tiny_model()
    first, second = random_policy(model), random_policy(model, seed=5)
    batch = random_batch()
    expected = second.frozen_logprobs(batch, "actor", PLAIN)
    with merged_adapter(second.model, second.slot("actor")), torch.no_grad():
        merged = second.logprobs(batch, PLAIN).logp
    torch.testing.assert_close(merged, expected[batch.action_mask], rtol=1e-5, atol=1e-5)
    assert first.base is second.base


def test_rollouts_are_of_the_role_in_use() -> None:
    policy = random_policy(tiny_model())
    policy.set_role("reference")
    with rollout_weights(policy):
        assert policy.model.active_adapters == [policy.slot("reference")]
    policy.set_role("actor")
    with rollout_weights(policy):
        assert policy.model.active_adapters == [policy.slot("actor")]


def test_an_agent_that_goes_during_anothers_rollout_leaves_nothing_behind() -> None:
    model = tiny_model()
    size = sum(p.numel() for p in model.parameters())
    staying, going = random_policy(model), random_policy(model, seed=7)
    with rollout_weights(staying):
        going.release()
    assert set(staying.model.peft_config) == set(staying.slots.values())
    staying.release()
    assert sum(p.numel() for p in model.parameters()) == size


def test_another_agent_cannot_act_inside_a_rollout() -> None:
    model = tiny_model()
    first, second = random_policy(model), random_policy(model, seed=7)
    with rollout_weights(first), pytest.raises(RuntimeError, match="one of its agents"):
        second.set_role("actor")
