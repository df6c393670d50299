"""Linear layers with a LoRA branch whose products add up in place.

PEFT makes four tensors of the layer's output size in a forward, two of them for the sum and the
scaling of the branch, and as many in backward. Here there is one each way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.autograd.function import once_differentiable


def run_in_place(model: nn.Module) -> None:
    """Have the LoRA layers of a model add their branches in place, where they may.

    A call that does more than add one branch to a plain linear layer of the same dtype (DoRA and
    other variants, LoRA with a bias, dropout, quantized weights, adapters in another precision,
    layers with hooks) runs as PEFT has it. The model's weights must stay where they are from
    forward to backward.
    """
    for layer in model.modules():
        # Something else may have set it, such as an offloading hook.
        if type(layer) is Linear and "forward" not in layer.__dict__:
            layer.__dict__["forward"] = partial(_forward, layer)


def _forward(layer: Linear, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args or kwargs or not _is_plain(layer, x) or torch.compiler.is_compiling():
        return type(layer).forward(layer, x, *args, **kwargs)
    (slot,), base = layer.active_adapters, layer.get_base_layer()
    down, up = layer.lora_A[slot], layer.lora_B[slot]
    made: torch.Tensor = _LoraLinear.apply(
        x, base.weight, base.bias, down.weight, up.weight, layer.scaling[slot]
    )
    return made


def _is_plain(layer: Linear, x: torch.Tensor) -> bool:
    """Whether all that a call computes is a linear layer and one branch, in one dtype."""
    base, slots = layer.get_base_layer(), layer.active_adapters
    if layer.training or layer.disable_adapters or layer.merged or len(slots) != 1:
        return False
    (slot,) = slots
    if slot not in layer.lora_A or slot in layer.lora_variant or layer.lora_bias[slot]:
        return False
    weights = (base.weight, layer.lora_A[slot].weight, layer.lora_B[slot].weight)
    return (
        type(base) is nn.Linear
        and "forward" not in base.__dict__
        and not (base._forward_pre_hooks or base._forward_hooks)
        and all(weight.dtype == x.dtype for weight in weights)
        and not torch.is_autocast_enabled(x.device.type)
    )


class _LoraLinear(torch.autograd.Function):
    """``x W^T + bias + scaling (x A^T) B^T``; gradients of x, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        branch = rows @ down.T
        result = nn.functional.linear(rows, weight, bias).addmm_(branch, up.T, alpha=scaling)
        ctx.save_for_backward(rows, branch, weight, down, up)
        ctx.scaling, ctx.shape = scaling, x.shape
        return result.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        rows, branch, weight, down, up = ctx.saved_tensors
        of_rows = of_down = of_up = None
        gradient = gradient.reshape(-1, gradient.shape[-1])
        of_branch = (gradient @ up).mul_(ctx.scaling)
        if ctx.needs_input_grad[3]:
            of_down = of_branch.T @ rows
        if ctx.needs_input_grad[4]:
            of_up = (gradient.T @ branch).mul_(ctx.scaling)
        if ctx.needs_input_grad[0]:
            of_rows = (gradient @ weight).addmm_(of_branch, down)
            of_rows = of_rows.view(*ctx.shape)
        return of_rows, None, None, of_down, of_up, None
