"""Everything that reads an Accelerate or DeepSpeed configuration.

Nothing here needs DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from agilerl.distributed import ranks_of

# Where the DeepSpeed configuration says what DeepSpeed itself has no setting for.
SECTION, GATHER = "agilerl", "gather_for_generation"

DATA_PARALLEL = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
    DistributedType.DEEPSPEED,
)


def deepspeed_config(accelerator: Accelerator | None) -> dict[str, Any]:
    """The accelerator's DeepSpeed configuration; empty without a plugin."""
    plugin = None if accelerator is None else accelerator.deepspeed_plugin
    return {} if plugin is None else plugin.deepspeed_config


def zero_section(accelerator: Accelerator | None) -> dict[str, Any]:
    """The accelerator's ``zero_optimization``; empty without DeepSpeed."""
    section: dict[str, Any] = deepspeed_config(accelerator).get("zero_optimization", {})
    return section


def partitions_base(accelerator: Accelerator | None) -> bool:
    """Whether the frozen base is to be partitioned: ZeRO stage 3, and several processes."""
    return zero_section(accelerator).get("stage") == 3 and ranks_of(accelerator).world_size > 1


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
    processes = ranks_of(value).world_size
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
    ranks = ranks_of(accelerator).world_size
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
