"""Batched generation gives what one-by-one ``generate`` gives, whatever the batch."""

from __future__ import annotations

import weakref

import pytest
import torch
from generation_helpers import EOS, policy_of, prompts_of, sampling_of
from model_families import FALCONS, FAMILIES, make_family
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from agilerl.llm.causal_lm import LogitHead
from agilerl.llm.generation import decode, new_token_limit, random_numbers
from agilerl.llm.generation.cached_decoder import CachedDecoder
from agilerl.llm.generation.decode import DecodingLoop
from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm.generation.kv_cache.growing_cache import GrowingLayer
from agilerl.llm.policy import Policy
from agilerl.testing import tiny_model


def small_vocabulary_model(vocab: int) -> torch.nn.Module:
    """A random model with so few tokens that each, the end of sequence too, is drawn often."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "initializer_range": 0.1,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2Config(
        vocab_size=vocab, **shape, **heads, bos_token_id=None, eos_token_id=EOS, pad_token_id=0
    )
    return Qwen2ForCausalLM(config).eval()


def generate(
    policy: Policy, prompts: list[torch.Tensor], samples: int, **settings: object
) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    return HFGenerator(policy).generate(prompts, samples, sampling_of(**settings), rng).token_ids


@pytest.mark.parametrize("family", FAMILIES | FALCONS)
def test_greedy_equals_generate_one_by_one(family: str) -> None:
    model = make_family(family)
    policy = policy_of(model)
    prompts = prompts_of([9, 3, 5, 7, 3, 1], vocab=model.config.vocab_size)
    settings = {"max_new_tokens": 6, "eos_token_ids": (2,)}
    batched = generate(policy, prompts, 2, greedy=True, chunk_size=5, **settings)
    for i, prompt in enumerate(prompts):
        policy.set_role("actor")
        alone = model.generate(
            prompt[None], do_sample=False, max_new_tokens=6, eos_token_id=2, pad_token_id=0
        )[0, len(prompt) :]
        assert torch.equal(batched[2 * i], alone)
        assert torch.equal(batched[2 * i + 1], alone)


def test_samples_do_not_depend_on_chunks_or_company() -> None:
    policy = policy_of(tiny_model())
    prompts = prompts_of([9, 3, 5, 14])
    whole = generate(policy, prompts, 4)
    for chunk_size in (1, 3, 4):
        chunked = generate(policy, prompts, 4, chunk_size=chunk_size)
        assert all(torch.equal(a, b) for a, b in zip(whole, chunked, strict=True))
    assert len({tuple(row.tolist()) for row in whole[:4]}) > 1


def test_the_same_seed_repeats_and_another_does_not() -> None:
    policy = policy_of(tiny_model())
    generator, prompts = HFGenerator(policy), prompts_of([5, 5])
    runs = [
        generator.generate(prompts, 4, sampling_of(), torch.Generator().manual_seed(seed)).token_ids
        for seed in (7, 7, 8)
    ]
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(runs[0], runs[2], strict=True))


def test_sampled_frequencies_match_the_model() -> None:
    model = small_vocabulary_model(12)
    policy = policy_of(model)
    (prompt,) = prompts_of([4], vocab=12)
    rows = generate(policy, [prompt], 4000, max_new_tokens=2, eos_token_ids=(11,))
    policy.set_role("actor")
    with torch.no_grad():
        first = model(prompt[None]).logits[0, -1].softmax(-1)
        after = model(torch.cat([prompt, torch.tensor([3])])[None]).logits[0, -1].softmax(-1)
    counted = torch.bincount(torch.stack([row[0] for row in rows]), minlength=12) / len(rows)
    assert (counted - first).abs().max() < 0.03
    second = torch.stack([row[1] for row in rows if row[0] == 3])
    assert (torch.bincount(second, minlength=12) / len(second) - after).abs().max() < 0.1


def test_rows_end_with_the_end_of_sequence_or_at_their_limit() -> None:
    policy = policy_of(small_vocabulary_model(8))
    prompts = prompts_of([4, 30], vocab=8)
    rows = generate(policy, prompts, 16, max_new_tokens=20, max_model_len=40)
    for i, row in enumerate(rows):
        limit = 20 if i < 16 else 10
        assert 1 <= len(row) <= limit
        assert (row[:-1] != EOS).all()
        assert row[-1] == EOS or len(row) == limit
    assert len({len(row) for row in rows}) > 3


def test_finished_rows_leave_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    step = DecodingLoop._step

    def recording(self, rows, token, cache):
        sizes.append(len(token))
        return step(self, rows, token, cache)

    monkeypatch.setattr(DecodingLoop, "_step", recording)
    generate(policy_of(small_vocabulary_model(6)), prompts_of([4], vocab=6), 64, max_new_tokens=20)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 4


def test_each_prompt_is_prefilled_once_per_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    hidden = CachedDecoder.hidden

    def recording(self, ids, mask, positions, cache):
        seen.append(tuple(ids.shape))
        return hidden(self, ids, mask, positions, cache)

    policy = policy_of(tiny_model())
    HFGenerator(policy)  # the probe runs
    monkeypatch.setattr(CachedDecoder, "hidden", recording)
    generate(policy, prompts_of([9, 9]), 8, max_new_tokens=2, min_new_tokens=2)
    assert seen == [(2, 9), (16, 1)]


@pytest.mark.parametrize(
    ("chunk_size", "samples", "prompts", "expected"),
    [
        (2, 4, 3, [8, 4]),
        (1, 3, 2, [3, 3]),
        (5, 2, 3, [6]),
        (None, 100, 5, [200, 200, 100]),  # 256 sequences or fewer
        (None, 300, 2, [300, 300]),  # a group is never divided
        (None, 1, 300, [256, 44]),
    ],
)
def test_a_chunk_is_of_prompts_with_their_groups(
    chunk_size: int | None, samples: int, prompts: int, expected: list[int]
) -> None:
    policy, rows = policy_of(tiny_model()), []
    HFGenerator(policy)  # the probe runs
    handle = policy.base.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    settings = {"max_new_tokens": 2, "min_new_tokens": 2, "chunk_size": chunk_size}
    generate(policy, prompts_of([5] * prompts), samples, **settings)
    handle.remove()
    assert [count for count, tokens in rows if tokens == 1] == expected
    assert [count * samples for count, tokens in rows if tokens == 5] == expected


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("return_logps", [True, False])
def test_memory_follows_what_is_generated_not_what_is_allowed(return_logps: bool) -> None:
    policy, largest = policy_of(small_vocabulary_model(8)), []
    for allowed in (1_000, 1_000_000):
        settings = {"max_new_tokens": None, "return_logps": return_logps}
        with _Largest() as tensors:
            rows = generate(policy, prompts_of([4], vocab=8), 64, max_model_len=allowed, **settings)
        assert max(map(len, rows)) < 200
        largest.append(tensors.elements)
    assert largest[0] == largest[1]


def test_rows_of_several_blocks_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(tiny_model())
    prompts = prompts_of([9, 3, 5, 14])
    whole = generate(policy, prompts, 3, max_new_tokens=40, return_logps=True)
    for module in (decode, random_numbers):
        monkeypatch.setattr(module, "BLOCK", 6)
    runs = []
    for chunk_size in (4, 1, 3):
        rng = torch.Generator().manual_seed(3)
        sampling = sampling_of(max_new_tokens=40, chunk_size=chunk_size, return_logps=True)
        made = HFGenerator(policy).generate(prompts, 3, sampling, rng)
        assert made.logps is not None
        assert [len(row) for row in made.logps] == [len(row) for row in made.token_ids]
        runs.append((made, rng.get_state()))
    first, state = runs[0]
    assert max(map(len, first.token_ids)) > 24
    assert any(not torch.equal(a, b) for a, b in zip(whole, first.token_ids, strict=True))
    for made, after in runs[1:]:
        assert torch.equal(after, state)
        for a, b in zip(first.token_ids, made.token_ids, strict=True):
            assert torch.equal(a, b)


def test_equal_prompts_are_run_once_and_their_samples_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws of row i are row i's own, whichever prompts are equal."""
    policy, (a, b) = policy_of(tiny_model()), prompts_of([9, 7])
    prompts = [a, b, a.clone(), a.clone(), b.clone()]
    alone = []
    for number, prompt in enumerate(prompts):
        padding = [prompt[:1]] * 5
        padding[number] = prompt
        alone.append(generate(policy, padding, 2)[2 * number : 2 * number + 2])
    shapes = []
    hidden = CachedDecoder.hidden

    def recording(self, ids, mask, positions, cache):
        shapes.append(tuple(ids.shape))
        return hidden(self, ids, mask, positions, cache)

    monkeypatch.setattr(CachedDecoder, "hidden", recording)
    together = generate(policy, prompts, 2)
    assert shapes[0] == (2, 9)
    assert shapes[1] == (10, 1)
    for expected, row in zip([r for pair in alone for r in pair], together, strict=True):
        assert torch.equal(expected, row)


