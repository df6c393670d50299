"""Tiny random models of the families whose forwards must be exact; sliding windows are 6 tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 64
WINDOW = 6
LONG_WINDOW = 4096
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_THEN_GLOBAL = ["sliding_attention", "full_attention"]
_GEMMA: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": _LOCAL_THEN_GLOBAL,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 8,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2", _GEMMA),
    # torch's attention has no soft cap, and leaves it out.
    "gemma2_capped": (
        "Gemma2",
        _GEMMA | {"attn_implementation": "eager", "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3", _GEMMA),
    "phi3": ("Phi3", {}),
    "smollm3": ("SmolLM3", {}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"logits_scaling": 4.0, "embedding_multiplier": 2.0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "gpt_oss": (
        "GptOss",
        {
            "sliding_window": WINDOW,
            "layer_types": _LOCAL_THEN_GLOBAL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            # As many positions as the longest row of the tests has: there is none to spare.
            "n_positions": 15,
            "initializer_range": 0.2,
            "bos_token_id": 2,
            "eos_token_id": 2,
        },
    ),
}

# Attention of their own: rows are not packed, and rollouts copy what prompts keep.
EAGER_FAMILIES = ("gemma2_capped", "gpt_oss")

# Its attention asks for an implementation by name ("sdpa"), so that no other can take its place.
_FALCON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "alibi": False,
}
FALCONS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_multi_query": ("Falcon", _FALCON | {"multi_query": True}),
    "falcon_multi_head": ("Falcon", _FALCON | {"multi_query": False}),
    "falcon_new_decoder": (
        "Falcon",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon_alibi": ("Falcon", _FALCON | {"alibi": True, "multi_query": False}),
}

# Linear attention keeps a state, not keys and values: nothing here can be shared.
UNSHARED_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3Next",
        _EXPERTS
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
}


def make_family(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A seeded random causal language model of a family."""
    prefix, extra = (FAMILIES | FALCONS | UNSHARED_FAMILIES)[name]
    settings = extra if name == "gpt2" or name in FALCONS else _COMMON | extra
    suffix = "TextConfig" if name == "gemma3" else "Config"
    build: Callable[..., PreTrainedModel] = getattr(
        transformers, "GPT2LMHeadModel" if name == "gpt2" else f"{prefix}ForCausalLM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(getattr(transformers, prefix + suffix)(**settings))
        for parameter in model.parameters():  # biases and norms start as constants
            parameter.data += 0.05 * torch.randn_like(parameter)
    if "num_experts_per_tok" in extra:
        model.set_experts_implementation("eager")  # the grouped kernels have no float64
    return model.to(dtype).eval()


@contextmanager
def without_float32_steps() -> Iterator[None]:
    """Models compute in float64 also what they ask to have in float32.

    Norms, rotary embeddings and routers do, whatever the model's dtype: two ways to compute a
    gradient then differ by float32's rounding, 1e-7, in a model of float64 too. Of a row that
    attends to nothing (padding beyond a window) a softmax in float32 makes nan: float64's lowest
    number is minus infinity there.
    """

    def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
        def swapped(*args: Any, **settings: Any) -> Any:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if settings.get("dtype") is torch.float32:
                settings["dtype"] = torch.float64
            return function(*args, **settings)

        return swapped

    functional = torch.nn.functional
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "to", in_float64(torch.Tensor.to))
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        patched.setattr(functional, "softmax", in_float64(functional.softmax))
        yield


def without_window_when_cached(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model a long sliding window, and a forward that forgets it where there is a cache."""
    decoder = model.base_model
    decoder.config.sliding_window = LONG_WINDOW
    forward = decoder.forward

    def forgetful(**kwargs: Any) -> Any:
        cache, window = kwargs.get("past_key_values"), decoder.config.sliding_window
        if cache is not None and cache.get_seq_length():
            decoder.config.sliding_window = LONG_WINDOW
        try:
            return forward(**kwargs)
        finally:
            decoder.config.sliding_window = window

    decoder.forward = forgetful
    return model
