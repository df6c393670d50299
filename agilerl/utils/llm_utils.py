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
    """Make the accelerator for a script started by ``torchrun`` or ``accelerate launch``.

    The same script also runs as a plain single process: then there is nothing to divide, and the
    result is None. Make it first, before environments and agents, and give it to both. It also sees
    to it that the processes part properly when the program ends.

    Args:
        zero_stage: Partition the optimizer with DeepSpeed: 1, or 2; with 3 the frozen base too. 0
            makes a DeepSpeed accelerator that partitions nothing. None: as ``accelerate launch``
            was configured; otherwise without DeepSpeed. Results are the same; memory per process is
            not.
        offload_optimizer: Keep the optimizer's state in CPU memory; needs ZeRO stage 1, 2 or 3.
        cpu: Train on CPUs over gloo; None: where there is no GPU.
        gradient_accumulation_steps: Micro-batches per mini-batch of a process, where an agent is
            given no ``micro_batch_size_per_gpu``.
        gather_for_generation: With stage 3, put the whole base together once per rollout; it has to
            fit on every process then. False: layer by layer, for every token.

    With stage 3 every process needs the memory of the whole base while the first agent is made and
    while a full checkpoint is saved or loaded; in ``learn``, only that of its part and a layer. In
    rollouts it needs that of the whole base and processes generate on their own, or, without
    ``gather_for_generation``, that of its part, a layer and the head: much slower, as every layer
    is communicated for every token, and as slow on all as on the one with most to generate.
    ``get_action``, ``rollout``, ``test`` and ``learn`` must be called by all processes together.

    Raises:
        ValueError: If there is no such stage, nothing that could be offloaded, or nothing that
            could be left apart in rollouts.
        ImportError: If DeepSpeed is asked for and not installed.
    """
    if zero_stage is not None:
        check_zero_stage("zero_stage", zero_stage)
    if offload_optimizer and zero_stage not in (1, 2, 3):
        raise ValueError(
            f"offload_optimizer is True, but zero_stage is {zero_stage}; it must be 1, 2 or 3"
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


_in_a_run = threading.Event()


@contextlib.contextmanager
def run_of_all_processes() -> Iterator[None]:
    """Around what processes do together: one that leaves it by any exception ends as failed.

    The interpreter forgets a ``sys.exit(3)`` before ``_leave_process_group`` could ask for it.
    """
    _in_a_run.set()
    yield
    _in_a_run.clear()


def _leave_process_group() -> None:
    """Give up the process group before the interpreter does.

    A thread of gloo that still holds a tensor then aborts the program once in a while, and a run
    that ended well would count as failed (https://github.com/pytorch/pytorch/issues/190489). After
    an error the group is left as it is: giving it up could wait for the other processes, while
    these wait for this one; and they would fail before this one has ended, so that the launcher
    could name one of them.
    """
    failed = hasattr(sys, "last_value")  # set where an error ends the program
    if torch.distributed.is_initialized() and not failed and not _in_a_run.is_set():
        torch.distributed.destroy_process_group()


def _check_partitions(zero_stage: int | None) -> None:
    if zero_stage != 3:
        raise ValueError(
            f"gather_for_generation is False, but zero_stage is {zero_stage}, which does not "
            "partition the base; use zero_stage=3, or leave it out"
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
