"""LoRA layers of vLLM's CPU build by matrix products; imported in vLLM's processes only.

vLLM's own copy the weights of its adapter for every token, which took four fifths of a rollout's
time. Here each adapter of the batch is one matrix product over its tokens. Importing this module
replaces the two functions on which linear layers are built.
"""

from __future__ import annotations

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu


def _products(
    inputs: torch.Tensor, weights: torch.Tensor, adapters: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``(tokens, outputs)``: each token's inputs times the weights of its adapter.

    Args:
        inputs: ``(tokens, inputs)``.
        weights: ``(adapters, outputs, inputs)``, or with a 1 in second place.
        adapters: ``(tokens,)`` long.
        dtype: To compute in.
    """
    inputs, weights = inputs.to(dtype), weights.flatten(0, -3)
    if bool((adapters == adapters[0]).all()):
        return inputs @ weights[adapters[0]].to(dtype).T
    outputs = inputs.new_empty(len(inputs), weights.shape[1])
    for adapter in adapters.unique():
        rows = adapters == adapter
        outputs[rows] = inputs[rows] @ weights[adapter].to(dtype).T
    return outputs


def bgmv_shrink(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """As vLLM's, whose parameter names these are."""
    outputs = _products(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype)
    output_tensor[:, : outputs.shape[1]] = scaling * outputs


def bgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """As vLLM's."""
    outputs = _products(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype)
    target = output_tensor[:, slice_offset : slice_offset + slice_size]
    target.add_(outputs) if add_inputs else target.copy_(outputs)


for _module in (lora_ops, punica_cpu):
    _module.bgmv_shrink = bgmv_shrink
    _module.bgmv_expand_slice = bgmv_expand_slice
