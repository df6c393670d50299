"""The sampler's log-probs are the trainer's, whatever filters the draw went through."""

from __future__ import annotations

import pytest
import torch
from generation_helpers import policy_of, prompts_of, sampling_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_families import FALCONS, FAMILIES, make_family

from agilerl.llm.batch import make_batch
from agilerl.llm.config import ForwardConfig
from agilerl.llm.generation import Completions, sampled_tokens
from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm.policy import Policy
from agilerl.testing import tiny_model

ENDS = tuple(range(2, 24))


def sampled(
    policy: Policy, prompts: list[torch.Tensor], samples: int, **changes: object
) -> Completions:
    sampling = sampling_of(return_logps=True, **changes)
    rng = torch.Generator().manual_seed(3)
    return HFGenerator(policy).generate(prompts, samples, sampling, rng)


def trainers(
    policy: Policy, rows: list[torch.Tensor], prompts: list[torch.Tensor], temperature: float
) -> torch.Tensor:
    """``(N,)`` log-probs of all completion tokens, row by row, as ``learn`` computes them."""
    ids = [torch.cat([prompt, row])[None] for prompt, row in zip(prompts, rows, strict=True)]
    masks = []
    for row, prompt in zip(ids, prompts, strict=True):
        masks.append(torch.arange(row.shape[1] - 1)[None] >= len(prompt) - 1)
    batch = make_batch(ids, masks)
    micro_batches = torch.arange(len(batch)).split(4)
    config = ForwardConfig(temperature=temperature)
    return policy.frozen_logprobs(batch, "actor", config, micro_batches)[batch.action_mask]


@pytest.mark.parametrize("family", FAMILIES | FALCONS)
def test_log_probs_are_the_trainers(family: str) -> None:
    policy = policy_of(make_family(family))
    prompts = prompts_of([9, 3, 5], vocab=policy.base.model.config.vocab_size)
    made = sampled(policy, prompts, 4, max_new_tokens=6, eos_token_ids=ENDS, temperature=0.7)
    assert made.logps is not None
    assert len({len(row) for row in made.token_ids}) > 1
    theirs = trainers(policy, made.token_ids, [p for p in prompts for _ in range(4)], 0.7)
    assert (torch.cat(made.logps) - theirs).abs().max() < 1e-4


@pytest.fixture(scope="module")
def tiny_policy() -> Policy:
    return policy_of(tiny_model())


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    temperature=st.floats(0.3, 2.0),
    top_k=st.sampled_from([0, 1, 5, 50]),
    top_p=st.sampled_from([0.3, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    min_new_tokens=st.integers(0, 4),
    greedy=st.booleans(),
    chunk_size=st.sampled_from([None, 2]),
)
def test_filters_and_penalties_leave_them_alone(tiny_policy: Policy, **changes: object) -> None:
    prompts = prompts_of([4, 11])
    made = sampled(tiny_policy, prompts, 2, max_new_tokens=5, eos_token_ids=ENDS, **changes)
    assert made.logps is not None
    for row, logps in zip(made.token_ids, made.logps, strict=True):
        assert logps.shape == row.shape
        assert logps.dtype == torch.float32
    owners = [p for p in prompts for _ in range(2)]
    theirs = trainers(tiny_policy, made.token_ids, owners, changes["temperature"])
    assert (torch.cat(made.logps) - theirs).abs().max() < 1e-4


def test_not_asked_for_they_are_not_computed(
    tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("computed without being asked for")

    monkeypatch.setattr(sampled_tokens, "scaled_logps", refuse)
    rng = torch.Generator().manual_seed(3)
    made = HFGenerator(tiny_policy).generate(prompts_of([4]), 2, sampling_of(), rng)
    assert made.logps is None
