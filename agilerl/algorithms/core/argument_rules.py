"""Rules of single constructor arguments that the checks of :mod:`agilerl.checks` do not cover."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from agilerl.checks import InstanceOf, Number, as_device, require, shorten
from agilerl.llm.losses import clip_band


def check_clip_coef(name: str, value: Any) -> None:
    """Refuse what is neither a clipping coefficient nor a band."""
    pair = isinstance(value, tuple | list)
    bounds = value if pair else (value,)
    require(not pair or len(value) == 2, f"{name} is {value!r}; a tuple must be the band (lo, hi)")
    require(
        all(isinstance(bound, Real) and not isinstance(bound, bool) for bound in bounds),
        f"{name} is {value!r}; it must be a number or a tuple (lo, hi)",
        TypeError,
    )
    clip_band(value, name)


def check_pad_token_id(name: str, value: Any) -> None:
    """Raise unless the value is a valid token id."""
    require(
        value is not None,
        f"{name} is None: this tokenizer has no pad token; pass tokenizer.eos_token_id (and "
        "tokenizer.eos_token as pad_token)",
    )
    Number(0, integer=True)(name, value)


def check_text(name: str, value: Any) -> None:
    """Raise unless the value is None or a non-empty string."""
    InstanceOf(str, "a string")(name, value)
    require(value != "", f"{name} is ''; it must be a non-empty string or None")


def check_texts(name: str, value: Any) -> None:
    """Raise unless the value is None, a non-empty string, or a list or tuple of such."""
    remedy = "it must be a list of non-empty strings, one such string, or None"
    require(
        value is None or isinstance(value, str | list | tuple),
        f"{name} is {shorten(value)}; {remedy}",
        TypeError,
    )
    for text in (value,) if isinstance(value, str) else value or ():
        require(isinstance(text, str), f"{name} holds {shorten(text)}; {remedy}", TypeError)
        require(text != "", f"{name} holds ''; {remedy}")


def check_device(name: str, value: Any) -> None:
    """Refuse what is no device of this machine."""
    device = as_device(name, value)
    count = torch.cuda.device_count()
    require(
        device.type == "cpu" or (device.index or 0) < count,
        f"{name} is {str(value)!r}, but torch sees {count} CUDA devices; it must be one of them, "
        "or 'cpu'",
    )


def check_network(name: str, value: Any) -> None:
    """Refuse what is not a causal language model.

    Raises:
        TypeError: It is no transformers or PEFT model.
        ValueError: It is an encoder-decoder, or has no language-model head.
    """
    if value is None:
        return
    hint = " (a name or path goes to model_name)" if isinstance(value, str) else ""
    require(
        isinstance(value, PreTrainedModel | PeftModel),
        f"{name} is of type {type(value).__name__}{hint}; it must be a causal language model: "
        "AutoModelForCausalLM.from_pretrained(...), or a PeftModel of one",
        TypeError,
    )
    model = value.get_base_model() if isinstance(value, PeftModel) else value
    kind = type(model).__name__
    require(
        not model.config.is_encoder_decoder,
        f"{name} is {kind}, an encoder-decoder; it must be a decoder-only model, as "
        "AutoModelForCausalLM loads it",
    )
    require(
        model.get_output_embeddings() is not None,
        f"{name} is {kind}, which has no language-model head; it must be a model with one, as "
        "AutoModelForCausalLM loads it",
    )
