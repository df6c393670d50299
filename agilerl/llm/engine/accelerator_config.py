"""What an Accelerate or DeepSpeed configuration asks for; no other module reads one.

First which settings are refused or without effect, then how the base is partitioned (ZeRO stage 3),
then how many sequences a rank trains at a time. DeepSpeed need not be installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from agilerl.checks import InstanceOf, require
from agilerl.distributed import ranks_of

SECTION = "agilerl"
"""Section of the DeepSpeed configuration for what DeepSpeed itself has no setting for."""
GATHER = "gather_for_generation"
"""The only key of that section."""
DATA_PARALLEL = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
    DistributedType.DEEPSPEED,
)

_ACCELERATOR = InstanceOf(
    Accelerator,
    "an accelerate.Accelerator, such as agilerl.utils.llm_utils.create_llm_accelerator makes",
)


def deepspeed_config(accelerator: Accelerator | None) -> dict[str, Any]:
    """The accelerator's DeepSpeed configuration; empty without a plugin."""
    plugin = None if accelerator is None else accelerator.deepspeed_plugin
    return {} if plugin is None else plugin.deepspeed_config


def zero_section(accelerator: Accelerator | None) -> dict[str, Any]:
    """The accelerator's ``zero_optimization``; empty without DeepSpeed."""
    section: dict[str, Any] = deepspeed_config(accelerator).get("zero_optimization", {})
    return section


def check_accelerator(name: str, value: Any) -> None:
    """Refuse what is no accelerator, or one for another kind of parallelism.

    Raises:
        TypeError: It is no accelerator.
        ValueError: It does not know of the other processes.
        NotImplementedError: It is for FSDP, tensor parallelism, offload to NVMe and the like.
    """
    if value is None:
        return
    _ACCELERATOR(name, value)
    kind, processes = value.distributed_type, ranks_of(value).world_size
    require(
        kind in DATA_PARALLEL,
        f"{name} is set up for {kind.value}, which is not supported; use a plain Accelerator, or "
        "one with a DeepSpeed plugin of zero_stage 0, 1, 2 or 3",
        NotImplementedError,
    )
    require(
        processes in (1, value.num_processes),
        f"{name} counts {value.num_processes} process of {processes}, as Accelerate does on CPUs "
        "with a DeepSpeed plugin: every process would act as the main one; use "
        "agilerl.utils.llm_utils.create_llm_accelerator, or pass "
        'kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] to Accelerator',
    )
    check_zero_stage(name, zero_section(value).get("stage", 0))
    device = _offload_device(value)
    require(
        device in (None, "none", "cpu"),
        f"{name} asks for parameters to be offloaded to {device!r}, which is not supported; use "
        '"cpu" or "none"',
        NotImplementedError,
    )


def check_zero_stage(name: str, stage: Any) -> None:
    """Refuse a ZeRO stage that there is no engine for.

    Raises:
        ValueError: There is no such stage.
    """
    require(stage in (0, 1, 2, 3), f"{name} asks for ZeRO stage {stage!r}; it must be 0, 1, 2 or 3")


def settings_without_effect(accelerator: Accelerator | None) -> list[str]:
    """Settings that have no effect, each with what decides instead."""
    if accelerator is None:
        return []
    config = deepspeed_config(accelerator)
    instead = {
        "optimizer": "the agent's optimizer and lr decide",
        "scheduler": "lr_schedule decides",
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


def partitions_base(accelerator: Accelerator | None) -> bool:
    """Whether the frozen base is to be partitioned: ZeRO stage 3, and several processes."""
    return zero_section(accelerator).get("stage") == 3 and ranks_of(accelerator).world_size > 1


def offloads_base(accelerator: Accelerator | None) -> bool:
    """Whether this process's part of the base is to be kept in CPU memory."""
    return _offload_device(accelerator) == "cpu"


def _offload_device(accelerator: Accelerator | None) -> Any:
    return (zero_section(accelerator).get("offload_param") or {}).get("device")


def gathers_for_generation(accelerator: Accelerator | None) -> bool:
    """Whether rollouts gather the whole partitioned base, as they do by default.

    The DeepSpeed configuration says so in a section of its own, which DeepSpeed does not read:
    ``{"agilerl": {"gather_for_generation": false}}``.

    Raises:
        TypeError: The section is no dict, or the setting no bool.
        ValueError: The section holds another setting, or it is False although nothing is
            partitioned.
    """
    section = deepspeed_config(accelerator).get(SECTION, {})
    where = f"the DeepSpeed configuration's {SECTION!r}"
    InstanceOf(Mapping, f'a dict, such as {{"{GATHER}": false}}', optional=False)(where, section)
    unknown = sorted(set(section) - {GATHER})
    require(not unknown, f"{where} holds {unknown}; only {GATHER!r} is known")
    gathers: bool = section.get(GATHER, True)
    InstanceOf(bool, "true or false", optional=False)(f"{GATHER} in {where}", gathers)
    stage = zero_section(accelerator).get("stage", 0)
    require(
        gathers or stage == 3,
        f"{GATHER} is False, but the base is not partitioned with ZeRO stage {stage}; use stage 3, "
        "or leave it out",
    )
    return gathers


def rank_batch_size(batch_size: int, accelerator: Accelerator | None) -> int:
    """One rank's share of the sequences of an optimizer step.

    Raises:
        ValueError: They do not divide.
    """
    ranks = ranks_of(accelerator).world_size
    require(
        batch_size % ranks == 0,
        f"batch_size is {batch_size}; it counts the sequences of an optimizer step over all "
        f"{ranks} processes, so it must be a multiple of {ranks}",
    )
    return batch_size // ranks


def rank_micro_batch_size(
    batch_size: int, micro_batch_size: int | None, accelerator: Accelerator | None
) -> int:
    """Sequences per forward and backward on a rank.

    Args:
        batch_size: Sequences per optimizer step, over all ranks.
        micro_batch_size: As asked for; None: the accelerator's accumulation steps decide.
        accelerator: None: a single process, which accumulates only if asked for.
    """
    share = rank_batch_size(batch_size, accelerator)
    if micro_batch_size is not None:
        return min(micro_batch_size, share)
    if accelerator is None:
        return share
    steps = deepspeed_config(accelerator).get("gradient_accumulation_steps", "auto")
    steps = accelerator.gradient_accumulation_steps if steps == "auto" else steps
    return -(-share // steps)
