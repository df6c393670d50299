"""Every argument that should work changes what it is said to change, and nothing that it is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from agent_helpers import (
    REWARDS,
    TOKENIZER,
    fixed_rollouts,
    lora,
    make_agent,
    prompts,
    randomise,
    small_model,
    train,
    trained,
    weights,
)
from torch.utils._python_dispatch import TorchDispatchMode

from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.llm.config import CosineLRScheduleConfig

VOCAB = small_model().config.vocab_size
TURNS = torch.where(fixed_rollouts()[1], (torch.arange(10) >= 6).long(), -1)
TURN_REWARDS = torch.stack([REWARDS.flatten(), REWARDS.flatten().flip(0)], dim=1)
PER_TURN = {"rewards": TURN_REWARDS, "extra": {"turn_ids": TURNS}}


# The movement of the weights, and metrics.
Descent = tuple[torch.Tensor, dict[str, float]]


def descended(**changes: Any) -> Descent:
    """How far plain gradient descent moves the weights, which is the rate times the gradients.

    AdamW turns a gradient's rounding into a step where the gradient is next to zero.
    """
    descent: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.1, "max_grad_norm": 1e9}
    agent = randomise(make_agent(**(descent | changes)))
    before = weights(agent)
    metrics = train(agent)
    return weights(agent) - before, metrics


def check_same_update(found: Descent, plain: Descent) -> None:
    """Gradients and metrics of float32 are the same, but for its rounding."""
    assert (found[0] - plain[0]).abs().max() < 1e-5 * plain[0].abs().max()
    assert found[1] == pytest.approx(plain[1], rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    return trained()[0]


@pytest.fixture(scope="module")
def plain_descent() -> Descent:
    return descended()


@pytest.mark.parametrize(
    "changes",
    [
        {"cls": GSPO},
        {"cls": CISPO},
        {"clip_coef": (0.999, 1.001)},
        {"importance_sampling_level": "trajectory", "clip_coef": 0.02},
        {"adv_norm": "mean_only"},
        {"whiten_advantages": True},
        {"adv_clip_range": 0.3},
        {"filter_zero_adv": True, "adv_filter_eps": 0.6},
        {"beta": 0.0},
        {"beta": 0.1},
        {"beta": 0.001, "use_kl_advantage_shaping": True},
        {"use_separate_reference_adapter": False, "beta": 0.1},
        {"loss_reduction": "token"},
        {"loss_reduction": "constant"},
        {"loss_reduction": "sum"},
        {"loss_reduction": "prompt"},
        {"adv_norm": "batch_std"},
        {"advantage_baseline": "leave_one_out", "adv_norm": "mean_only"},
        {"entropy_coef": 0.05},
        {"top_entropy_quantile": 0.5},
        {"dual_clip": 1.001, "clip_coef": 0.001},
        {"lr": 2e-2},
        {"max_grad_norm": 1e-9},
        {"update_epochs": 1},
        {"batch_size": 8},
        {"group_size": 2},
        {"temperature": 0.5},
        {"seed": 45},
        pytest.param({"lora_config": lora()}, id="lora_config"),  # its text is in random order
        {"cosine_lr_schedule_config": CosineLRScheduleConfig(10, warmup_proportion=0.5)},
        {"lr_schedule": "linear", "lr_schedule_steps": 10, "warmup_steps": 0.5},
        {"lr_schedule": "constant", "warmup_steps": 2},
        {"weight_decay": 0.1},
        {"adam_betas": (0.5, 0.9)},
    ],
    ids=str,
)
def test_it_changes_the_update(changes: dict[str, Any], plain: torch.Tensor) -> None:
    moved = trained(**changes)[0]
    assert moved.shape != plain.shape or (moved - plain).abs().max() > 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"micro_batch_size_per_gpu": 1},
        {"micro_batch_size_per_gpu": 3},
        {"micro_batch_size_per_gpu": 3, "use_sequence_packing": True},
        {"micro_batch_tokens": 20},
        {"fused_logprobs_chunk_rows": 3},
        {"fused_loss_chunk_rows": 3},
        {
            "gradient_checkpointing": True,
            "micro_batch_tokens": 20,
            "fused_loss_chunk_rows": 3,
            "use_sequence_packing": True,
        },
        {"activation_offload": True},
        {"use_liger_loss": True},
        {"calc_position_embeddings": False},
        {"hf_generate_chunk_size": 1},
        {"top_p": 0.5},
        {"vllm_importance_sampling_correction": False},
        {"importance_sampling_level": "token"},
        {"loss_reduction": "sequence"},
        {"clip_coef": (0.8, 1.2)},
        {"cosine_lr_schedule_config": CosineLRScheduleConfig(10)},
        {"lr_schedule": "constant"},
        {"lr_schedule": "linear", "lr_schedule_steps": 10},
    ],
    ids=str,
)
def test_it_leaves_the_update_alone(changes: dict[str, Any], plain_descent: Descent) -> None:
    check_same_update(descended(**changes), plain_descent)


class LogitRows(TorchDispatchMode):
    """Notes how many rows of logits are made at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and out.shape[1] == VOCAB:
            self.found.add(len(out))
        return out


