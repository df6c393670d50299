"""What is asked about ZeRO stage 3 wherever it may be at work, without needing DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from agilerl.llm.engine.build import deepspeed_config
from agilerl.llm.engine.ranks import ranks_of

if TYPE_CHECKING:
    from accelerate import Accelerator


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


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether DeepSpeed has cut a parameter into parts; it is empty then but while it is used."""
    return hasattr(parameter, "ds_shape")


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of a parameter, whether partitioned or not."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))
