"""What vLLM samples is the policy that is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from vllm_agents import CONFIG, agent_on, prompts_of, train, twin_with_hf

from agilerl.algorithms import GRPO
from agilerl.llm.generation.vllm import colocated
from agilerl.llm.generation.vllm.engine import StagedAdapter
from agilerl.llm.generation.vllm.probe import PolicyMismatchError

MakeAgent = Callable[..., GRPO]


@pytest.mark.parametrize("steps", [0, 3])
def test_greedy_tokens_equal_the_hf_generators(
    make_agent: MakeAgent, base: PreTrainedModel, steps: int
) -> None:
    agent = make_agent()
    train(agent, steps)
    prompts = prompts_of(1, 30, 7, 64, 7, 90, seed=4)
    ours = agent.get_action(prompts, training=False)
    twin = twin_with_hf(agent, base)
    for row, expected in zip(
        ours.completion_ids, twin.get_action(prompts, training=False).completion_ids, strict=True
    ):
        assert torch.equal(row, expected)
    twin.clean_up()


def test_evaluation_leaves_the_random_stream_alone(make_agent: MakeAgent) -> None:
    agent = make_agent()
    before = agent.rng.get_state()
    agent.get_action(prompts_of(3), training=False)
    assert torch.equal(agent.rng.get_state(), before)


def test_more_rows_than_the_engine_runs_at_a_time_come_back_in_order(
    make_agent: MakeAgent,
) -> None:
    agent = make_agent(group_size=2)
    prompts = prompts_of(*range(1, 101))  # more than max_num_seqs
    together = agent.get_action(prompts, training=False).completion_ids
    alone = [agent.get_action(prompt, training=False).completion_ids[0] for prompt in prompts[::9]]
    assert all(torch.equal(*pair) for pair in zip(together[::9], alone, strict=True))
    for prompt, row in zip(prompts, together, strict=True):
        assert torch.equal(row[:, : prompt["input_ids"].shape[1]], prompt["input_ids"])


def test_sampled_prompts_of_more_tokens_than_one_forward_takes(make_agent: MakeAgent) -> None:
    """The CPU build of vLLM ended when it ran a prompt in parts."""
    agent = make_agent(temperature=1.5)
    prompts = prompts_of(*[101] * 64)
    for prompt, row in zip(prompts, agent.get_action(prompts).completion_ids, strict=True):
        assert (row[:, :101] == prompt["input_ids"]).all()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 1.0, "top_k": None},
        {"top_p": 0.7, "top_k": None},
        {"top_p": 1.0, "top_k": 3},
        {"top_p": 0.8, "top_k": 20, "min_p": 0.1},
        {"top_p": 0.95, "top_k": 50, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_log_probs_are_the_trainers_whatever_is_filtered(
    make_agent: MakeAgent, temperature: float, filters: dict[str, Any]
) -> None:
    """Renormalised over what filters keep, they would bias every importance weight below 1."""
    agent = make_agent(temperature=temperature, **filters)
    found = train(agent)
    assert found["importance_weight_mean"] == pytest.approx(1.0, abs=1e-3)
    assert found["importance_weight_max"] == pytest.approx(1.0, abs=1e-3)
    assert found["importance_weight_nonfinite"] == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"importance_anchor": "sampler", "loss_type": "cispo", "clip_coef": (0.0, 5.0)},
        {"importance_correction": "token_mask", "importance_floor": 0.9},
        {"importance_correction": "geometric_mask", "importance_floor": 0.99},
        {"importance_correction": "sequence_mask", "importance_floor": 0.9},
    ],
    ids=str,
)
def test_ratios_and_masks_of_a_sampler_that_is_the_trainer(
    make_agent: MakeAgent, options: dict[str, Any]
) -> None:
    """Whose log-probs agree up to rounding, so that nothing is masked or clipped."""
    found = train(make_agent(vllm_importance_sampling_cap=1.1, **options))
    assert found["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert found["sampler_kl"] < 1e-5 and found["grad_norm"] > 0
    if "importance_anchor" in options:
        assert found["ratio_nonfinite"] == 0.0 and "importance_weight_mean" not in found
    else:
        assert found["importance_weight_capped"] == 0.0
        assert found["importance_weight_mean"] == pytest.approx(1.0, abs=1e-3)


def test_log_probs_belong_to_the_completion_and_its_end(make_agent: MakeAgent) -> None:
    agent = make_agent(temperature=2.0, top_k=None, top_p=1.0, group_size=16, max_output_tokens=40)
    action = agent.get_action(prompts_of(4, 11, 23))
    assert action.sampling_logps is not None
    ended = 0
    logps = iter(action.sampling_logps)
    for ids, mask in zip(*action, strict=True):
        for row in mask:
            reported = next(logps)
            assert reported is not None and len(reported) == row.sum()
            assert (reported < 0).all()
        ends = ids[:, 1:] == 258
        ended += int(ends.any(1).sum())
        assert (mask & ends).any(1).eq(ends.any(1)).all()
    assert ended


def test_samples_of_a_seed_are_the_same(make_agent: MakeAgent) -> None:
    prompts = prompts_of(3, 9, 17)
    first, second = (
        make_agent(seed=5, temperature=1.5).get_action(prompts).completion_ids for _ in range(2)
    )
    other = make_agent(seed=6, temperature=1.5).get_action(prompts).completion_ids
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert not all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, other, strict=True)
    )


@pytest.mark.parametrize("limits", [{}, {"min_output_tokens": 12}, {"max_model_len": 20}], ids=str)
def test_limits_of_the_output(make_agent: MakeAgent, limits: dict[str, int]) -> None:
    agent = make_agent(temperature=2.0, top_k=None, top_p=1.0, **limits)
    prompts = prompts_of(4, 18)
    for prompt, mask in zip(prompts, agent.get_action(prompts).action_masks, strict=True):
        lengths = mask.sum(1)
        room = limits.get("max_model_len", 128) - prompt["input_ids"].shape[1]
        assert (lengths <= min(12, room)).all()
        assert (lengths >= min(limits.get("min_output_tokens", 1), room)).all()


def test_after_ten_updates_the_probe_still_agrees(make_agent: MakeAgent) -> None:
    agent = make_agent()
    train(agent, 10)
    agent.get_action(prompts_of(3), training=False)
    assert agent.generator.probe_difference < 1e-4


def test_an_unchanged_adapter_is_not_sent_again(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make_agent()
    sent: list[StagedAdapter] = []
    load = agent.generator.engine.load_adapter

    def note(adapter: StagedAdapter) -> None:
        sent.append(adapter)
        load(adapter)

    monkeypatch.setattr(agent.generator.engine, "load_adapter", note)
    agent.get_action(prompts_of(3))
    agent.get_action(prompts_of(3))
    assert len(sent) == 1
    train(agent, 2)
    assert len({adapter.name for adapter in sent}) == len(sent) == 2


@pytest.mark.parametrize(("lr", "says"), [(5e-3, "differ by"), (1e-6, "vLLM's have not moved")])
def test_a_stale_adapter_is_caught(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, lr: float, says: str
) -> None:
    agent = make_agent(lr=lr)
    write = agent.generator._files.write
    stale: list[dict[str, torch.Tensor]] = []

    def write_first(policy: Any, tensors: dict[str, torch.Tensor]) -> StagedAdapter:
        stale.append({name: tensor.clone() for name, tensor in tensors.items()})
        return write(policy, stale[0])

    monkeypatch.setattr(agent.generator._files, "write", write_first)
    train(agent)  # the first version is right
    with pytest.raises(PolicyMismatchError, match=rf"not the one that is trained.*{says}"):
        agent.get_action(prompts_of(3))
    # Once caught it is not taken for synchronised.
    with pytest.raises(PolicyMismatchError):
        agent.get_action(prompts_of(3))
    monkeypatch.undo()
    agent.get_action(prompts_of(3))


def test_reports_after_filters_are_caught(
    base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = colocated.engine_settings

    def without_extension(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = settings(*args, **kwargs) | {"logprobs_mode": "processed_logprobs"}
        del found["worker_extension_cls"]
        return found

    monkeypatch.setattr("agilerl.llm.generation.vllm.build.engine_settings", without_extension)
    # In half precision as well, whose tolerance is wide.
    config = replace(CONFIG, max_num_seqs=32, probe_tolerance=0.1)
    agent = agent_on(base, vllm_config=config)
    with pytest.raises(PolicyMismatchError, match="TrainerLogprobs"):
        agent.get_action(prompts_of(3))
    agent.clean_up()


def test_a_turn_continues_the_last_one_in_a_session(make_agent: MakeAgent) -> None:
    agent = make_agent(group_size=2, max_output_tokens=5)
    with agent.rollout():
        first = agent.get_action(prompts_of(40)[0], training=False).completion_ids[0]
        longer = {"input_ids": first, "attention_mask": torch.ones_like(first)}
        inside = agent.get_action(longer, training=False).completion_ids[0]
        with pytest.raises(RuntimeError, match="keeps its policy"):
            agent.generator.sync(make_agent().policy)
    assert torch.equal(inside, agent.get_action(longer, training=False).completion_ids[0])


@pytest.mark.parametrize("rank", [17, 64])
def test_a_rank_above_the_engines_is_refused(base: PreTrainedModel, rank: int) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=rank, target_modules="all-linear")
    with pytest.raises(ValueError, match=f"max_lora_rank is 16, but lora_config.r is {rank}"):
        agent_on(base, lora_config=config)


def test_sleep_is_inert_without_a_gpu(
    base: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        agent = agent_on(base, vllm_config=replace(CONFIG, sleep_mode=True, sleep_mode_level=2))
    assert caplog.text.count("sleep_mode has no effect on cpu") == 1
    train(agent, 2)
    agent.clean_up()