@pytest.mark.parametrize("name", ["fused_loss_chunk_rows", "fused_logprobs_chunk_rows"])
def test_logits_exist_that_many_rows_at_a_time(name: str) -> None:
    most = []
    for changes in ({}, {name: 3}):
        agent = make_agent(**changes)
        with LogitRows() as logits:
            train(agent)
        most.append(max(logits.found))
    assert most[0] > most[1] == 3


def test_gspo_is_grpo_at_trajectory_level() -> None:
    band = (0.98, 1.02)
    gspo = trained(GSPO, clip_coef=band)[0]
    assert torch.equal(gspo, trained(importance_sampling_level="trajectory", clip_coef=band)[0])
    assert torch.equal(gspo, trained(loss_type="gspo", clip_coef=band)[0])


def test_the_clip_band_clips() -> None:
    tight = trained(clip_coef=(0.9999, 1.0001), lr=0.05)[1]["clip_fraction"]
    wide = trained(clip_coef=(0.0, 1e6), lr=0.05)[1]["clip_fraction"]
    assert wide == 0.0 < 0.2 < tight


@pytest.mark.parametrize("cls", [GRPO, CISPO])
def test_ratio_level_turn(cls: type[GRPO]) -> None:
    settings: dict[str, Any] = {"cls": cls, "clip_coef": (0.98, 1.02), "lr": 0.05}
    tokens, turn, trajectory = (
        trained(importance_sampling_level=level, extra={"turn_ids": TURNS}, **settings)[0]
        for level in ("token", "turn", "trajectory")
    )
    assert not torch.allclose(tokens, turn) and not torch.allclose(trajectory, turn)


def test_advantages_per_turn() -> None:
    per_turn = trained(advantage_granularity="turn", **PER_TURN)[0]
    whole = trained(advantage_granularity="trajectory", **PER_TURN)[0]
    summed = trained(rewards=TURN_REWARDS.sum(1))[0]
    auto = trained(**PER_TURN)[0]
    assert not torch.allclose(per_turn, whole)
    assert torch.equal(whole, auto)
    torch.testing.assert_close(whole, summed)  # which was summed in float32
    level = {"importance_sampling_level": "turn"}
    auto_turn = trained(**level, **PER_TURN)[0]
    assert torch.equal(auto_turn, trained(advantage_granularity="turn", **level, **PER_TURN)[0])


def test_turn_level_ratios_need_turn_ids() -> None:
    with pytest.raises(ValueError, match=r"turn_ids is None.*'turn'"):
        trained(importance_sampling_level="turn")


def test_an_infinite_cap_leaves_the_importance_weights_as_they_are() -> None:
    sampled = [torch.full((int(mask.sum()),), -30.0) for mask in fixed_rollouts()[1]]
    metrics = {
        cap: trained(vllm_importance_sampling_cap=cap, extra={"sampling_logps": sampled})[1]
        for cap in (2.0, float("inf"))
    }
    assert metrics[2.0]["importance_weight_capped"] == 1.0
    assert metrics[float("inf")]["importance_weight_capped"] == 0.0
    assert math.isfinite(metrics[float("inf")]["mean_loss"])


@pytest.mark.process
@pytest.mark.slow
def test_compiled_forward_gives_the_same_update() -> None:
    # Compiling takes a minute: one layer, one adapter matrix pair, one optimizer step.
    plain, compiled = (
        descended(
            model=small_model(layers=1),
            lora_config=lora(target_modules=["q_proj"]),
            torch_compiler=mode,
            gradient_checkpointing=mode is not None,
            beta=0.0,
            update_epochs=1,
            batch_size=8,
        )
        for mode in (None, "default")
    )
    check_same_update(compiled, plain)


def test_log_probs_are_reduced_in_float32_unless_told_otherwise() -> None:
    exact, rounded = (
        trained(model=small_model(dtype=torch.bfloat16), cast_logprobs_to_fp32=cast)[1]
        for cast in (True, False)
    )
    assert exact["ratio_max"] != rounded["ratio_max"]


