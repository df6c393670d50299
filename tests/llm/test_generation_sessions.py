"""Keys and values cached between turns change what is computed, never what comes out."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from generation_helpers import policy_of, prompts_of, sampling_of
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import FALCONS, FAMILIES, make_family
from session_helpers import ENDS, assert_same, play, recorded_reads

from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm.generation.kv_cache import prefix_cache
from agilerl.llm.policy import Policy
from agilerl.testing import tiny_model


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES | FALCONS)
def test_turns_are_those_of_recomputation(family: str, greedy: bool) -> None:
    policy = policy_of(make_family(family))
    vocab = policy.base.model.config.vocab_size
    short = family == "gpt2"  # 15 positions
    lengths = [3, 4, 3, 2] if short else [9, 3, 12, 7, 7]
    settings = {"eos_token_ids": ENDS, "greedy": greedy, "max_new_tokens": 2 if short else 4}

    def feedback(turn: int, episode: int) -> list[int]:
        if turn == 1 and episode == 0:
            return []  # over: its keys and values are cached for nothing
        return [30 + (turn + 7 * episode + i) % 30 for i in range(1 if short else 1 + episode)]

    first = prompts_of(lengths, vocab=vocab)
    plain = play(policy, first, feedback, 3, cached=False, **settings)
    cached = play(policy, first, feedback, 3, cached=True, **settings)
    assert_same(cached, plain)
    assert cached.reads[0] == plain.reads[0]
    for mine, theirs in zip(cached.reads[1:], plain.reads[1:], strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] < theirs[1]
    if not greedy and not short:
        assert len({len(row) for row in plain.tokens}) > 1


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_of(tiny_model())


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_episodes_are_those_of_recomputation(policy: Policy, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    first = prompts_of(data.draw(st.lists(st.integers(1, 15), min_size=count, max_size=count)))
    # Equal prompts, as the episodes of a group have them.
    copies = data.draw(st.lists(st.integers(0, count - 1), max_size=9))
    first += [first[i].clone() for i in copies]
    slid = data.draw(st.dictionaries(st.integers(0, len(first) - 1), st.integers(1, 4)))
    lengths = st.lists(
        st.lists(st.integers(0, 9), min_size=len(first), max_size=len(first)),
        min_size=4,
        max_size=4,
    )
    added = data.draw(lengths)
    added[0][0] = added[1][0] = added[2][0] = 1  # one episode goes on to the end
    same = data.draw(st.booleans())

    def feedback(turn: int, episode: int) -> list[int]:
        number = 0 if same else episode
        return [(3 * turn + 5 * number + i) % 90 + 2 for i in range(added[turn][episode])]

    settings = {
        "eos_token_ids": ENDS,
        "max_model_len": 200,
        "greedy": data.draw(st.booleans()),
        "repetition_penalty": data.draw(st.sampled_from([1.0, 1.3])),
    }
    plain = play(policy, first, feedback, 4, cached=False, drop=slid, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "LEAST_SAVED", data.draw(st.sampled_from([-100.0, 0.25])))
        cached = play(policy, first, feedback, 4, cached=True, drop=slid, **settings)
    assert_same(cached, plain)


def test_only_new_tokens_are_run(policy: Policy) -> None:
    settings = {"eos_token_ids": (999,), "max_new_tokens": 3, "max_model_len": 200}
    first = prompts_of([40, 30, 40])

    def feedback(turn: int, episode: int) -> list[int]:
        return [5] * 6

    cached = play(policy, first, feedback, 3, cached=True, **settings)
    # The last sampled token was never run.
    assert cached.reads == [(3, 40), (3, 7), (3, 7)]


def test_equal_prompts_go_on_as_one(policy: Policy) -> None:
    (prompt,) = prompts_of([20])
    feedback = lambda turn, episode: [5, 6 + (turn > 0) * episode]  # noqa: E731
    settings = {"greedy": True, "eos_token_ids": (999,), "max_new_tokens": 2}
    first = [prompt.clone() for _ in range(4)]
    cached = play(policy, first, feedback, 3, cached=True, **settings)
    assert cached.reads == [(1, 20), (1, 3), (4, 3)]
    assert_same(cached, play(policy, first, feedback, 3, cached=False, **settings))


def test_a_prompt_without_a_past_makes_no_other_run_whole(policy: Policy) -> None:
    generator, rng, reads = HFGenerator(policy), torch.Generator().manual_seed(5), []
    sampling = sampling_of(max_new_tokens=3, max_model_len=200, eos_token_ids=(999,))
    first = prompts_of([40, 30])
    with generator.session(), recorded_reads(policy, reads):
        made = generator.generate(first, 1, sampling, rng).token_ids
        going_on = [
            torch.cat([prompt, row, torch.tensor([5, 6])])
            for prompt, row in zip(first, made, strict=True)
        ]
        fresh = prompts_of([25])[0].flip(0)
        generator.generate([going_on[0], fresh, going_on[1]], 1, sampling, rng)
    assert reads == [(2, 40), (2, 3), (1, 25)]


def test_a_window_that_drops_old_turns_starts_afresh(policy: Policy) -> None:
    settings = {"eos_token_ids": ENDS, "max_model_len": 200}
    first = prompts_of([12, 15, 9])

    def feedback(turn: int, episode: int) -> list[int]:
        return [4 + episode] * (episode + 1)

    drop = dict.fromkeys(range(3), 5)
    plain = play(policy, first, feedback, 4, cached=False, drop=drop, **settings)
    cached = play(policy, first, feedback, 4, cached=True, drop=drop, **settings)
    assert_same(cached, plain)
    assert cached.reads[2] == plain.reads[2]
    assert cached.reads[3][1] < plain.reads[3][1]


@pytest.mark.parametrize("changes", [{"chunk_size": 2}, {"left_padding": False}])
def test_what_cannot_be_cached_is_run_again(policy: Policy, changes: dict[str, object]) -> None:
    settings = {"eos_token_ids": ENDS, "max_model_len": 200} | changes
    first = prompts_of([12, 12, 9])

    def feedback(turn: int, episode: int) -> list[int]:
        return [4 + episode] * 3

    plain = play(policy, first, feedback, 3, cached=False, **settings)
    cached = play(policy, first, feedback, 3, cached=True, **settings)
    assert_same(cached, plain)
    assert cached.reads == plain.reads


def test_weights_stay_the_same_in_a_session() -> None:
    policy = policy_of(tiny_model())
    generator = HFGenerator(policy)
    with generator.session():
        generator.sync(policy)
        with pytest.raises(RuntimeError, match="one of its agents"):
            policy.set_role("reference")
        with pytest.raises(RuntimeError, match="keeps its policy"):
            generator.sync(policy_of(tiny_model()))  # of another base


def test_a_session_is_of_the_policy_and_role_in_sync() -> None:
    """Prompts that went on in one session start afresh in that of another policy or role."""
    policy, other = policy_of(model := tiny_model()), policy_of(model)
    for parameter in other.parameters().values():
        parameter.data += 0.1
    generator, rng, sampling = HFGenerator(policy), torch.Generator(), sampling_of(greedy=True)
    (first,) = prompts_of([12])

    def answers() -> list[torch.Tensor]:
        with generator.session():
            (made,) = generator.generate([first], 1, sampling, rng).token_ids
            prompt = torch.cat([first, made, torch.tensor([7, 8])])
            return [made, *generator.generate([prompt], 1, sampling, rng).token_ids]

    results = [answers()]
    policy.set_role("reference")
    generator.sync(policy)
    results.append(answers())
    generator.sync(other)
    results.append(answers())
    (expected,) = HFGenerator(other).generate([first], 1, sampling, rng).token_ids
    assert torch.equal(results[2][0], expected)
    assert len({tuple(result[0].tolist()) for result in results}) == 3


def test_leaving_frees_what_was_cached_also_after_an_error(policy: Policy) -> None:
    generator, rng, sampling = HFGenerator(policy), torch.Generator(), sampling_of()
    with (
        pytest.raises(ValueError, match="no room"),
        generator.session(),
        generator.session(),
    ):
        generator.generate(prompts_of([12, 3]), 2, sampling, rng)
        assert generator._prefix_cache is not None
        assert len(generator._prefix_cache) == 4
        cached = weakref.ref(generator._prefix_cache)
        generator.generate([torch.zeros(64, dtype=torch.long)], 1, sampling, rng)
    gc.collect()
    assert cached() is None
    generator.generate(prompts_of([12, 3]), 2, sampling, rng)
    assert generator._prefix_cache is None


def test_old_and_new_are_never_both_whole(policy: Policy) -> None:
    """When the second turn's model runs, nothing of the first turn's buffers is left."""
    generator, rng = HFGenerator(policy), torch.Generator().manual_seed(5)
    sampling = sampling_of(max_new_tokens=4, eos_token_ids=ENDS)
    first = prompts_of([12, 9, 10, 11])
    alive = []
    with generator.session():
        made = generator.generate(first, 1, sampling, rng).token_ids
        assert generator._prefix_cache is not None
        blocks = generator._prefix_cache._blocks
        assert len(blocks) > 1
        buffers = [weakref.ref(t) for block in blocks for pair in block for t in pair or ()]
        del blocks
        handle = policy.base.decoder.register_forward_pre_hook(
            lambda *_: alive.append(sum(b() is not None for b in buffers))
        )
        prompts = [
            torch.cat([prompt, row, torch.tensor([5, 6])])
            for prompt, row in zip(first, made, strict=True)
        ]
        generator.generate(prompts, 1, sampling, rng)
        handle.remove()
    assert alive
    assert not any(alive)
