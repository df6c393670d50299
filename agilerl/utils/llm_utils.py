"""Setting up the processes that train a language model together."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from agilerl.checks import require
from agilerl.llm.engine.accelerator_config import (
    GATHER,
    SECTION,
    check_zero_stage,
    gathers_for_generation,
)

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin


def create_llm_accelerator(
    zero_stage: int | None = None,
    offload_optimizer: bool = False,
    cpu: bool | None = None,
    gradient_accumulation_steps: int = 1,
    gather_for_generation: bool = True,
) -> Accelerator | None:
    """Create the accelerator of a script that ``torchrun`` or ``accelerate launch`` started.

    A script started as a single process gets None and trains without one. Call this before
    environments and agents are made, and pass the result to both. When the program ends, the
    process group is destroyed.

    Args:
        zero_stage: DeepSpeed ZeRO stage: 1 and 2 partition the optimizer's state, 3 also the frozen
            base, 0 nothing. None: as ``accelerate launch`` was configured, otherwise without
            DeepSpeed. The stage changes the memory per process, not the results.
        offload_optimizer: Keep the optimizer's state in CPU memory; needs ZeRO stage 1, 2 or 3.
        cpu: Train on CPUs over gloo; None: where there is no GPU.
        gradient_accumulation_steps: Micro-batches per optimizer step and process, for agents
            without ``micro_batch_size_per_gpu``.
        gather_for_generation: With stage 3, gather the whole base once per rollout; it must then
            fit on every process. False: gather layer by layer for every token, which is much
            slower, and as slow on all processes as on the one with most to generate.

    With stage 3, each process needs memory for the whole base while the first agent is built and
    while a full checkpoint is saved or loaded. ``learn`` needs its partition and one layer;
    rollouts the whole base, or without ``gather_for_generation`` its partition, one layer and the
    head. ``get_action``, ``rollout``, ``test`` and ``learn`` are collective: all processes must
    call them together.

    Raises:
        ValueError: If there is no such stage, or it does not allow ``offload_optimizer`` or
            ``gather_for_generation=False``.
        ImportError: If DeepSpeed is asked for and not installed.
    """
    if zero_stage is not None:
        check_zero_stage("zero_stage", zero_stage)
    require(
        not offload_optimizer or zero_stage in (1, 2, 3),
        f"offload_optimizer is True, but zero_stage is {zero_stage}; it must be 1, 2 or 3",
    )
    if not gather_for_generation and zero_stage is not None:
        _check_partitions(zero_stage)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    atexit.register(_leave_process_group)
    cpu = not torch.cuda.is_available() if cpu is None else cpu
    # What accelerate launch tells the processes of a distributed_type DEEPSPEED.
    configured = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if zero_stage is None and not configured:
        if not gather_for_generation:
            _check_partitions(None)
        from accelerate import Accelerator

        return Accelerator(cpu=cpu, gradient_accumulation_steps=gradient_accumulation_steps)
    _import_deepspeed(zero_stage, cpu)
    from accelerate.utils import DeepSpeedPlugin

    if zero_stage is None:
        plugin = DeepSpeedPlugin()  # it reads the environment
    else:
        plugin = DeepSpeedPlugin(
            zero_stage=zero_stage,
            offload_optimizer_device="cpu" if offload_optimizer else "none",
            gradient_accumulation_steps=gradient_accumulation_steps,
            zero3_init_flag=False,
        )
    if not gather_for_generation:
        plugin.deepspeed_config[SECTION] = {GATHER: False}
    accelerator = _with_plugin(plugin, cpu)
    gathers_for_generation(accelerator)  # refuses a stage of the launcher's that partitions nothing
    return accelerator


_in_collective_run = threading.Event()


@contextlib.contextmanager
def collective_run() -> Iterator[None]:
    """Mark a collective run: a process that leaves it by an exception keeps its process group.

    The interpreter does not record a ``sys.exit(3)`` where ``_leave_process_group`` could see it.
    """
    _in_collective_run.set()
    yield
    _in_collective_run.clear()


def _leave_process_group() -> None:
    """Destroy the process group before the interpreter exits.

    Otherwise a gloo thread that still holds a tensor occasionally aborts the program at exit, and a
    successful run counts as failed (https://github.com/pytorch/pytorch/issues/190489). After an
    error the group is left alone: destroying it could wait for processes that wait for this one,
    and they would fail before this one has ended, so that the launcher might blame one of them.
    """
    failed = "last_value" in vars(sys)  # set when an uncaught exception ends the program
    if torch.distributed.is_initialized() and not failed and not _in_collective_run.is_set():
        torch.distributed.destroy_process_group()


def _check_partitions(zero_stage: int | None) -> None:
    require(
        zero_stage == 3,
        f"gather_for_generation is False, but zero_stage is {zero_stage}, which does not partition "
        "the base; use zero_stage=3, or leave it out",
    )


def _import_deepspeed(zero_stage: int | None, cpu: bool) -> None:
    if cpu:
        # DeepSpeed reads it when it is imported.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError(
            f"zero_stage={zero_stage} needs DeepSpeed: pip install 'agilerl[deepspeed]'"
        ) from error
    if cpu:
        # Its own sum in shared memory would be compiled first, which takes minutes and a compiler;
        # gloo is there.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _with_plugin(plugin: DeepSpeedPlugin, cpu: bool) -> Accelerator:
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs
    from transformers.integrations import unset_hf_deepspeed_config

    # With cpu=True Accelerate would drop the plugin, and without a backend count one process.
    handlers = [InitProcessGroupKwargs(backend="gloo")] if cpu else []
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=handlers)
    # Or transformers would partition models of stage 3 as it makes them, unseen by the agents'
    # checks.
    unset_hf_deepspeed_config()
    return accelerator
