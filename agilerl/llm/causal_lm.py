"""Reading a causal language model: its head, its end-of-sequence ids, its context length."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from agilerl.checks import require
from agilerl.llm.engine.partition_checks import full_shape

# Shorter than the rows of all probes.
PROBED_WINDOW = 3


@dataclass(frozen=True)
class LogitHead:
    """How a model turns hidden states into logits."""

    module: nn.Module
    """The output embedding, as it stands in the model (possibly wrapped by PEFT)."""
    weight: torch.Tensor | None
    """``(V, D)`` weight when the head is a frozen plain linear layer, else None."""
    bias: torch.Tensor | None
    scale: float = 1.0
    """Factor on the logits: Cohere's ``logit_scale``, one over Granite's ``logits_scaling``."""
    softcap: float | None = None
    """``cap * tanh(logits / cap)`` (Gemma's ``final_logit_softcapping``)."""
    vocab_size: int = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(N, D)`` hidden states to ``(N, V)`` logits, before any temperature."""
        if self.weight is None:
            logits = self.module(hidden)
        else:
            logits = nn.functional.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def find_head(model: PreTrainedModel) -> LogitHead:
    """Read off a causal LM how it makes logits: output embedding, scale and soft cap."""
    module = model.get_output_embeddings()
    if module is None:
        raise ValueError(
            f"{type(model).__name__} has no output embedding; pass a causal language model"
        )
    config = model.config.get_text_config()
    scale = 1.0
    if getattr(config, "logit_scale", None) is not None:
        scale *= config.logit_scale
    if getattr(config, "logits_scaling", None) is not None:
        scale /= config.logits_scaling
    plain = type(module) is nn.Linear and not module.weight.requires_grad
    return LogitHead(
        module=module,
        weight=module.weight if plain else None,
        bias=module.bias if plain else None,
        scale=scale,
        softcap=getattr(config, "final_logit_softcapping", None),
        vocab_size=config.vocab_size,
    )


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Compare, on a few tokens, the head as :func:`find_head` read it with the model's own logits.

    Raises:
        ValueError: If they differ, or the model cannot be run.
    """
    name = type(model).__name__
    require(
        model.base_model is not model,  # Llama 4
        f"{name} is not supported: its decoder is not found, as its base_model_prefix "
        f"{model.base_model_prefix!r} is not a submodule",
    )
    ids = torch.arange(1, 5, device=next(model.parameters()).device)[None]
    ids = ids % model.config.get_text_config().vocab_size
    try:
        expected = model(input_ids=ids, use_cache=False).logits[0]
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        made = find_head(model).logits(hidden)
    except Exception as error:  # an unknown architecture may raise anything
        raise ValueError(
            f"{name} is not supported: it cannot be run as decoder and head ({error!r})"
        ) from error
    require(
        equal_up_to_rounding(made, expected),
        f"{name} makes logits from hidden states in a way that is not supported: "
        "output embedding, logit scale and soft cap do not give model(...).logits",
    )


def check_pad_token(pad_token_id: int, model: PreTrainedModel) -> None:
    """Refuse a padding id that the model has no embedding for.

    Raises:
        ValueError: The id is too large.
    """
    rows = full_shape(model.get_input_embeddings().weight)[0]
    if pad_token_id >= rows:
        raise ValueError(
            f"pad_token_id is {pad_token_id}, but the model embeds ids 0 to {rows - 1} only; pass "
            "tokenizer.eos_token_id, or call model.resize_token_embeddings first"
        )


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The ids that end a completion, by the generation config, else by the model's."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos = model.config.get_text_config().eos_token_id if eos is None else eos
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)


def context_length(model: PreTrainedModel) -> int:
    """The longest row the model's config allows, in tokens.

    Raises:
        ValueError: The config does not say.
    """
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if length is None:
        raise ValueError(
            "max_model_len is None and the model's config names no context length; it must be set"
        )
    return int(length)


def equal_up_to_rounding(made: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results of the same computation differ by no more than rounding explains.

    Relative to the largest value; by the dtype of ``expected``. NaN equals nothing.
    """
    if made.shape != expected.shape:
        return False
    tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    largest = expected.abs().max().clamp(min=1e-6)
    return bool((made - expected).abs().max() <= tolerance * largest)


@contextlib.contextmanager
def short_windows(decoder: nn.Module) -> Iterator[None]:
    """Within it, sliding windows are ``PROBED_WINDOW`` tokens, which a probe's rows go beyond.

    A model's own may be thousands. Masks follow the config; kernels that take the window from a
    layer's attribute follow that.
    """
    owners: dict[int, Any] = {id(module): module for module in decoder.modules()}
    owners[id(decoder.config)] = decoder.config
    windows = [
        (owner, window)
        for owner in owners.values()
        if isinstance(window := owner.__dict__.get("sliding_window"), int)
        and window > PROBED_WINDOW
    ]
    for owner, _ in windows:
        owner.sliding_window = PROBED_WINDOW
    try:
        yield
    finally:
        for owner, window in windows:
            owner.sliding_window = window
