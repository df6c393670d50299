"""Checks of the constructor's arguments: every bad value is named at once, with what is allowed."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from agilerl.algorithms.core.build_policy import check_network
from agilerl.algorithms.core.registry import HyperparameterConfig
from agilerl.checks import COUNT, FLAG, OPTIONAL_COUNT, InstanceOf, Number, OneOf
from agilerl.llm.config import CosineLRScheduleConfig
from agilerl.llm.engine.accelerator_config import (
    check_accelerator,
    rank_batch_size,
    settings_without_effect,
)
from agilerl.llm.losses import LOSS_TABLE, clip_band

logger = logging.getLogger(__name__)

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
REDUCTIONS = ("sequence", "token", "constant", "sum")
RATIO_LEVELS = ("token", "turn", "trajectory")
GRANULARITIES = ("auto", "trajectory", "turn")

# Accepted by the signature, not built yet: only the default is possible.
NOT_YET = {
    "use_vllm": False,
    "vllm_config": None,
    "use_liger_loss": False,
    "fused_loss_chunk_rows": None,
    "use_sequence_packing": False,
    "activation_offload": False,
    "quantization_config": None,
}


def _clip_coef(name: str, value: Any) -> None:
    pair = isinstance(value, tuple | list)
    if pair and len(value) != 2:
        raise ValueError(f"{name} is {value!r}; a tuple must be the band (lo, hi)")
    for part in value if pair else (value,):
        if not isinstance(part, Real) or isinstance(part, bool):
            raise TypeError(f"{name} is {value!r}; it must be a number or a tuple (lo, hi)")
    clip_band(value)


def _pad_token(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(
            f"{name} is {value!r}; it must be a string: tokenizer.pad_token, or "
            "tokenizer.eos_token where the tokenizer has no pad token"
        )


def _pad_token_id(name: str, value: Any) -> None:
    if value is None:
        raise ValueError(
            f"{name} is None: this tokenizer has no pad token; pass tokenizer.eos_token_id (and "
            "tokenizer.eos_token as pad_token)"
        )
    Number(0, integer=True)(name, value)


def _text(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be a string or None")
    if value == "":
        raise ValueError(f"{name} is ''; it must be a non-empty string or None")


def _actor_network(name: str, value: Any) -> None:
    if value is not None:
        check_network(value)


def _device(name: str, value: Any) -> None:
    remedy = "it must be 'cpu', 'cuda', 'cuda:<n>' or a torch.device"
    if not isinstance(value, str | torch.device):
        raise TypeError(f"{name} is {value!r}; {remedy}")
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"{name} is {value!r}; {remedy}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is {str(value)!r}; {remedy}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{name} is {str(value)!r}, but torch sees {torch.cuda.device_count()} CUDA devices; "
            "it must be one of them, or 'cpu'"
        )


def _hp_config(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, HyperparameterConfig):
        raise TypeError(f"{name} is {value!r}; it must be a HyperparameterConfig or None")
    for parameter in value:
        rule = RULES.get(parameter)
        if not isinstance(rule, Number) and rule is not _clip_coef:
            allowed = [n for n, r in RULES.items() if isinstance(r, Number) or r is _clip_coef]
            raise ValueError(
                f"{name} names {parameter!r}, which is no hyperparameter that can be mutated; it "
                f"must be one of {', '.join(allowed)}"
            )
        for limit in (value[parameter].min, value[parameter].max):
            rule(f"limit of {parameter} in {name}", value[parameter].dtype(limit))


RULES: dict[str, Callable[[str, Any], None]] = {
    "pad_token_id": _pad_token_id,
    "pad_token": _pad_token,
    "model_name": _text,
    "actor_network": _actor_network,
    "model_config": InstanceOf(dict, "a dict of keyword arguments for from_pretrained"),
    "hp_config": _hp_config,
    "index": Number(0, integer=True),
    "batch_size": COUNT,
    "beta": Number(0),
    "lr": Number(0, open_low=True),
    "clip_coef": _clip_coef,
    "max_grad_norm": Number(0, open_low=True),
    "update_epochs": COUNT,
    "group_size": COUNT,
    "temperature": Number(0, open_low=True),
    "repetition_penalty": Number(0, open_low=True),
    "top_p": Number(0, 1, open_low=True),
    "top_k": Number(0, integer=True, optional=True),
    "min_p": Number(0, 1),
    "use_memory_efficient_params": FLAG,
    "calc_position_embeddings": FLAG,
    "micro_batch_size_per_gpu": OPTIONAL_COUNT,
    "max_output_tokens": OPTIONAL_COUNT,
    "min_output_tokens": Number(0, integer=True, optional=True),
    "max_model_len": Number(2, integer=True, optional=True),
    "hf_generate_chunk_size": OPTIONAL_COUNT,
    "lora_config": InstanceOf(LoraConfig, "a peft.LoraConfig"),
    "cosine_lr_schedule_config": InstanceOf(CosineLRScheduleConfig, "a CosineLRScheduleConfig"),
    "accelerator": check_accelerator,
    "device": _device,
    "wrap": FLAG,
    "clone": FLAG,
    "use_vllm": FLAG,
    "seed": Number(0, 2**63 - 1, integer=True),
    "gradient_checkpointing": FLAG,
    "torch_compiler": OneOf((None, *COMPILE_MODES)),
    "use_liger_loss": FLAG,
    "use_kl_advantage_shaping": FLAG,
    "adv_norm": OneOf(("mean_std", "mean_only")),
    "loss_type": OneOf(tuple(LOSS_TABLE)),
    "importance_sampling_level": OneOf((None, *RATIO_LEVELS)),
    "advantage_granularity": OneOf(GRANULARITIES),
    "action_granularity": OneOf((None, *GRANULARITIES)),
    "use_separate_reference_adapter": FLAG,
    "whiten_advantages": FLAG,
    "adv_clip_range": Number(0, open_low=True, optional=True),
    "filter_zero_adv": FLAG,
    "adv_filter_eps": Number(0),
    "reduce_memory_peak": FLAG,
    "use_fused_linear_logprobs": FLAG,
    "cast_logprobs_to_fp32": FLAG,
    "fused_logprobs_chunk_rows": OPTIONAL_COUNT,
    "activation_offload": FLAG,
    "lora_target_scope": _text,
    "fused_loss_chunk_rows": OPTIONAL_COUNT,
    "vllm_importance_sampling_correction": FLAG,
    "vllm_importance_sampling_cap": Number(0, open_low=True),
    "use_sequence_packing": FLAG,
    "loss_reduction": OneOf((None, *REDUCTIONS)),
}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check a constructor's arguments by name.

    Raises:
        TypeError: For a wrong type.
        ValueError: For a value out of range, or two that contradict each other.
        NotImplementedError: For an option whose machinery is not there yet.
    """
    for name, rule in RULES.items():
        rule(name, arguments[name])
    for name, default in NOT_YET.items():
        if arguments[name] != default:
            raise NotImplementedError(
                f"{name}={arguments[name]!r} is not supported yet; leave it at {default!r}"
            )
    _check_pairs(arguments)
    for name in ("reduce_memory_peak", "use_fused_linear_logprobs"):
        if arguments[name]:
            logger.info(
                "%s has no effect: log-probs are always computed in memory-bounded tiles", name
            )


