"""Single queries attend as torch's attention does, and a decoder is left as it was."""

from __future__ import annotations

import pytest
import torch
from model_families import make_family
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from agilerl.llm.generation.kv_cache.growing_cache import GrowingCache
from agilerl.llm.generation.single_token.attention import _NAME, attend, single_query_attention


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_attention_is_torchs(
    queries: int, groups: int, masked: bool, scaling: float | None
) -> None:
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(5, 2 * groups, queries, 8, generator=rng)
    # As views of a buffer with room to spare.
    key, value = (torch.randn(5, 2, 9, 8, generator=rng)[:, :, :7] for _ in range(2))
    mask = None
    if masked:
        mask = torch.rand(5, 1, queries, 7, generator=rng) < 0.6
        mask[:, :, :, -1] = True
    module = nn.Module()
    module.num_key_value_groups = groups
    arguments = (module, query, key, value, mask)
    mine, _ = attend(*arguments, scaling=scaling, dropout=0.0, is_causal=False)
    theirs, _ = sdpa_attention_forward(*arguments, scaling=scaling, dropout=0.0, is_causal=False)
    assert mine.shape == theirs.shape
    torch.testing.assert_close(mine, theirs)


def test_a_decoder_is_left_as_it_was() -> None:
    decoder = make_family("qwen2").base_model
    with pytest.raises(KeyError), single_query_attention(decoder, GrowingCache(1)):
        assert decoder.config._attn_implementation == _NAME
        raise KeyError
    assert decoder.config._attn_implementation == "sdpa"
    # A model that computes its attention itself goes on doing so.
    decoder.config._attn_implementation = "eager"
    with single_query_attention(decoder, GrowingCache(1)):
        assert decoder.config._attn_implementation == "eager"
