"""The ``accelerator`` argument: what is accepted, and what it means for batch sizes."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from agilerl.llm.engine.build import deepspeed_config
from agilerl.llm.engine.partition_facts import zero_section
from agilerl.llm.engine.ranks import ranks_of

DATA_PARALLEL = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
    DistributedType.DEEPSPEED,
)


def check_accelerator(name: str, value: Any) -> None:
    """Refuse what is no accelerator, or one for another kind of parallelism.

    Raises:
        TypeError: It is no accelerator.
        ValueError: It does not know of the other processes.
        NotImplementedError: It is for FSDP, tensor parallelism, offload to NVMe and the like.
    """
    if value is None:
        return
    if not isinstance(value, Accelerator):
        raise TypeError(
            f"{name} is {value!r}; it must be an accelerate.Accelerator, such as "
            "agilerl.utils.llm_utils.create_llm_accelerator makes, or None"
        )
    if value.distributed_type not in DATA_PARALLEL:
        raise NotImplementedError(
            f"{name} is set up for {value.distributed_type.value}, which is not supported; use a "
            "plain Accelerator, or one with a DeepSpeed plugin of zero_stage 0, 1, 2 or 3"
        )
    processes = ranks_of(value).count
    if processes not in (1, value.num_processes):
        raise ValueError(
            f"{name} counts {value.num_processes} process of {processes}, as Accelerate does on "
            "CPUs with a DeepSpeed plugin: each would think it were the main one; use "
            "agilerl.utils.llm_utils.create_llm_accelerator, or pass "
            'kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] to Accelerator'
        )
    section = zero_section(value)
    check_zero_stage(name, section.get("stage", 0))
    place = (section.get("offload_param") or {}).get("device")
    if place not in (None, "none", "cpu"):
        raise NotImplementedError(
            f"{name} asks for parameters to be offloaded to {place!r}, which is not supported; use "
            '"cpu" or "none"'
        )


def check_zero_stage(name: str, stage: Any) -> None:
    """Refuse a ZeRO stage that there is no engine for.

    Raises:
        ValueError: There is no such stage.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"{name} asks for ZeRO stage {stage!r}; it must be 0, 1, 2 or 3")


def settings_without_effect(accelerator: Accelerator | None) -> list[str]:
    """Settings of an accelerator that an agent's arguments decide instead."""
    if accelerator is None:
        return []
    config = deepspeed_config(accelerator)
    instead = {
        "optimizer": "AdamW with the agent's lr is used",
        "scheduler": "cosine_lr_schedule_config decides",
        "gradient_clipping": "max_grad_norm decides",
    }
    ignored = [
        f"{name} ({reason})"
        for name, reason in instead.items()
        if config.get(name) not in (None, "auto")
    ]
    if accelerator.mixed_precision not in (None, "no"):
        ignored.append("mixed_precision (the dtype that the model was loaded in decides)")
    return ignored


def rank_batch_size(batch_size: int, accelerator: Accelerator | None) -> int:
    """One rank's share of the sequences of an optimizer step.

    Raises:
        ValueError: They do not divide.
    """
    ranks = ranks_of(accelerator).count
    if batch_size % ranks:
        raise ValueError(
            f"batch_size is {batch_size}; it counts the sequences of an optimizer step over all "
            f"{ranks} processes, so it must be a multiple of {ranks}"
        )
    return batch_size // ranks


def rank_micro_batch_size(
    batch_size: int, micro_batch_size: int | None, accelerator: Accelerator | None
) -> int:
    """Sequences per forward and backward on a rank.

    Args:
        batch_size: Sequences per optimizer step, over all ranks.
        micro_batch_size: As asked for; None: the accelerator's accumulation steps decide.
        accelerator: None: no accumulation unless asked for.
    """
    share = rank_batch_size(batch_size, accelerator)
    if micro_batch_size is not None:
        return min(micro_batch_size, share)
    if accelerator is None:
        return share
    steps = deepspeed_config(accelerator).get("gradient_accumulation_steps", "auto")
    steps = accelerator.gradient_accumulation_steps if steps == "auto" else steps
    return -(-share // steps)
