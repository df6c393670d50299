"""Decoder layers of the common make, on one token per row, in few operations.

With little arithmetic per token, a model's own layers spend more on calls and on passing results
through memory than on products. Here products with one input are one, a norm is one call, and
rotations, residuals and activations are added up in place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, silu
from transformers.cache_utils import Cache

from agilerl.llm.generation.single_token.attention import attend, is_replaced

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_MLP = ("gate_proj", "up_proj", "down_proj")
# What is read off an attention besides.
_SETTINGS = {"config", "head_dim", "layer_idx", "scaling"}


def is_common_layer(layer: Any) -> bool:
    """Whether a decoder layer has the parts of a :class:`FusedLayer`, and plain linear layers.

    Without hooks, which only calls of the parts run. That it puts them together in the same way is
    for a comparison to say.
    """
    if _children(layer).keys() != _LAYER or any(map(_is_changed, layer.modules())):
        return False
    attention, mlp = _children(layer.self_attn), _children(layer.mlp)
    if attention.keys() not in ({*_ATTENTION}, {*_ATTENTION, *_HEAD_NORMS}):
        return False
    if mlp.keys() != {*_MLP, "act_fn"} or not layer.self_attn.__dict__.keys() >= _SETTINGS:
        return False
    linears = [attention[name] for name in _ATTENTION] + [mlp[name] for name in _MLP]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attention[name] for name in _HEAD_NORMS if name in attention]
    return (
        all(type(part) is nn.Linear for part in linears)
        and all(norm._parameters.keys() == {"weight"} for norm in norms)
        and all(_epsilon(norm) is not None for norm in norms)
        and len({part.weight.dtype for part in (*linears, *norms)}) == 1
    )


class FusedLayer:
    """RMS norm and rotary attention, RMS norm and gated MLP, each with a residual.

    So are the layers of Llama, Mistral, Qwen 2 and 3 and SmolLM, among others.

    Args:
        layer: One of which :func:`is_common_layer` holds.
        copies: Linear layers whose weights may be laid out anew: those that share an input then
            run as one product, and keep views of the joint weight.
    """

    def __init__(self, layer: Any, copies: Collection[nn.Module]) -> None:
        self.layer, self.attention = layer, layer.self_attn
        parts: dict[str, Any] = _children(layer.self_attn) | _children(layer.mlp)
        self._first_norm = _RMSNorm(layer.input_layernorm)
        self._second_norm = _RMSNorm(layer.post_attention_layernorm)
        self._head_size = layer.self_attn.head_dim
        self._queries = parts["q_proj"].out_features // self._head_size
        self._rotated = self._queries + parts["k_proj"].out_features // self._head_size
        self._head_norms = [_RMSNorm(parts[name]) for name in _HEAD_NORMS if name in parts]
        self._heads = _JointLinear([parts[name] for name in ("q_proj", "k_proj", "v_proj")], copies)
        self._gate_and_up = _JointLinear([parts["gate_proj"], parts["up_proj"]], copies)
        self._out, self._down, self._activation = (
            parts[name] for name in ("o_proj", "down_proj", "act_fn")
        )

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns for ``(N, T, D)``: here where T is 1, else by its own forward."""
        mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
        fits = (
            hidden_states.shape[1] == 1
            and not args
            and cache is not None
            and (mask is None or mask.dtype == torch.bool)
            and kwargs.get("position_embeddings") is not None
            and is_replaced(self.attention)
        )
        if not fits:
            return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)
        return self.run(hidden_states, mask, kwargs["position_embeddings"], cache)

    def run(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
    ) -> torch.Tensor:
        """Hidden states ``(N, 1, D)`` behind the layer.

        Args:
            hidden: ``(N, 1, D)``.
            mask: ``(N, 1, 1, L)`` bool over cached and new columns; None: nothing is hidden.
            position_embeddings: Cosines and sines, each ``(N, 1, head size)``.
            cache: Keys and values of the columns before; the new ones are appended.
        """
        rows = hidden[:, 0]
        heads = self._heads.run(self._first_norm.run(rows)).view(len(rows), -1, self._head_size)
        turned = self._turned(heads[:, : self._rotated], *position_embeddings)
        keys, values = cache.update(
            turned[:, self._queries :, None],
            heads[:, self._rotated :, None],
            self.attention.layer_idx,
        )
        queries = turned[:, : self._queries, None]
        attended, _ = attend(
            self.attention, queries, keys, values, mask, scaling=self.attention.scaling
        )
        rows = _added(rows, attended.reshape(len(rows), -1), self._out)
        gate, up = self._gate_and_up.run(self._second_norm.run(rows)).chunk(2, dim=1)
        if type(self._activation) is nn.SiLU:
            gate = silu(gate, inplace=True)
        else:
            gate = self._activation(gate)
        return _added(rows, gate.mul_(up), self._down)[:, None]

    def _turned(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries and keys ``(N, heads, head size)`` with their rotary position embedding."""
        if self._head_norms:
            both = heads.split([self._queries, self._rotated - self._queries], dim=1)
            pairs = zip(self._head_norms, both, strict=True)
            heads = torch.cat([norm.run(part) for norm, part in pairs], dim=1)
        half = self._head_size // 2
        turned = heads * cos
        turned[..., :half].addcmul_(heads[..., half:], sin[..., :half], value=-1)
        turned[..., half:].addcmul_(heads[..., :half], sin[..., half:])
        return turned


class _RMSNorm:
    def __init__(self, norm: Any) -> None:
        self._weight: torch.Tensor = norm.weight
        self._epsilon = _epsilon(norm)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._weight.shape, self._weight, self._epsilon)


class _JointLinear:
    """Linear layers with the same input; their outputs one after the other."""

    def __init__(self, layers: Sequence[nn.Linear], copies: Collection[nn.Module]) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor | None]] = [
            (layer.weight, layer.bias) for layer in layers
        ]
        if not all(layer in copies for layer in layers):
            return
        weight = torch.cat([layer.weight for layer in layers])
        sizes = [layer.out_features for layer in layers]
        for layer, own in zip(layers, weight.split(sizes), strict=True):
            layer.weight = nn.Parameter(own, requires_grad=False)
        bias = None
        if any(layer.bias is not None for layer in layers):
            bias = torch.cat(
                [
                    weight.new_zeros(n) if layer.bias is None else layer.bias
                    for layer, n in zip(layers, sizes, strict=True)
                ]
            )
        self._parts = [(weight, bias)]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        made = [linear(x, weight, bias) for weight, bias in self._parts]
        return made[0] if len(made) == 1 else torch.cat(made, dim=1)


def _added(rows: torch.Tensor, x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """``rows + layer(x)``."""
    made = torch.addmm(rows, x, layer.weight.T)
    return made if layer.bias is None else made.add_(layer.bias)


def _children(module: nn.Module) -> dict[str, nn.Module]:
    return dict(module.named_children())


def _is_changed(module: nn.Module) -> bool:
    """Whether calling a module runs more, or something else, than its class says."""
    hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    return hooks or "forward" in module.__dict__


def _epsilon(norm: Any) -> float | None:
    epsilon = norm.__dict__.get("variance_epsilon", norm.__dict__.get("eps"))
    return epsilon if isinstance(epsilon, float) else None
