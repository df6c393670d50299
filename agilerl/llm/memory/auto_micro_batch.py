"""``micro_batch_size_per_gpu="auto"``: as many sequences as the free memory has room for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import psutil
import torch
from transformers import PreTrainedModel

from agilerl.distributed import Ranks
from agilerl.llm.memory.estimate import Estimator, MemoryEstimate, readable
from agilerl.llm.memory.settings import MemorySettings

logger = logging.getLogger(__name__)

# Of the free memory: the estimate does not count what an allocator keeps of freed blocks.
LEFT_FREE = 0.2


def choose_micro_batch_size(
    model: PreTrainedModel, settings: MemorySettings, ranks: Ranks, *, has_optimizer_state: bool
) -> int:
    """The number of sequences per forward and backward, the same on all ranks; collective.

    Args:
        model: The base.
        settings: Of this rank, with the longest rows that there can be.
        ranks: The smallest number of any of them is taken.
        has_optimizer_state: The optimizer has stepped, so its state is not in the free memory.

    Returns:
        ``batch_size`` of ``settings``, or the largest power of two below it whose update fits; at
        least 1.

    Raises:
        ValueError: If the free memory cannot be read, or the update not be estimated.
    """
    free = free_memory(torch.device(settings.device), ranks)
    rows, added = fitting_rows(model, settings, free, has_optimizer_state)
    chosen = -int(ranks.max(torch.tensor(-rows)))
    fewer = "" if chosen == rows else f"; another process has room for {chosen} only"
    logger.info(
        "micro_batch_size_per_gpu='auto' is %d: by estimate an update in micro-batches of %d "
        "sequences adds %s, and %s are free, of which %d%% are to stay so%s",
        chosen,
        rows,
        readable(added),
        readable(free),
        100 * LEFT_FREE,
        fewer,
    )
    return chosen


def free_memory(device: torch.device, ranks: Ranks) -> int:
    """Bytes that this process can still allocate on a device.

    On a CPU it is an equal part of what the machine has available, as if all ranks were on it.

    Raises:
        ValueError: If the device does not say.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + reused
    if device.type == "cpu":
        return psutil.virtual_memory().available // ranks.world_size
    raise _unknown(f"how much memory is free on {device.type!r} cannot be read")


def fitting_rows(
    model: PreTrainedModel, settings: MemorySettings, free: int, has_optimizer_state: bool
) -> tuple[int, int]:
    """The most sequences whose update leaves enough free, and the bytes that it adds.

    Args:
        model: The base.
        settings: ``batch_size`` is the most sequences to try.
        free: Bytes.
        has_optimizer_state: See :func:`choose_micro_batch_size`.

    Raises:
        ValueError: If the update cannot be estimated.
    """
    room, rows, added = (1 - LEFT_FREE) * free, 0, 0
    try:
        estimator = Estimator(model, settings)
        for rows in _candidates(settings.batch_size):
            found = estimator.estimate(replace(settings, micro_batch_size_per_gpu=rows))
            added = _added_by_update(found, has_optimizer_state)
            if added <= room:
                break
    except Exception as error:  # the model's own code runs, on tensors it was not written for
        raise _unknown(
            f"the memory of an update of {type(model).__name__} cannot be estimated ({error!r})"
        ) from error
    return rows, added


def _candidates(most: int) -> Iterator[int]:
    """``most``, then the powers of two below it, down to 1."""
    yield most
    for exponent in reversed(range((most - 1).bit_length())):
        yield 2**exponent


def _added_by_update(found: MemoryEstimate, has_optimizer_state: bool) -> int:
    held = found.fixed if has_optimizer_state else found.fixed - found.optimizer_state
    return found.update_peak - held


def _unknown(reason: str) -> ValueError:
    return ValueError(
        f"micro_batch_size_per_gpu is 'auto', but {reason}; pass a number of sequences"
    )
