"""Acting: shapes, masks, and an observation that stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from agent_helpers import TOKENIZER, make_agent, prompts, randomise, small_model, train

from agilerl.llm.generation.hf import HFGenerator


def test_shapes_masks_and_unpacking() -> None:
    agent = make_agent()
    obs = prompts("hello", "hi")
    result = agent.get_action(obs)
    completion_ids, action_masks = result
    assert len(result) == 2 and result.sampling_logps is None
    assert completion_ids is result.completion_ids and action_masks is result.action_masks
    for prompt, ids, mask in zip(obs, completion_ids, action_masks, strict=True):
        start = prompt["input_ids"].shape[1]
        assert ids.dtype == torch.long and mask.dtype == torch.bool
        assert ids.shape[0] == 4 and mask.shape == (4, ids.shape[1] - 1)
        assert torch.equal(ids[:, :start], prompt["input_ids"].expand(4, -1))
        assert not mask[:, : start - 1].any() and mask[:, start - 1].all()


def test_obs_is_not_changed_and_a_single_prompt_is_accepted() -> None:
    agent = make_agent()
    (prompt,) = prompts("hello")
    before = copy.deepcopy(prompt)
    assert len(agent.get_action(prompt).completion_ids) == 1
    assert prompt.keys() == before.keys()
    assert torch.equal(prompt["input_ids"], before["input_ids"])
    assert torch.equal(prompt["attention_mask"], before["attention_mask"])


def test_evaluation_is_greedy_and_once_per_prompt() -> None:
    agent = randomise(make_agent())
    obs = prompts("hello", "hi")
    state = agent.rng.get_state()
    first, second = (agent.get_action(obs, training=False).completion_ids for _ in range(2))
    assert torch.equal(agent.rng.get_state(), state), "evaluation must not move the random stream"
    for prompt, one, two in zip(obs, first, second, strict=True):
        assert one.shape[0] == 1 and torch.equal(one, two)
        with agent.select_adapter("actor"), torch.no_grad():
            expected = agent.actor.generate(
                input_ids=prompt["input_ids"],
                attention_mask=prompt["attention_mask"],
                max_new_tokens=6,
                do_sample=False,
            )
        assert torch.equal(one, expected)


def test_without_repeating_each_prompt_is_sampled_once() -> None:
    result = make_agent().get_action(prompts("a", "a", "b"), repeat_prompts=False)
    assert [ids.shape[0] for ids in result.completion_ids] == [1, 1, 1]


def test_chunks_are_of_prompts_whoever_repeats_them() -> None:
    """A chunk of 2 prompts is 2 groups: of the prompts given, or of those repeated for it."""
    agent = make_agent(hf_generate_chunk_size=2, min_output_tokens=6)
    rows: list[int] = []
    handle = agent.policy.base.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    for obs, settings, chunks in [
        (prompts("a", "b", "c"), {}, [8, 4]),
        (prompts(*"aaaabbbbcccc"), {"repeat_prompts": False}, [8, 4]),
        (prompts("a", "b", "c"), {"training": False}, [2, 1]),
    ]:
        rows.clear()
        agent.get_action(obs, **settings)
        # Per chunk, a forward of its prompts and one for each token but the last.
        assert [rows[i + 1] for i in range(0, len(rows), 6)] == chunks
    handle.remove()


class _OtherSampler(HFGenerator):
    """Stands for an engine of its own, whose log-probs are not quite the trainer's."""

    differs_from_trainer = True


@pytest.mark.parametrize("correction", [True, False])
def test_log_probs_are_captured_where_a_correction_needs_them(correction: bool) -> None:
    agent = make_agent(vllm_importance_sampling_correction=correction)
    assert agent.get_action(prompts("hello")).sampling_logps is None
    agent.generator = _OtherSampler(agent.policy)
    assert agent.get_action(prompts("hello"), training=False).sampling_logps is None
    result = agent.get_action(prompts("hello", "hi"))
    if not correction:
        assert result.sampling_logps is None
        return
    assert result.sampling_logps is not None
    generated = [int(row.sum()) for mask in result.action_masks for row in mask]
    assert [len(row) for row in result.sampling_logps if row is not None] == generated
    metrics = agent.learn(
        (result.completion_ids, result.action_masks, torch.arange(8.0).view(2, 4)),
        sampling_logps=result.sampling_logps,
    )
    assert metrics["importance_weight_mean"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_is_left_out(side: str) -> None:
    agent = make_agent()
    (plain,) = prompts("hello")
    padded = dict(
        TOKENIZER.pad(
            {"input_ids": plain["input_ids"].tolist()},
            padding="max_length",
            max_length=9,
            padding_side=side,
            return_tensors="pt",
        )
    )
    assert padded["input_ids"].shape == (1, 9)
    got, expected = (
        agent.get_action([obs], training=False).completion_ids[0] for obs in (padded, plain)
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_the_sampled_end_of_sequence_is_an_action(pad_is_eos: bool) -> None:
    model = small_model(initializer_range=0.02)  # nearly uniform over 260 ids
    eos = int(TOKENIZER.eos_token_id)
    model.generation_config.eos_token_id = [eos, *range(0, 256, 4)]
    pad = eos if pad_is_eos else TOKENIZER.pad_token_id
    agent = make_agent(
        model=model, pad_token_id=pad, group_size=64, top_k=0, top_p=1.0, temperature=1.0
    )
    ends = set(model.generation_config.eos_token_id)
    start = 5
    ended = 0
    action = agent.get_action(prompts("hello"))
    (ids,), (mask,), (reasons,) = (*action, action.finish_reasons or [])
    for row, actions, reason in zip(ids.tolist(), mask.tolist(), reasons, strict=True):
        generated = [i + 1 for i, action in enumerate(actions) if action]
        assert generated == list(range(start, start + len(generated)))
        stops = [i for i in generated if row[i] in ends]
        assert stops in ([], generated[-1:]), "nothing is an action after the end"
        assert len(generated) == 6 or stops
        assert reason == ("stop" if stops else "length")
        assert all(token == pad for token in row[generated[-1] + 1 :])
        ended += bool(stops)
    assert ended > 8


def test_a_mask_counts_a_sampled_padding_id_as_action() -> None:
    model = small_model()
    eos = int(TOKENIZER.eos_token_id)
    model.generation_config.eos_token_id = list(range(260))
    (ids,), (mask,) = make_agent(model=model, pad_token_id=eos).get_action(prompts("hello"))
    assert ids.shape == (4, 6) and mask.sum(1).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("obs", "error", "says"),
    [
        ([], ValueError, "empty"),
        ("hello", TypeError, "list of prompt dicts"),
        (["hello"], TypeError, r"obs\[0\] is 'hello'.*input_ids"),
        ([{"input_ids": [1, 2]}], TypeError, r"obs\[0\].*attention_mask"),
        (
            [{"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3)}],
            ValueError,
            r"obs\[0\].*\(2, 3\).*\(1, P\)",
        ),
        (prompts("x" * 64), ValueError, "64 tokens.*max_model_len"),
    ],
)
def test_bad_obs(obs: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make_agent().get_action(obs)


def test_learn_within_a_rollout_is_refused() -> None:
    agent = make_agent()
    with agent.rollout(), pytest.raises(RuntimeError, match=r"within agent.rollout\(\)"):
        train(agent)
    train(agent)
