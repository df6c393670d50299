"""The weights a rollout runs with: the adapter merged into copies of the layers it targets.

The base itself is never written to: merging in place and undoing it drifts with every round.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from agilerl.llm.causal_lm import LogitHead
from agilerl.llm.generation.single_token.layer_swap import fused_layers
from agilerl.llm.policy import Policy


@contextlib.contextmanager
def rollout_weights(policy: Policy) -> Iterator[None]:
    """Within it the policy's current role generates, and no other adapter of its base can be used.

    The adapter is merged where that is exact, which takes the memory of the targeted layers once
    more. On a partitioned base all ranks enter and leave together. It is gathered once, which takes
    its whole memory while it lasts, and each rank generates as often as it likes; without
    ``gather_for_generation`` it is gathered layer by layer in every forward and the adapter is not
    merged; ranks may then run no other collective in between. May be nested.

    Raises:
        RuntimeError: If another adapter of the base is rolling out.
    """
    policy.set_role(policy.role)
    base, slot = policy.base, policy.slot(policy.role)
    with base.exclusive(slot):
        if base.partition is not None and not base.partition.gather_for_generation:
            with base.partition.in_step():
                yield
        else:
            with (
                base.whole(),
                merged_adapter(policy.model, slot) as copies,
                fused_layers(base, copies),
            ):
                yield


def rollout_head(policy: Policy) -> LogitHead:
    """The head for use within :func:`rollout_weights`, once per forward of the decoder."""
    head, partition = policy.head(), policy.base.partition
    if partition is None or partition.gather_for_generation:
        return head
    from agilerl.llm.engine.partitioned_base import GatheredHead

    return replace(head, module=GatheredHead(head.module, partition), weight=None, bias=None)


@dataclass(frozen=True)
class _MergedLayer:
    parent: nn.Module
    name: str
    """Of the layer in ``parent``."""
    lora: LoraLayer
    merged: nn.Module

    def swap_in(self) -> None:
        self.parent._modules[self.name] = self.merged

    def swap_out(self) -> None:
        self.parent._modules[self.name] = self.lora


@contextlib.contextmanager
def merged_adapter(model: PeftModel, slot: str) -> Iterator[set[nn.Module]]:
    """Within it, layers with the adapter ``slot`` are plain layers with merged weights.

    Gives these plain layers, which nothing else uses. Layers that cannot be merged exactly (lower
    precision than float32, quantized, DoRA and other variants, LoRA with a bias) keep their LoRA
    branches.
    """
    layers = [
        layer
        for parent in model.get_base_model().modules()
        for name, child in parent.named_children()
        if isinstance(child, LoraLayer) and (layer := _merge(parent, name, child, slot))
    ]
    for layer in layers:
        layer.swap_in()
    try:
        yield {layer.merged for layer in layers}
    finally:
        for layer in layers:
            layer.swap_out()


@torch.no_grad()
def _merge(parent: nn.Module, name: str, layer: LoraLayer, slot: str) -> _MergedLayer | None:
    base = layer.get_base_layer()
    weight = base._parameters.get("weight")
    exact = (
        slot in layer.lora_A
        and slot not in layer.lora_variant
        and not layer.lora_bias[slot]
        and type(base).__name__ in ("Linear", "Conv1D")
        and weight is not None
        and weight.dtype in (torch.float32, torch.float64)
    )
    if not exact:
        return None
    assert weight is not None
    merged = copy.copy(base)
    merged._parameters = dict(base._parameters)
    merged._parameters["weight"] = nn.Parameter(
        weight + layer.get_delta_weight(slot), requires_grad=False
    )
    return _MergedLayer(parent, name, layer, merged)