def stacklevel_of_caller() -> int:
    """The ``stacklevel`` that makes a warning point at the first frame outside this package."""
    package = str(Path(__file__).parents[2])
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level


def _check_pairs(arguments: Mapping[str, Any]) -> None:
    """Values that contradict each other."""
    if arguments["actor_network"] is None and arguments["model_name"] is None:
        raise ValueError(
            "actor_network and model_name are both None; pass actor_network (a causal language "
            "model) or model_name (a name or path to load)"
        )
    rank_batch_size(arguments["batch_size"], arguments["accelerator"])
    least, most = arguments["min_output_tokens"], arguments["max_output_tokens"]
    if least is not None and most is not None and least > most:
        raise ValueError(
            f"min_output_tokens is {least}; it must be at most max_output_tokens, which is {most}"
        )
    if arguments["loss_reduction"] == "constant" and most is None:
        raise ValueError(
            "loss_reduction is 'constant', which divides by max_output_tokens, but that is None; "
            "it must be set"
        )
    ignored = settings_without_effect(arguments["accelerator"])
    if ignored and not arguments["clone"]:
        warnings.warn(
            f"these settings of accelerator have no effect: {'; '.join(ignored)}",
            stacklevel=stacklevel_of_caller(),
        )
    level = arguments["importance_sampling_level"]
    # A clone would only repeat it.
    if arguments["loss_type"] == "gspo" and level in ("token", "turn") and not arguments["clone"]:
        warnings.warn(
            f"importance_sampling_level={level!r} has no effect with loss_type 'gspo', which pools "
            "the ratio over the trajectory",
            stacklevel=stacklevel_of_caller(),
        )
