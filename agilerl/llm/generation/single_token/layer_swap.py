"""Which decoder layers a rollout runs by :mod:`agilerl.llm.generation.single_token.fused_layer`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from agilerl.llm.causal_lm import equal_up_to_rounding
from agilerl.llm.generation.kv_cache.growing_cache import GrowingCache
from agilerl.llm.generation.single_token.attention import single_query_attention
from agilerl.llm.generation.single_token.fused_layer import FusedLayer, is_common_layer
from agilerl.llm.shared_base import SharedBase

logger = logging.getLogger(__name__)

# Rows of the comparison with a model's own layers, and cached columns, of which one row hides one.
_ROWS, _COLUMNS = 3, 4
_exact: WeakKeyDictionary[SharedBase, bool] = WeakKeyDictionary()
_swapped: WeakSet[SharedBase] = WeakSet()
_logged: WeakKeyDictionary[SharedBase, str] = WeakKeyDictionary()


@contextlib.contextmanager
def fused_layers(base: SharedBase, copies: Collection[nn.Module]) -> Iterator[None]:
    """Within it single tokens run through a base's layers as :class:`FusedLayer` has it.

    That is so on a CPU, where all linear layers are plain (adapters merged) and the results are
    those of the model's own layers, which is tried out once per base. Elsewhere layers run as they
    are, and the log says so once. May be nested.

    Args:
        base: Whose decoder is swapped.
        copies: Linear layers in it whose weights may be laid out anew.
    """
    if base in _swapped:
        yield
        return
    layers = _layers(base.decoder)
    fused: list[FusedLayer] = []
    reason = _obstacle(base, layers)
    if reason is None:
        fused = [FusedLayer(layer, copies) for layer in layers]
        if base not in _exact:
            _exact[base] = _agree(base, fused)
        if not _exact[base]:
            fused, reason = [], "their results come out different"
    if reason is not None and _logged.get(base) != reason:
        _logged[base] = reason
        name = type(base.model).__name__
        logger.info("rollouts run the decoder layers of %s as they are: %s", name, reason)
    try:
        _swapped.add(base)
        for layer in fused:
            layer.layer.__dict__["forward"] = layer.forward
        yield
    finally:
        _swapped.discard(base)
        for layer in fused:
            layer.layer.__dict__.pop("forward", None)


def _layers(decoder: nn.Module) -> list[nn.Module]:
    found = decoder._modules.get("layers")
    return list(found) if isinstance(found, nn.ModuleList) else []


def _obstacle(base: SharedBase, layers: Sequence[nn.Module]) -> str | None:
    """Why layers cannot be run in another way, or None."""
    if base.device.type != "cpu":
        return f"the model is on {base.device.type}"
    if base.partition is not None:
        return "the model is partitioned"
    if not layers or not all(is_common_layer(layer) for layer in layers):
        return "they have other parts or hooks, or linear layers that are not plain"
    return None if _exact.get(base, True) else "their results come out different"


@torch.no_grad()
def _agree(base: SharedBase, fused: Sequence[FusedLayer]) -> bool:
    """Whether all layers change random hidden states as the model's own do."""
    try:
        return all(equal_up_to_rounding(*changes(base.decoder, layer)) for layer in fused)
    except Exception:  # noqa: BLE001 - of an unknown architecture; its own layers will do
        return False


def changes(decoder: nn.Module, fused: FusedLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer adds to random hidden states, each ``(N, 1, D)``: fused, and by its forward."""
    norm_weight = fused.layer.input_layernorm.weight
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ROWS, _COLUMNS + 1, len(norm_weight), generator=rng).to(norm_weight)
    angles = torch.rand(_ROWS, _COLUMNS + 1, fused.attention.head_dim // 2, generator=rng) * 6
    angles = torch.cat([angles, angles], dim=-1).to(norm_weight)
    cos, sin = angles.cos(), angles.sin()
    visible = torch.ones(_ROWS, 1, 1, _COLUMNS + 1, dtype=torch.bool)
    visible[0, ..., 0] = False
    before, last = slice(0, _COLUMNS), slice(_COLUMNS, None)
    states = []
    for run in (type(fused.layer).forward.__get__(fused.layer), fused.forward):
        cache = GrowingCache(1)
        with single_query_attention(decoder, cache):
            for columns in (before, last):
                width = columns.stop or _COLUMNS + 1
                made = run(
                    hidden[:, columns],
                    attention_mask=visible[..., :width].expand(-1, -1, width - columns.start, -1),
                    position_embeddings=(cos[:, columns], sin[:, columns]),
                    past_key_values=cache,
                    use_cache=True,
                )
        states.append(made - hidden[:, last])
    own, made = states
    return made, own
