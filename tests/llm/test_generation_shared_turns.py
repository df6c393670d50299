"""Rows of a session share the prompt that they began with, in every turn."""

from __future__ import annotations

import math

import pytest
import torch
from generation_helpers import policy_of, prompts_of, sampling_of
from model_families import EAGER_FAMILIES, FAMILIES, make_family
from session_helpers import ENDS, Played, assert_same, play

from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm.generation.kv_cache import prefix_cache
from agilerl.llm.generation.kv_cache.continued_rows import CachedRow
from agilerl.llm.generation.kv_cache.growing_cache import GrowingCache
from agilerl.llm.generation.kv_cache.prefix_cache import PrefixCache
from agilerl.llm.policy import Policy
from agilerl.testing import tiny_model

WINDOWED = ("mistral", "gemma2", "gemma3")


def cache_of(generator: HFGenerator) -> PrefixCache:
    assert generator._prefix_cache is not None
    return generator._prefix_cache


def held_tensors(cache: PrefixCache) -> dict[int, torch.Tensor]:
    """Keys and values in a cache, each once."""
    pairs = [pair for block in cache._blocks for pair in block if pair is not None]
    return {tensor.data_ptr(): tensor for pair in pairs for tensor in pair}


def kept(cache: PrefixCache, row: CachedRow, layer: int) -> torch.Tensor:
    """A row's keys and values, ``(heads, tokens, 2 * head size)``."""
    parts = []
    for segment in (row.prompt, row.own):
        if segment is not None:
            pair = cache._blocks[segment.block][layer]
            assert pair is not None
            columns = slice(segment.start, segment.start + segment.length)
            parts.append(torch.cat(pair, dim=-1)[segment.row, :, columns])
    return torch.cat(parts, dim=1)


def play_groups(policy: Policy, **settings: object) -> Played:
    """Groups of 4, 1 and 3 episodes: of the first all but one end, one of the last slides."""
    config = policy.base.model.config
    few_positions = config.model_type == "gpt2"
    starts = prompts_of([4, 2, 1] if few_positions else [9, 7, 3], vocab=config.vocab_size)
    first = [starts[i] for i in (0, 0, 0, 0, 1, 2, 2, 2)]

    def feedback(turn: int, episode: int) -> list[int]:
        if turn == 1 and episode in (0, 1, 2):
            return []
        count = 1 if few_positions else 1 + episode % 3
        return [30 + (7 * episode + i) % 30 for i in range(count)]

    sampling = {"max_new_tokens": 2 if few_positions else 4, "eos_token_ids": ENDS}
    return play(policy, first, feedback, 4, drop={5: 1}, **sampling, **settings)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_is_that_of_whole_rows(
    family: str, greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "LEAST_SAVED", -math.inf)
    monkeypatch.setattr(prefix_cache, "MOST_PLACES", math.inf)
    # Eager attention has nan in rows that attend to nothing, in float64.
    dtype = torch.float32 if family in EAGER_FAMILIES else torch.float64
    policy = policy_of(make_family(family, dtype), dtype)
    shared_by_turn = []

    def compare(generator: HFGenerator) -> None:
        cache = cache_of(generator)
        for key, row in cache._rows.items():
            ids = torch.frombuffer(bytearray(key[8:]), dtype=torch.long)
            whole = GrowingCache(0)
            policy.base.decoder(input_ids=ids[None], past_key_values=whole, use_cache=True)
            for number, layer in enumerate(whole.growing_layers):
                expected = torch.cat(layer.columns_in_use(), dim=-1)[0]
                made = kept(cache, row, number)
                assert made.shape == expected.shape
                # Norms are computed in float32.
                assert (made - expected).abs().max() < 1e-5
        shared_by_turn.append(len({row.prompt for row in cache._rows.values()}) < len(cache))

    cached = play_groups(policy, cached=True, greedy=greedy, after_turn=compare)
    assert_same(cached, play_groups(policy, cached=False, greedy=greedy))
    if not greedy:  # otherwise the rows of a group are the same
        first = family not in EAGER_FAMILIES
        later = first and family not in WINDOWED
        # In the last turn one of the rows shares none, as its window slid.
        assert shared_by_turn == [first, later, later, False]


@pytest.mark.parametrize("samples", [1, 8])
def test_a_prompt_is_kept_once_in_every_turn(samples: int) -> None:
    """What a session holds are the prompts, and the rows' own columns."""
    groups, prompt_tokens, added, turns = 2, 40, 3, 3
    generator, rng = HFGenerator(policy_of(tiny_model())), torch.Generator().manual_seed(0)
    sampling = sampling_of(max_new_tokens=4, min_new_tokens=4, max_model_len=200)
    prompts = prompts_of([prompt_tokens] * groups)
    rows = [prompt for prompt in prompts for _ in range(8)]
    with generator.session():
        for turn in range(turns):
            given = prompts if turn == 0 and samples == 8 else rows
            made = generator.generate(given, samples if turn == 0 else 1, sampling, rng).token_ids
            rows = [torch.cat([*row, torch.arange(added)]) for row in zip(rows, made, strict=True)]
            shapes = {tuple(t.shape[:3:2]) for t in held_tensors(cache_of(generator)).values()}
            own = max(columns for count, columns in shapes if count == 8 * groups)
            assert shapes == {(groups, prompt_tokens), (8 * groups, own)}
            assert own <= turn * (4 + added) + 2 * 16
