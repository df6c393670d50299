"""Whether a parameter is partitioned (ZeRO stage 3), and whether a model can be.

DeepSpeed need not be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether DeepSpeed has partitioned a parameter, which is empty then unless it is gathered."""
    return hasattr(parameter, "ds_shape")


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of a parameter, whether partitioned or not."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@torch.no_grad()
def check_every_layer_runs(model: PreTrainedModel) -> None:
    """Refuse a model in which the tokens decide which layers run, as where experts are modules.

    A partitioned layer is gathered by all ranks when it runs. If it ran on some of them only, these
    would wait for the others for ever.

    Args:
        model: Whole, and in evaluation mode.

    Raises:
        ValueError: Other layers run for one token than for many.
    """
    vocab = model.config.get_text_config().vocab_size
    ids = (torch.arange(128, device=next(model.parameters()).device) % vocab).view(32, 4)
    one, many = _layers_run(model.base_model, ids[:1, :1]), _layers_run(model.base_model, ids)
    if one != many:
        differing = next((b for a, b in zip(one, many, strict=False) if a != b), many[-1])
        raise ValueError(
            f"{type(model).__name__} cannot be partitioned (ZeRO stage 3): its tokens decide which "
            f"layers run, such as {differing}, so that processes would wait for each other; use "
            "zero_stage 2"
        )


def _layers_run(decoder: nn.Module, ids: torch.Tensor) -> list[str]:
    """The modules with weights of their own, in the order in which ``ids`` ``(N, T)`` run them."""
    run: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: run.append(name))
        for name, module in decoder.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    try:
        decoder(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return run