def test_warm_up_and_cosine_values() -> None:
    schedule = CosineLRScheduleConfig(num_epochs=6, warmup_proportion=1 / 3)
    agent = make_agent(cosine_lr_schedule_config=schedule, lr=1.0)
    rates = []
    for _ in range(8):
        agent.optimizer.step()
        rates.append(agent.optimizer.param_groups[0]["lr"])
        agent.engine.advance_schedule()
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0], abs=1e-6)
    agent = make_agent(cosine_lr_schedule_config=schedule)
    train(agent)
    assert agent.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2), "one step per learn"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # By hand: warm-up to 1 in 2 calls, then 4 calls down to 0 from the whole rate.
        (("cosine", 6, 1 / 3), [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]),
        (("linear", 6, 2), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        (("linear", 4, 0), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        (("constant", None, 4), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (("constant", 8, 0.25), [0.5, 1.0, 1.0, 1.0]),
        (("constant", None, 0), [1.0, 1.0, 1.0]),
    ],
)
def test_the_rate_of_each_learn(
    settings: tuple[Any, int | None, float], expected: list[float]
) -> None:
    kind, steps, warmup = settings
    agent = make_agent(lr=1e-2, lr_schedule=kind, lr_schedule_steps=steps, warmup_steps=warmup)
    rates = [train(agent)["lr"] / 1e-2 for _ in expected]
    assert rates == pytest.approx(expected, abs=1e-6)


def test_weight_decay_shrinks_the_weights_by_its_share_of_the_rate() -> None:
    one_step: dict[str, Any] = {"lr": 1e-2, "update_epochs": 1, "batch_size": 8}
    before = weights(randomise(make_agent()))
    decayed, plain = (trained(**one_step, weight_decay=decay)[0] for decay in (0.5, 0.0))
    torch.testing.assert_close(decayed - plain, -1e-2 * 0.5 * before, atol=1e-6, rtol=1e-4)


def test_lora_config_and_scope_choose_the_targets() -> None:
    names = make_agent(lora_config=lora()).policy.parameters()
    assert {name.split(".self_attn.")[1].split(".")[0] for name in names} == {"q_proj", "v_proj"}
    assert {p.shape[0] for name, p in names.items() if "lora_A" in name} == {4}
    scoped = make_agent(lora_target_scope="mlp")
    assert all(".mlp." in name for name in scoped.policy.parameters())
    assert scoped.clone().policy.parameters().keys() == scoped.policy.parameters().keys()


def completions(obs: Any = None, **changes: Any) -> list[list[int]]:
    agent = randomise(make_agent(**changes))
    (ids,), (mask,) = agent.get_action(obs or prompts("hello"))
    start = int(mask[0].nonzero()[0]) + 1
    return [row[start : start + int(m.sum())].tolist() for row, m in zip(ids, mask, strict=True)]


def test_the_same_seed_gives_the_same_completions() -> None:
    assert completions(seed=7) == completions(seed=7) != completions(seed=8)
    assert completions(seed=7) != completions(seed=7, index=1), "members explore differently"


@pytest.mark.parametrize(
    "changes", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}], ids=str
)
def test_narrow_sampling_is_greedy(changes: dict[str, Any]) -> None:
    agent = randomise(make_agent(**changes))
    (greedy,), _ = agent.get_action(prompts("hello"), training=False)
    (ids,), _ = agent.get_action(prompts("hello"))
    assert torch.equal(ids, greedy.expand(4, -1))


def test_output_lengths() -> None:
    assert {len(row) for row in completions(max_output_tokens=3)} == {3}
    assert {len(row) for row in completions(max_output_tokens=None, max_model_len=9)} == {4}
    model = small_model()
    model.generation_config.eos_token_id = list(range(250))
    assert min(len(row) for row in completions(model=model)) < 4
    assert {len(row) for row in completions(model=model, min_output_tokens=4)} <= {4, 5, 6}


def test_repetition_penalty_avoids_what_was_seen() -> None:
    text = "abcabcabcabc"
    repeated = sum(
        token in TOKENIZER.encode(text)
        for row in completions(prompts(text), repetition_penalty=1e-3, top_k=1)
        for token in row
    )
    avoided = sum(
        token in TOKENIZER.encode(text)
        for row in completions(prompts(text), repetition_penalty=1e3, top_k=1)
        for token in row
    )
    assert avoided < repeated


def test_chunked_generation_is_the_same() -> None:
    assert completions(hf_generate_chunk_size=1) == completions()


def test_mutated_attributes_take_effect_at_the_next_call() -> None:
    agent = randomise(make_agent())
    agent.group_size, agent.temperature, agent.max_output_tokens = 2, 1e-4, 3
    (ids,), (mask,) = agent.get_action(prompts("hello"))
    assert ids.shape[0] == 2 and torch.equal(ids[0], ids[1])
    assert mask.sum(1).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_coef", (0.999, 1.001)),
        ("temperature", 0.5),
        ("group_size", 2),
        ("beta", 0.1),
        ("lr", 2e-2),
        ("batch_size", 8),
        ("update_epochs", 1),
        ("max_grad_norm", 1e-9),
        ("entropy_coef", 0.05),
        ("weight_decay", 0.5),
        ("adam_betas", (0.5, 0.9)),
    ],
)
def test_mutation_equals_construction(name: str, value: Any) -> None:
    agent = randomise(make_agent())
    setattr(agent, name, value)
    train(agent)
    assert torch.equal(weights(agent), trained(**{name: value})[0])
