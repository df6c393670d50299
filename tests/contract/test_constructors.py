"""Names, order and defaults of the constructors' arguments, written out from the contract."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.testing import tiny_model

REQUIRED = inspect.Parameter.empty
CONTRACT: list[tuple[str, Any]] = [
    ("pad_token_id", REQUIRED), ("pad_token", REQUIRED), ("model_name", None),
    ("actor_network", None), ("model_config", None), ("hp_config", None), ("index", 0),
    ("batch_size", 16), ("beta", 0.001), ("lr", 5e-7), ("clip_coef", 0.2), ("max_grad_norm", 0.1),
    ("update_epochs", 1), ("group_size", 8), ("temperature", 0.9), ("repetition_penalty", 1.0),
    ("top_p", 0.95), ("top_k", 50), ("min_p", 0.0), ("use_memory_efficient_params", True),
    ("calc_position_embeddings", True), ("micro_batch_size_per_gpu", None),
    ("max_output_tokens", None), ("min_output_tokens", None), ("max_model_len", 1024),
    ("hf_generate_chunk_size", None), ("lora_config", None), ("cosine_lr_schedule_config", None),
    ("accelerator", None), ("device", "cpu"), ("wrap", True), ("clone", False),
    ("use_vllm", False), ("vllm_config", None), ("seed", 42), ("gradient_checkpointing", True),
    ("torch_compiler", None), ("use_liger_loss", False), ("use_kl_advantage_shaping", False),
    ("adv_norm", "mean_std"), ("loss_type", "grpo"), ("importance_sampling_level", None),
    ("advantage_granularity", "auto"), ("action_granularity", None),
    ("use_separate_reference_adapter", True), ("whiten_advantages", False),
    ("adv_clip_range", None), ("filter_zero_adv", False), ("adv_filter_eps", 0.0),
    ("reduce_memory_peak", False), ("use_fused_linear_logprobs", False),
    ("cast_logprobs_to_fp32", True), ("fused_logprobs_chunk_rows", None),
    ("quantization_config", None), ("activation_offload", False), ("lora_target_scope", None),
    ("fused_loss_chunk_rows", None), ("vllm_importance_sampling_correction", True),
    ("vllm_importance_sampling_cap", 2.0), ("use_sequence_packing", False),
    ("loss_reduction", None), ("stop_sequences", None), ("mask_truncated_completions", False),
    ("importance_anchor", "old"), ("importance_correction", "token_truncate"),
    ("importance_floor", None), ("dual_clip", None), ("advantage_baseline", "group_mean"),
    ("entropy_coef", 0.0), ("top_entropy_quantile", None),
    ("optimizer", "adamw"), ("weight_decay", 0.0), ("adam_betas", (0.9, 0.999)),
    ("lr_schedule", None), ("lr_schedule_steps", None), ("warmup_steps", 0),
    ("micro_batch_tokens", None),
]  # fmt: skip
PINNED = {GSPO: "gspo", CISPO: "cispo"}


def arguments(cls: type[GRPO]) -> list[tuple[str, Any]]:
    return [(name, p.default) for name, p in inspect.signature(cls).parameters.items()]


def test_grpo() -> None:
    assert arguments(GRPO) == CONTRACT


@pytest.mark.parametrize("cls", PINNED)
def test_gspo_and_cispo_are_grpo_without_the_loss_type(cls: type[GRPO]) -> None:
    assert arguments(cls) == [pair for pair in CONTRACT if pair[0] != "loss_type"]


@pytest.mark.parametrize("cls", [GRPO, *PINNED])
def test_only_the_last_are_keyword_only(cls: type[GRPO]) -> None:
    kinds = {name: p.kind for name, p in inspect.signature(cls).parameters.items()}
    names = [name for name, _ in arguments(GRPO)]
    for name in names[names.index("loss_reduction") :]:
        assert kinds.pop(name) is inspect.Parameter.KEYWORD_ONLY
    assert set(kinds.values()) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize(("cls", "loss_type"), PINNED.items())
def test_the_loss_type_is_pinned(cls: type[GRPO], loss_type: str) -> None:
    model = tiny_model(hidden_size=32, layers=1)
    agent = cls(256, "<|pad|>", None, model)
    assert (agent.loss_type, agent.algo) == (loss_type, cls.__name__)
    assert agent.loss_config().loss_type == loss_type
    assert type(agent.clone()) is cls
    with pytest.raises(TypeError, match=rf"loss_type is 'grpo', but {cls.__name__} pins it"):
        cls(256, "<|pad|>", actor_network=model, loss_type="grpo")


@pytest.mark.parametrize("cls", [GRPO, *PINNED])
def test_unknown_and_missing_arguments(cls: type[GRPO]) -> None:
    with pytest.raises(TypeError, match="learning_rate"):
        cls(256, "<|pad|>", learning_rate=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="pad_token"):
        cls(pad_token_id=256)  # type: ignore[call-arg]
