"""What is asked about ZeRO stage 3 wherever it may be at work, without needing DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from agilerl.llm.engine.build import deepspeed_config
from agilerl.llm.engine.ranks import ranks_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

# Where the DeepSpeed configuration says what DeepSpeed itself has no setting for.
SECTION, GATHER = "agilerl", "gather_for_generation"


def zero_section(accelerator: Accelerator | None) -> dict[str, Any]:
    """The accelerator's ``zero_optimization``; empty without DeepSpeed."""
    section: dict[str, Any] = deepspeed_config(accelerator).get("zero_optimization", {})
    return section


def partitions_base(accelerator: Accelerator | None) -> bool:
    """Whether the frozen base is to be partitioned: ZeRO stage 3, and several processes."""
    return zero_section(accelerator).get("stage") == 3 and ranks_of(accelerator).count > 1


def offloads_base(accelerator: Accelerator | None) -> bool:
    """Whether this process's part of the base is to be kept in CPU memory."""
    return (zero_section(accelerator).get("offload_param") or {}).get("device") == "cpu"


def gathers_for_generation(accelerator: Accelerator | None) -> bool:
    """Whether rollouts put the whole partitioned base together, as they do by default.

    The DeepSpeed configuration says so in a section of its own, which DeepSpeed does not read:
    ``{"agilerl": {"gather_for_generation": false}}``.

    Raises:
        TypeError: The section is no dict, or the setting no bool.
        ValueError: The section holds another setting, or it is False although nothing is
            partitioned.
    """
    section = deepspeed_config(accelerator).get(SECTION, {})
    if not isinstance(section, Mapping):
        raise TypeError(
            f"the DeepSpeed configuration's {SECTION!r} is {section!r}; it must be a dict, such as "
            f'{{"{GATHER}": false}}'
        )
    unknown = sorted(set(section) - {GATHER})
    if unknown:
        raise ValueError(
            f"the DeepSpeed configuration's {SECTION!r} holds {unknown}; only {GATHER!r} is known"
        )
    gathers = section.get(GATHER, True)
    if not isinstance(gathers, bool):
        raise TypeError(
            f"{GATHER} in the DeepSpeed configuration's {SECTION!r} is {gathers!r}; it must be "
            "true or false"
        )
    stage = zero_section(accelerator).get("stage", 0)
    if not gathers and stage != 3:
        raise ValueError(
            f"{GATHER} is False, but the base is not partitioned with ZeRO stage {stage}; use "
            "stage 3, or leave it out"
        )
    return gathers


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether DeepSpeed has cut a parameter into parts; it is empty then but while it is used."""
    return hasattr(parameter, "ds_shape")


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of a parameter, whether partitioned or not."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@torch.no_grad()
def check_every_layer_runs(model: PreTrainedModel) -> None:
    """Refuse a model whose tokens decide which layers run, such as experts one by one.

    Ranks put a partitioned layer together when it runs: where it does not run on all of them, they
    would wait for each other for ever.

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
