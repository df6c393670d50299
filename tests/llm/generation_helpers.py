"""A policy with a random adapter, prompts and sampling settings for the tests of generation."""

from __future__ import annotations

import torch
from peft import LoraConfig

from agilerl.llm.config import SamplingConfig
from agilerl.llm.policy import Policy
from agilerl.llm.shared_base import SharedBase

VOCAB = 97
EOS = 1


def policy_of(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> Policy:
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = Policy(
        SharedBase.of(model.to(dtype)), dict.fromkeys(("actor", "reference"), lora), seed=0
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.parameters("actor").values():
        parameter.data = (
            torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.1
        )
    return policy


def prompts_of(lengths: list[int], vocab: int = VOCAB) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(2, vocab, (n,), generator=generator) for n in lengths]


def sampling_of(**settings: object) -> SamplingConfig:
    return SamplingConfig(
        **{
            "max_new_tokens": 12,
            "max_model_len": 64,
            "eos_token_ids": (EOS,),
            "pad_token_id": 0,
            **settings,
        }
    )
