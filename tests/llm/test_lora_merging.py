"""Merging LoRA configs: what adapters compute stays the same, whatever rank, kind and targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import EvaConfig, LoraConfig

from agilerl.llm.adapters import adapter_state_dict
from agilerl.llm.checkpoint.checkpoint_files import SavedAdapter
from agilerl.llm.checkpoint.lora_merging import (
    differing_fields,
    fit_adapter,
    merge_configs,
    write_adapter,
)
from agilerl.llm.policy import Policy
from agilerl.llm.shared_base import SharedBase
from agilerl.testing import tiny_model

IDS = torch.randint(97, 123, (2, 9), generator=torch.Generator().manual_seed(0))
MODULES = ["q_proj", "v_proj", "down_proj"]
CONFIGS = st.fixed_dictionaries(
    {
        "r": st.integers(1, 6),
        "lora_alpha": st.integers(1, 12),
        "use_rslora": st.booleans(),
        "use_dora": st.booleans(),
        "init_lora_weights": st.booleans(),
        "target_modules": st.lists(st.sampled_from(MODULES), min_size=1, unique=True),
        "modules_to_save": st.sampled_from([None, ["lm_head"]]),
    }
)


def random_policy(seed: int, **config: Any) -> Policy:
    """Adapters with random weights on a base in float64; the critic has a config of its own."""
    model = tiny_model(hidden_size=16, layers=1, heads=2, key_value_heads=1).double()
    critic = LoraConfig(r=2, target_modules=["o_proj"], use_dora=True)
    both = dict.fromkeys(("actor", "reference"), LoraConfig(task_type="CAUSAL_LM", **config))
    policy = Policy(SharedBase.of(model), both | {"critic": critic}, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for role in policy.roles:
            for name, parameter in policy.parameters(role).items():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4
                if "magnitude" in name:  # a norm: far from 0
                    parameter.mul_(1 + noise)
                else:
                    parameter.copy_(noise)
    return policy


@torch.no_grad()
def logits(policy: Policy, role: str) -> torch.Tensor:
    with policy.as_role(role):
        return policy.model(input_ids=IDS).logits


def load_merged(policy: Policy, source: Policy) -> LoraConfig:
    """Load actor and reference of one policy into another; the config that they now have."""
    config = merge_configs(policy.lora_config, source.lora_config)
    roles = ("actor", "reference")
    with policy.replace_adapters(dict.fromkeys(roles, config), seed=0):
        fitted = {}
        for role in roles:
            tensors = adapter_state_dict(source.model, source.slot(role))
            fitted[role] = fit_adapter(policy, role, SavedAdapter(source.lora_config, tensors))
    for role, tensors in fitted.items():
        write_adapter(policy, role, tensors)
    return config


@settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(live=CONFIGS, saved=CONFIGS)
def test_loaded_adapters_compute_what_they_did_and_others_are_left_alone(
    live: dict[str, Any], saved: dict[str, Any]
) -> None:
    policy, source = random_policy(1, **live), random_policy(2, **saved)
    wanted = {role: logits(source, role) for role in ("actor", "reference")}
    wanted["critic"] = logits(policy, "critic")
    load_merged(policy, source)
    for role, expected in wanted.items():
        torch.testing.assert_close(logits(policy, role), expected, atol=1e-6, rtol=0)


def test_a_merged_config_has_the_larger_rank_all_targets_and_dora() -> None:
    live = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    saved = LoraConfig(r=2, lora_alpha=3, target_modules=["v_proj"], use_dora=True)
    config = merge_configs(live, saved)
    assert (config.r, config.lora_alpha, config.use_dora) == (4, 8, True)
    assert config.target_modules == {"q_proj", "v_proj"}


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_are_the_same_may_be_merged(pattern: str) -> None:
    own: dict[str, Any] = {pattern: {"q_proj": 3}, "target_modules": MODULES}
    policy, source = random_policy(1, r=2, **own), random_policy(2, r=4, **own)
    wanted = logits(source, "actor")
    assert load_merged(policy, source).r == 4
    torch.testing.assert_close(logits(policy, "actor"), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank_pattern", {"q_proj": 3}),
        ("alpha_pattern", {"q_proj": 3}),
        ("alora_invocation_tokens", [1]),
    ],
)
def test_what_padding_cannot_make_up_for_is_refused_by_name(field: str, value: Any) -> None:
    live = LoraConfig(target_modules=MODULES)
    saved = LoraConfig(target_modules=MODULES, **{field: value})
    assert differing_fields(live, saved).keys() == {field}
    with pytest.raises(ValueError, match=f"differ in {field} cannot be merged"):
        merge_configs(live, saved)


def test_how_an_adapter_was_initialised_makes_no_difference() -> None:
    live = LoraConfig(init_lora_weights="eva", eva_config=EvaConfig(), target_modules=MODULES)
    assert differing_fields(live, LoraConfig(target_modules=MODULES)) == {}


def test_factors_of_another_rank_than_their_config_says_are_refused() -> None:
    policy, source = (random_policy(1, r=r, target_modules=MODULES) for r in (6, 4))
    tensors = adapter_state_dict(source.model, source.slot("actor"))
    tensors = {name: t[:2] if "lora_A" in name else t[:, :2] for name, t in tensors.items()}
    with pytest.raises(ValueError, match="actor adapter has tensors in another shape"):
        fit_adapter(policy, "actor", SavedAdapter(source.lora_config, tensors))


def test_ranks_of_stacked_experts_are_not_merged() -> None:
    stacked: dict[str, Any] = {"target_modules": [], "target_parameters": ["experts.down_proj"]}
    with pytest.raises(ValueError, match=r"differ in r \(with target_parameters\)"):
        merge_configs(LoraConfig(r=2, **stacked), LoraConfig(r=4, **stacked))
