"""The processes that train together: rank, world size, and the collectives used in training."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from accelerate import Accelerator


T = TypeVar("T")


class Ranks:
    """A single process, and the interface of several (:class:`DistributedRanks`).

    Every method but :meth:`notify` and :meth:`notified` is a collective: all ranks must call it, in
    the same order.
    """

    rank: int = 0
    world_size: int = 1

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, the same on each, in a new tensor."""
        return tensor.detach().clone()

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over ranks, in a new tensor."""
        return tensor.detach().clone()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's small picklable value, in the order of ranks."""
        return [value]

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """What every rank has for this one, in the order of ranks.

        Args:
            values: A picklable value for each rank, tensors on the CPU.
        """
        return list(values)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors with those of rank 0."""

    def notify(self, event: str) -> None:
        """Let the other ranks know of an event; they are not waited for."""

    def notified(self, event: str) -> bool:
        """Whether a rank has let the others know of an event by now; waits for nobody."""
        return False

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """What ``action`` returns (a small picklable value) on rank 0, the only one to run it.

        An exception there is raised on every rank, so that all go on from the same place.
        """
        value = self.on_all_ranks(lambda: action() if self.rank == 0 else None)
        return cast(T, self.gather(value)[0])

    def on_all_ranks(self, action: Callable[[], T]) -> T:
        """What ``action`` returns on this rank; every rank runs it, and none communicates in it.

        An exception on any rank is raised on every rank, so that all go on from the same place.
        """
        value, error = None, None
        try:
            value = action()
        except Exception as raised:
            if self.world_size == 1:
                raise
            error = raised
        sent = None if error is None else _picklable(error)
        errors = [raised for raised in self.gather(sent) if raised is not None]
        if errors:
            raise errors[0] if error is None else error
        return cast(T, value)


class DistributedRanks(Ranks):
    """The processes of torch's default process group.

    Args:
        device: Where this process's collectives run: its GPU with nccl, the CPU with gloo.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self.device = device

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        return self._reduced(tensor, torch.distributed.ReduceOp.SUM)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over ranks."""
        return self._reduced(tensor, torch.distributed.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """What every rank has for this one."""
        parcels = [torch.frombuffer(bytearray(pickle.dumps(v)), dtype=torch.uint8) for v in values]
        sizes = torch.tensor([len(parcel) for parcel in parcels], device=self.device)
        arriving = torch.empty_like(sizes)
        torch.distributed.all_to_all_single(arriving, sizes)
        lengths = arriving.tolist()
        received = torch.empty(sum(lengths), dtype=torch.uint8, device=self.device)
        sent = torch.cat(parcels).to(self.device)
        torch.distributed.all_to_all_single(received, sent, lengths, sizes.tolist())
        return [pickle.loads(part.numpy().tobytes()) for part in received.cpu().split(lengths)]

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors with those of rank 0."""
        for tensor in tensors:
            moved = tensor.detach().to(self.device, copy=True)
            torch.distributed.broadcast(moved, src=0)
            tensor.copy_(moved)

    def notify(self, event: str) -> None:
        """Note the event in the store that the process group was made with."""
        self._store.set(event, "1")

    def notified(self, event: str) -> bool:
        """Whether it is noted there."""
        return bool(self._store.check([event]))

    @property
    def _store(self) -> Any:
        # All collectives wait for each other; this is what processes share besides.
        return distributed_c10d.PrefixStore("agilerl", distributed_c10d._get_default_store())

    def _reduced(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        moved = tensor.detach().to(self.device, copy=True)
        torch.distributed.all_reduce(moved, op=operation)
        return moved.to(tensor.device)


def _picklable(error: Exception) -> Exception:
    """The error itself, or one that says the same where its class cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling calls whatever the class defines
        return RuntimeError(repr(error))
    return error


def ranks_of(accelerator: Accelerator | None) -> Ranks:
    """The ranks that an accelerator stands for.

    torch is asked how many there are: on CPUs Accelerate counts one process when it has a DeepSpeed
    plugin, unless it was told to use gloo.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if accelerator is None or not distributed or torch.distributed.get_world_size() == 1:
        return Ranks()
    return DistributedRanks(accelerator.device)


def mean_and_std(values: torch.Tensor, ranks: Ranks) -> tuple[int, float, float]:
    """Count, mean and unbiased std of all ranks' values; 0 where there are too few."""
    values = values.detach().double()
    count, total = ranks.sum(
        torch.stack([values.new_tensor(values.numel()), values.sum()])
    ).tolist()
    mean = total / max(count, 1)
    squares = float(ranks.sum((values - mean).square().sum()))
    return int(count), mean, (squares / max(count - 1, 1)) ** 0.5
