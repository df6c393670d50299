"""Liger's fused layers (RMSNorm, rotary embedding, SwiGLU) in the forwards of an update.

Never its loss: the tiles of :mod:`agilerl.llm.logprobs` are a fused loss already, and a loss must
not depend on which kernels are installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from agilerl.checks import warn_once
from agilerl.llm.causal_lm import equal_up_to_rounding
from agilerl.llm.shared_base import SharedBase

logger = logging.getLogger(__name__)

_LAYERS = ("rope", "rms_norm", "swiglu", "geglu")
"""What is patched, by Liger's names; all else it offers stays off."""
_ABSENT = object()


@dataclass(frozen=True)
class _Change:
    """An attribute that Liger sets."""

    owner: Any
    """A layer, a class, or a Python module."""
    name: str
    before: Any
    after: Any

    def put(self, value: Any) -> None:
        if value is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


# By base; None: its layers run as they are.
_patches: WeakKeyDictionary[SharedBase, list[_Change] | None] = WeakKeyDictionary()


@contextlib.contextmanager
def liger_layers(base: SharedBase) -> Iterator[None]:
    """Within it the layers of a base are Liger's, where they may be; says once where not.

    They may on a GPU, with liger-kernel installed, if a few tokens have the same hidden states and
    gradients, which is probed once per base. Backward must run within it too: layers may be
    recomputed.
    """
    if base not in _patches:
        _patches[base] = _probed(base)
    with _in_place(_patches[base] or []):
        yield


def _probed(base: SharedBase) -> list[_Change] | None:
    reason = None
    if base.device.type != "cuda":
        reason = "its kernels need a GPU"
    elif importlib.util.find_spec("liger_kernel") is None:
        reason = "liger-kernel is not installed (pip install 'agilerl[liger]')"
    elif base.partition is not None:
        reason = "with ZeRO stage 3 the layers are DeepSpeed's"
    if reason is None:
        changes, reason = tried_changes(base.model)
        if reason is None:
            return changes
    name = type(base.model).__name__
    warn_once(logger, "use_liger_loss has no effect on this %s: %s", name, reason)
    return None


def tried_changes(model: PreTrainedModel) -> tuple[list[_Change], str | None]:
    """What Liger changes for a model whose results stay the same; else why nothing may change."""
    try:
        changes = recorded_changes(model)
        if not changes:
            return [], "Liger has no such layers"
        same = same_with(changes, model)
    except Exception as error:  # noqa: BLE001 - of Liger or its kernels; a model's own layers will do
        return [], f"Liger's layers raise {error!r}"
    return (changes, None) if same else ([], "hidden states or gradients differ")


def recorded_changes(model: PreTrainedModel) -> list[_Change]:
    """What Liger would change for a model, which is left as it is; empty for an unknown one.

    Raises:
        Exception: What Liger's own function raises.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
    if apply is None:
        return []
    options = {name for name in inspect.signature(apply).parameters if name != "model"}
    before = _attributes(model)
    try:
        apply(model=model, **{name: name in _LAYERS for name in options})
    finally:
        changes = _changes(before, _attributes(model))
        for change in changes:
            change.put(change.before)
    # Liger writes the gradient of a norm's input over that of its output, which may have others.
    return [
        _Change(c.owner, c.name, c.before, False) if c.name == "in_place" else c for c in changes
    ]


def _attributes(model: nn.Module) -> dict[int, tuple[Any, dict[str, Any]]]:
    """Attributes of a model's layers, their classes and the modules that define these."""
    layers = list(model.modules())
    classes = {type(layer) for layer in layers if type(layer).__module__.startswith("transformers")}
    modules = {sys.modules[cls.__module__] for cls in classes}
    owners: list[Any] = [*layers, *classes, *modules]
    return {id(owner): (owner, dict(vars(owner))) for owner in owners}


def _changes(
    before: dict[int, tuple[Any, dict[str, Any]]], after: dict[int, tuple[Any, dict[str, Any]]]
) -> list[_Change]:
    """The attributes that have another value after than before, by :func:`_attributes`."""
    return [
        _Change(owner, name, old.get(name, _ABSENT), value)
        for owner, old in before.values()
        for name, value in after[id(owner)][1].items()
        if value is not old.get(name, _ABSENT)
    ]


def same_with(changes: list[_Change], model: PreTrainedModel) -> bool:
    """Whether a few tokens have the same hidden states, and gradients, with changes as without."""
    expected = _states_and_gradients(model)
    with _in_place(changes):
        made = _states_and_gradients(model)
    return all(equal_up_to_rounding(a, b) for a, b in zip(made, expected, strict=True))


def _states_and_gradients(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    embedding = model.get_input_embeddings()
    ids = torch.arange(24, device=model.device).view(2, 12) % min(embedding.weight.shape[0], 97)
    with torch.enable_grad():
        embedded = embedding(ids).detach().requires_grad_()
        hidden = model.base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        weights = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view_as(hidden)
        (gradient,) = torch.autograd.grad((hidden * weights).sum(), embedded)
    return hidden.detach(), gradient


@contextlib.contextmanager
def _in_place(changes: list[_Change]) -> Iterator[None]:
    with contextlib.ExitStack() as undone:
        for change in changes:
            change.put(change.after)
            undone.callback(change.put, change.before)
        yield
