"""Rows that share a prompt's keys and values are completed as rows with copies of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from generation_helpers import policy_of, prompts_of, sampling_of
from model_families import EAGER_FAMILIES, FAMILIES, make_family

from agilerl.llm.generation import Completions
from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm.generation.kv_cache.growing_cache import GrowingCache, GrowingLayer
from agilerl.llm.generation.kv_cache.shared_prefix import (
    PromptGroups,
    SharedPrefixCache,
    SharedPrefixLayer,
)
from agilerl.testing import tiny_model


@pytest.mark.parametrize("prompt_of_row", [[0, 0, 1, 1], [1, 0, 1, 1, 0, 3], [2], [0, 1, 2, 3]])
def test_grouping_is_undone(prompt_of_row: list[int]) -> None:
    groups = PromptGroups(torch.tensor(prompt_of_row), prompts=4)
    rows = torch.randn(len(prompt_of_row), 2, 3, 5)
    grouped = groups.grouped(rows)
    assert grouped.shape == (4, 2, 3 * groups.size, 5)
    assert torch.equal(groups.ungrouped(grouped, queries=3), rows)
    # A row is in the group of its prompt.
    numbers = torch.tensor(prompt_of_row).float().view(-1, 1, 1, 1)
    own = groups.ungrouped(torch.arange(4.0).view(-1, 1, 1, 1).expand(-1, 1, groups.size, 1), 1)
    assert torch.equal(own, numbers)


def _completed(family: str, *, share: bool, **settings: object) -> Completions:
    policy = policy_of(make_family(family, torch.float64), torch.float64)
    generator = HFGenerator(policy)
    assert generator._support.shared_prefix
    generator._support = replace(generator._support, shared_prefix=share)
    prompts = prompts_of([9, 3, 3, 1, 7], vocab=policy.base.model.config.vocab_size)
    prompts[2] = prompts[1]
    sampling = sampling_of(
        **{"max_new_tokens": 6, "eos_token_ids": tuple(range(8)), "return_logps": True} | settings
    )
    return generator.generate(prompts, 5, sampling, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in EAGER_FAMILIES])
def test_completions_are_those_with_copies(family: str) -> None:
    """Rows end early and leave, whole prompts do; windows are shorter than prompts."""
    shared, copied = (_completed(family, share=share) for share in (True, False))
    lengths = [len(row) for row in shared.token_ids]
    assert len(set(lengths)) > 3
    assert shared.logps is not None and copied.logps is not None
    for rows, others in ((shared.token_ids, copied.token_ids), (shared.logps, copied.logps)):
        for row, other in zip(rows, others, strict=True):
            torch.testing.assert_close(row, other)


def test_settings_hold_on_shared_prompts() -> None:
    settings = {"repetition_penalty": 1.3, "top_p": 0.9, "chunk_size": 2}
    shared, copied = (_completed("qwen2", share=share, **settings) for share in (True, False))
    assert all(map(torch.equal, shared.token_ids, copied.token_ids))


def test_a_prompt_is_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer holds does not grow with the rows of a prompt times its length."""
    held = []
    update = GrowingLayer.update

    def recording(layer, *args, **kwargs):
        result = update(layer, *args, **kwargs)
        if isinstance(layer, SharedPrefixLayer):
            held.append((layer.prompt_keys.shape[0], layer.key_buffer.shape[2]))
        return result

    monkeypatch.setattr(GrowingLayer, "update", recording)
    generator = HFGenerator(policy_of(tiny_model()))
    held.clear()
    sampling = sampling_of(max_new_tokens=3, min_new_tokens=3)
    generator.generate(prompts_of([40, 30]), 8, sampling, torch.Generator().manual_seed(0))
    assert set(held) == {(2, 3)}


def test_prompts_without_rows_are_dropped() -> None:
    cache = GrowingCache(0)
    keys = torch.randn(4, 2, 3, 5)
    cache.update(keys, keys + 1.0, 0)
    shared = SharedPrefixCache.of_prompts(
        cache, torch.arange(4).repeat_interleave(2), [3, 2, 3, 1], room=1
    )
    shared.select(torch.tensor([0, 1, 2, 6]))  # three of four prompts
    assert len(shared.shared_layers[0].prompt_keys) == 4
    shared.select(torch.tensor([2, 3]))
    (layer,) = shared.shared_layers
    assert torch.equal(layer.prompt_keys, keys[[1, 3]])
    assert torch.equal(layer.prompt_values, keys[[1, 3]] + 1.0)
    assert shared.groups.prompt_of_row.tolist() == [0, 1]
    assert shared.lengths_of_rows().tolist() == [2, 1]
    assert shared.get_seq_length() == 3