def test_cache_grows_past_its_first_block() -> None:
    model = tiny_model()
    policy = policy_of(model)
    (prompt,) = prompts_of([3])
    (row,) = generate(policy, [prompt], 1, greedy=True, max_new_tokens=150, max_model_len=200)
    policy.set_role("actor")
    alone = model.generate(
        prompt[None], do_sample=False, max_new_tokens=150, eos_token_id=EOS, pad_token_id=0
    )
    assert torch.equal(row, alone[0, 3:])


def test_without_position_ids_only_equal_lengths_share_a_batch() -> None:
    policy = policy_of(tiny_model())
    prompts = prompts_of([9, 3, 5, 9])
    plain = generate(policy, prompts, 2, greedy=True)
    bucketed = generate(policy, prompts, 2, greedy=True, left_padding=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, bucketed, strict=True))


def test_repetition_penalty_and_least_length_act_in_generation() -> None:
    model = tiny_model()
    policy = policy_of(model)
    (prompt,) = prompts_of([6])
    settings = {"repetition_penalty": 1.7, "min_new_tokens": 12}
    (row,) = generate(policy, [prompt], 1, greedy=True, **settings)
    policy.set_role("actor")
    alone = model.generate(
        prompt[None],
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=EOS,
        pad_token_id=0,
        **settings,
    )
    assert torch.equal(row, alone[0, 6:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_is_bit_identical_after_many_rollouts(dtype: torch.dtype) -> None:
    model = tiny_model()
    policy = policy_of(model, dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(20):
        generate(policy, prompts_of([4]), 2, max_new_tokens=2)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_prompt_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"64 tokens.*max_model_len 64.*max_context_length"):
        new_token_limit(torch.zeros(64), sampling_of())


def test_a_finished_row_never_passes_the_last_position_of_the_model() -> None:
    model = make_family("gpt2")  # 15 learned positions
    policy = policy_of(model)
    prompts = prompts_of([13, *[4] * 8], vocab=model.config.vocab_size)
    rows = generate(policy, prompts, 1, max_new_tokens=11, max_model_len=15, min_new_tokens=11)
    assert [len(row) for row in rows] == [2, *[11] * 8]


def test_infinite_logits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(tiny_model())
    logits = LogitHead.logits

    def infinite(self: LogitHead, hidden: torch.Tensor) -> torch.Tensor:
        made = logits(self, hidden)
        made[:, 5] = torch.inf
        return made

    monkeypatch.setattr(LogitHead, "logits", infinite)
    with pytest.raises(RuntimeError, match="NaN or inf"):
        generate(policy, prompts_of([4]), 2)


def test_an_outgrown_buffer_is_freed() -> None:
    layer = GrowingLayer(room=2)
    for width in (3, 1, 1, 1):
        keys, _ = layer.update(torch.full((2, 1, width, 4), width), torch.zeros(2, 1, width, 4))
        held = weakref.ref(layer.key_buffer)
    assert keys[0, 0, :, 0].tolist() == [3, 3, 3, 1, 1, 1]
    layer.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))
    del keys
    assert held() is None
    assert layer.keys.numel() == layer.values.numel() == 0
    assert layer.get_seq_length() == 9


def test_broken_weights_are_named() -> None:
    model = tiny_model()
    policy = policy_of(model)
    with torch.no_grad():
        next(iter(policy.parameters("actor").values())).fill_(torch.nan)
    with pytest.raises(RuntimeError, match="NaN or inf during generation"):
        generate(policy, prompts_of([4]), 2)
