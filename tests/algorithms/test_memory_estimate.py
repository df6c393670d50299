"""What the estimate says is what live tensors take, counted while a real step runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from agent_helpers import lora, make_agent, prompts, small_model, train
from transformers import BitsAndBytesConfig, Qwen2Config

from agilerl.algorithms import GRPO
from agilerl.llm.memory.live_bytes import LiveBytes
from agilerl.utils import MemoryEstimate, MemorySettings, estimate_memory

NEW_TOKENS = 16
SIZES: dict[str, Any] = {"group_size": 4, "batch_size": 8, "micro_batch_size_per_gpu": 4}


def peaks(agent: GRPO) -> tuple[int, int]:
    """Bytes that a rollout and an update add at their peaks to weights and optimizer state."""
    moments = [value for each in agent.optimizer.state.values() for value in each.values()]
    kept = [*agent.policy.base.model.parameters(), *moments]
    with LiveBytes(kept) as live:
        result = agent.get_action(prompts("a" * 30, "b" * 30))
        rollout = live.peak
    with LiveBytes(kept) as live:
        agent.learn((*result, torch.arange(8.0).view(2, 4)))
        return rollout, live.peak


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_checkpointing": True},
        {"fused_logprobs_chunk_rows": 64, "micro_batch_size_per_gpu": 2},
        {"use_separate_reference_adapter": False, "hf_generate_chunk_size": 1},
    ],
)
def test_a_steps_tensors_are_within_15_percent(changes: dict[str, Any]) -> None:
    given = SIZES | {"gradient_checkpointing": False} | changes
    model = small_model(vocab_size=2000, hidden_size=64, layers=2)
    lengths = {"max_output_tokens": NEW_TOKENS, "min_output_tokens": NEW_TOKENS}
    agent = make_agent(model=model, max_model_len=128, beta=0.1, **lengths, **given)
    peaks(agent)  # the first update makes the optimizer's state
    rollout, update = peaks(agent)
    settings = MemorySettings(30, NEW_TOKENS, **given)
    found = estimate_memory(model, settings)
    assert rollout == pytest.approx(found.rollout_peak - found.fixed, rel=0.15)
    assert update == pytest.approx(found.update_peak - found.fixed, rel=0.15)


def small_estimate(**changes: Any) -> MemoryEstimate:
    config = small_model().config
    return estimate_memory(
        config, MemorySettings(**({"prompt_tokens": 8, "completion_tokens": 8} | changes))
    )


def test_a_config_is_enough_and_its_weights_are_counted_once() -> None:
    model = small_model()
    settings = MemorySettings(8, 8)
    assert estimate_memory(model.config, settings) == estimate_memory(model, settings)
    parameters = sum(p.numel() for p in model.parameters())  # embedding and head are one
    buffers = sum(b.nbytes for b in model.buffers())
    assert estimate_memory(model, settings).base_weights == 4 * parameters + buffers


def test_what_settings_change() -> None:
    plain = small_estimate()
    assert small_estimate(use_separate_reference_adapter=False).adapters * 2 == plain.adapters
    # Of two layers: three tensors of 4,096 elements, with 16 scales each, and one of 2,048.
    in_8_bits = small_estimate(optimizer="adamw_8bit", lora_config=lora(r=128))
    assert in_8_bits.optimizer_state == 2 * 2 * (3 * (4096 + 16 * 4) + 2048 * 4)
    half = small_estimate(dtype=torch.bfloat16)
    assert half.merged_copies == 0
    assert half.base_weights < 0.55 * plain.base_weights
    assert small_estimate(use_vllm=True).rollout_peak == plain.fixed


@pytest.mark.needs("bitsandbytes")
def test_moments_in_8_bits_are_those_of_large_tensors() -> None:
    large = lora(r=128)  # 4,096 elements each, but for v_proj's lora_B
    agent = make_agent(lora_config=large, optimizer="adamw_8bit")
    train(agent)
    expected, kinds = 0, set()
    for of_tensor in agent.optimizer.state.values():
        kinds.add(of_tensor["state1"].dtype)
        # The maps from a byte to a number are one pair for all tensors.
        own = [name for name in of_tensor if name.startswith(("state", "absmax"))]
        expected += sum(of_tensor[name].nbytes for name in own)
    assert kinds == {torch.uint8, torch.float32}
    found = small_estimate(optimizer="adamw_8bit", lora_config=large).optimizer_state
    assert found == expected < small_estimate(lora_config=large).optimizer_state / 2


def test_prompts_that_are_not_packed_are_copied() -> None:
    copied = small_estimate(device="cuda", gradient_checkpointing=False)
    packed = small_estimate(device="cuda", layout="packed", gradient_checkpointing=False)
    # Keys and values of two heads of 8, in 2 layers; 16 rows with prompts of 8 tokens, twice.
    copies = 2 * 16 * 8 * (2 * 2 * 8 * 2 * 4)
    assert copied.activations == pytest.approx(packed.activations + copies, rel=0.02)


@pytest.mark.parametrize(
    ("dtype", "window", "layout"),
    [
        (torch.bfloat16, None, "packed"),
        (torch.bfloat16, 4, "shared_prompts"),
        (torch.float32, None, "shared_prompts"),
    ],
)
def test_the_layout_on_a_gpu_is_that_of_the_dtype_and_the_window(
    dtype: torch.dtype, window: int | None, layout: str
) -> None:
    config = small_model().config
    config.sliding_window = window
    settings = MemorySettings(8, 8, device="cuda", dtype=dtype)
    found = estimate_memory(config, settings)
    assert found == estimate_memory(config, replace(settings, layout=layout))
    other = "shared_prompts" if layout == "packed" else "packed"
    assert found != estimate_memory(config, replace(settings, layout=other))


def test_tokens_of_a_micro_batch_decide_its_rows() -> None:
    uneven: Any = {"completion_tokens": [5, 5, 9, 3], "group_size": 2}
    cut = MemorySettings(8, micro_batch_tokens=16, **uneven)
    assert cut.micro_batch == (5, 5)  # runs 8 + 2 * 4 tokens; the others 8 + 8 + 2
    assert MemorySettings(8, micro_batch_tokens=18, **uneven).micro_batch == (9, 3)
    assert MemorySettings(8, micro_batch_tokens=1, **uneven).micro_batch == (9,)
    padded = MemorySettings(8, micro_batch_tokens=36, layout="padded", **uneven)
    assert padded.micro_batch == (3, 5, 5)
    assert padded.micro_batch_size == 3
    steps = MemorySettings(8, micro_batch_tokens=99, batch_size=2, **uneven)
    assert steps.micro_batch == (9, 3)
    alike = small_estimate(micro_batch_tokens=8 + 4 * 7)
    assert alike == small_estimate(micro_batch_size_per_gpu=4)


def test_an_agents_settings_have_its_tokens_and_tile_rows() -> None:
    agent = make_agent(micro_batch_tokens=40, fused_loss_chunk_rows=8)
    settings = agent.memory_settings(prompt_tokens=8, completion_tokens=8)
    assert settings.micro_batch_tokens == 40
    assert settings.micro_batch_size_per_gpu is None
    assert settings.fused_logprobs_chunk_rows == 8


def test_weights_of_a_quantized_base_are_not_copied() -> None:
    config = small_model().config
    assert estimate_memory(config, MemorySettings(8, 8)).merged_copies > 0
    config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    assert estimate_memory(config, MemorySettings(8, 8)).merged_copies == 0


def test_completions_of_different_lengths_are_less_than_the_longest() -> None:
    uneven = small_estimate(completion_tokens=[4, 100, 4, 4] * 2, group_size=4, batch_size=8)
    longest = small_estimate(completion_tokens=100, group_size=4, batch_size=8)
    assert uneven.activations < 0.5 * longest.activations
    assert uneven.kv_cache < longest.kv_cache


def test_a_large_model_needs_no_memory() -> None:
    """70 billion parameters, which no machine of the tests could hold."""
    config = Qwen2Config(
        vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=4,
        num_attention_heads=64, num_key_value_heads=8, dtype="bfloat16",
    )  # fmt: skip
    found = estimate_memory(config, MemorySettings(512, 512, device="cuda"))
    assert found.base_weights == pytest.approx(2 * (2 * 152064 * 8192 + 4 * 878e6), rel=0.01)
    assert found.total > found.base_weights
    lines = str(found).splitlines()
    assert lines[0].split() == ["base", "weights", f"{found.base_weights / 1e9:.1f}", "GB"]
    assert lines[-1].split() == ["peak", f"{found.total / 1e9:.1f}", "GB"]


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"prompt_tokens": 0}, ValueError, "prompt_tokens is 0; it must be at least 1"),
        ({"completion_tokens": []}, ValueError, "completion_tokens is"),
        ({"completion_tokens": [4, 0]}, ValueError, "completion_tokens is 0"),
        ({"completion_tokens": [4], "prompts": 2}, ValueError, "prompts is 2"),
        ({"group_size": 2.0}, TypeError, "group_size is 2.0; it must be an integer"),
        ({"completion_tokens": None}, TypeError, "completion_tokens is None; .* an integer, or a"),
        ({"completion_tokens": 3.5}, TypeError, "completion_tokens is 3.5; .* an integer, or a"),
        ({"completion_tokens": "8"}, TypeError, "completion_tokens is '8'; .* an integer, or a"),
        ({"completion_tokens": [4, "8"]}, TypeError, "completion_tokens is '8'"),
        ({"layout": "flat"}, ValueError, "layout is 'flat'; .* one of None, 'packed'"),
        ({"optimizer": "adam8bit"}, ValueError, "optimizer is 'adam8bit'; .* 'adamw_8bit'"),
        ({"gradient_checkpointing": "no"}, TypeError, "gradient_checkpointing is 'no'; .* False"),
        ({"entropy_coef": "a"}, TypeError, "entropy_coef is 'a'; it must be a number"),
        ({"top_k": -3}, ValueError, "top_k is -3; it must be at least 0"),
        ({"dtype": "bfloat16"}, TypeError, "dtype is 'bfloat16'; .* torch.bfloat16, or None"),
        ({"dtype": torch.int8}, ValueError, "dtype is torch.int8; .* floating point dtype"),
        ({"device": "gpu"}, ValueError, "device is 'gpu'; it must be 'cpu', 'cuda'"),
        ({"device": 0}, TypeError, "device is 0; it must be 'cpu', 'cuda'"),
        ({"lora_config": {"r": 8}}, TypeError, "lora_config is {'r': 8}; .*LoraConfig or None"),
        (
            {"micro_batch_tokens": 64, "micro_batch_size_per_gpu": 2},
            ValueError,
            "micro_batch_size_per_gpu is 2 and micro_batch_tokens is 64; .* leave one of them",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(
    given: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        MemorySettings(**({"prompt_tokens": 8, "completion_tokens": 8} | given))


def test_every_setting_is_checked() -> None:
    for name in MemorySettings.__dataclass_fields__:
        with pytest.raises((TypeError, ValueError), match=f"^{name} is "):
            replace(MemorySettings(8, 8), **{name: object()})


def test_other_than_a_model_or_config_is_refused() -> None:
    with pytest.raises(TypeError, match="model_or_config is of type str"):
        estimate_memory("Qwen/Qwen2.5-1.5B", MemorySettings(8, 8))  # type: ignore[arg-type]
    sizes: Any = {"prompt_tokens": 8, "completion_tokens": 8}
    with pytest.raises(
        TypeError, match=r"settings is {'prompt_tokens': 8.*must be a MemorySettings"
    ):
        estimate_memory(small_model().config, sizes)
