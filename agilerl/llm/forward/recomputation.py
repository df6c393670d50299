"""Gradient checkpointing by decoder layer, in evaluation mode and with caches too.

transformers' own runs in training mode only, and drops caches.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from agilerl.checks import warn_once

logger = logging.getLogger(__name__)

_RECOMPUTING = "_agilerl_recomputing"
"""Attribute of a layer: its forward under ``checkpoint``."""

Context = contextlib.AbstractContextManager[None]


@contextlib.contextmanager
def recomputed_layers(
    decoder: nn.Module, recomputed_within: Callable[[], Context] | None = None
) -> Iterator[None]:
    """Within it each layer keeps only its input, and is run again in backward.

    Args:
        decoder: Whose layers.
        recomputed_within: Makes what surrounds a layer that is run again; None: nothing.
    """
    layers = [
        module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        warn_once(
            logger,
            "gradient_checkpointing has no effect on this %s: none of its layers is a "
            "transformers.modeling_layers.GradientCheckpointingLayer",
            type(decoder).__name__,
        )
    # A forward set on the instance (an offloading hook, say) must be there again afterwards.
    own = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.__dict__["forward"] = _recomputing(layer, recomputed_within)
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            if forward is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = forward


def _recomputing(
    layer: nn.Module, recomputed_within: Callable[[], Context] | None
) -> Callable[..., Any]:
    """The layer's forward under ``checkpoint``; without a context always the same object.

    A compiled model guards on it: a new one per call would be compiled per call.
    """
    forward = layer.forward
    if recomputed_within is not None:
        again = _Within(recomputed_within)
        return partial(_checkpointed(forward), context_fn=lambda: (contextlib.nullcontext(), again))
    kept = layer.__dict__.get(_RECOMPUTING)
    if kept is None or kept.args[0] != forward:
        kept = layer.__dict__[_RECOMPUTING] = _checkpointed(forward)
    return kept


class _Within:
    """A context that is made anew when it is entered: a retained graph runs again twice."""

    def __init__(self, make: Callable[[], Context]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._entered = self._make()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


def _checkpointed(forward: Callable[..., Any]) -> partial[Any]:
    # torch.compile takes no context_fn, not even the one that is torch's default.
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


def remove_recomputation(model: nn.Module) -> None:
    """Remove what :func:`recomputed_layers` keeps on the layers of a model."""
    for module in model.modules():
        module.__dict__.pop(_RECOMPUTING, None)
