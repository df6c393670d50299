"""Tensors that a forward keeps for backward, in host memory instead of the accelerator's.

Each is copied once when it is kept, and back when backward asks for it, both in the order of the
current stream: pinned memory lets the processor go on meanwhile. Weights stay where they are.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from agilerl.checks import warn_once

logger = logging.getLogger(__name__)

# Below this many bytes a transfer takes longer than the memory is worth.
SMALLEST = 2**16


def may_offload(device: torch.device) -> bool:
    """Whether activations on a device can be moved off it; says once where they cannot."""
    if device.type == "cpu":
        warn_once(
            logger,
            "activation_offload has no effect: the model is on the CPU, whose memory is where "
            "activations would go",
        )
        return False
    return True


@contextlib.contextmanager
def activations_on_host(
    model: nn.Module, device: torch.device, smallest: int = SMALLEST
) -> Iterator[HostCopies]:
    """Within it what autograd keeps of forwards on a device goes to host memory.

    Args:
        model: Its parameters and buffers, and views of them, are not copied.
        device: Where the model is.
        smallest: Bytes that a tensor must have to be copied.
    """
    copies = HostCopies(model, device, smallest)
    with torch.autograd.graph.saved_tensors_hooks(copies.pack, copies.unpack):
        yield copies
    copies.forget()


@dataclass(frozen=True)
class _OnHost:
    tensor: torch.Tensor
    device: torch.device
    """Where it came from."""


class HostCopies:
    """What was copied to host memory within :func:`activations_on_host`.

    Attributes:
        bytes: Size of all copies.
    """

    def __init__(self, model: nn.Module, device: torch.device, smallest: int) -> None:
        self.bytes = 0
        self._device, self._smallest = device, smallest
        weights = chain(model.parameters(), model.buffers())
        self._resident = {tensor.untyped_storage().data_ptr() for tensor in weights}
        # A storage that is weakly referenced keeps its address to itself, also when it is gone.
        self._known: dict[Hashable, tuple[StorageWeakRef, _OnHost]] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _OnHost:
        """What autograd keeps instead of a tensor; the same for layers that keep the same one."""
        here = tensor.device == self._device and tensor.layout is torch.strided
        if not here or tensor.numel() * tensor.element_size() < self._smallest:
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._resident:
            return tensor
        reference = StorageWeakRef(storage)
        place = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (reference.cdata, *place, tensor._version)
        known = self._known.get(key)
        if known is None or known[0].expired():
            known = self._known[key] = (reference, self._copied(tensor))
        return known[1]

    def _copied(self, tensor: torch.Tensor) -> _OnHost:
        # Strides are kept, as compiled backwards are specialised on them.
        pinned = tensor.device.type == "cuda"
        host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        host.copy_(tensor, non_blocking=pinned)
        self.bytes += host.numel() * host.element_size()
        return _OnHost(host, tensor.device)

    def unpack(self, kept: torch.Tensor | _OnHost) -> torch.Tensor:
        """The tensor that was kept, where it was."""
        if isinstance(kept, torch.Tensor):
            return kept
        return kept.tensor.to(kept.device, non_blocking=True)

    def forget(self) -> None:
        """Leave the copies to autograd alone, which frees them as backward goes."""
        self._known.clear()
