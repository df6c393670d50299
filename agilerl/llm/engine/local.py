"""The engine of a single process: plain torch, AdamW over the actor's LoRA parameters."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR

from agilerl.distributed import Ranks
from agilerl.llm.config import CosineLRScheduleConfig


def cosine_schedule(
    optimizer: torch.optim.Optimizer, config: CosineLRScheduleConfig
) -> SequentialLR:
    """Linear warm-up from 1/n of the learning rate, then a cosine to zero, per ``learn``."""
    warmup = int(config.num_epochs * config.warmup_proportion)
    decay = max(config.num_epochs - warmup, 1)

    def cosine(epoch: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * min(epoch / decay, 1.0)))

    schedules: list[LRScheduler] = [LambdaLR(optimizer, cosine)]
    if warmup:
        schedules.insert(0, LambdaLR(optimizer, lambda epoch: min((epoch + 1) / warmup, 1.0)))
    return SequentialLR(optimizer, schedules, milestones=[warmup] if warmup else [])


def scheduled_rate(group: Mapping[str, Any], lr: float) -> float:
    """A parameter group's learning rate at its place in the schedule, with ``lr`` as the peak."""
    peak = group.get("initial_lr", group["lr"])
    if peak in (0, lr):
        return float(group["lr"] if peak else lr)
    return float(lr * group["lr"] / peak)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, lr: float, *, scheduled: bool = False
) -> None:
    """Set the learning rate at once, or where it is scheduled its peak, the position kept."""
    for group in optimizer.param_groups:
        group["lr"] = scheduled_rate(group, lr) if scheduled else lr
        if "initial_lr" in group:
            group["initial_lr"] = lr


class LocalEngine:
    """Gradient accumulation, clipping and optimizer of one process.

    Args:
        parameters: What is trained.
        lr: Learning rate of AdamW.
        schedule: Warm-up and decay of it; None: constant.
    """

    lockstep = False
    sharded = False
    """Whether checkpoints keep the optimizer in one file per process."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        schedule: CosineLRScheduleConfig | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, weight_decay=0.0)
        self.scheduler = None if schedule is None else cosine_schedule(self.optimizer, schedule)
        self.lr = lr
        self.ranks = Ranks()

    def set_lr(self, lr: float) -> None:
        """Take over a new learning rate; a no-op when it is the current one."""
        if lr != self.lr:
            set_learning_rate(self.optimizer, lr, scheduled=self.scheduler is not None)
            self._set_peak(lr)
            self.lr = lr

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients."""
        loss.backward()

    def step(self, max_grad_norm: float) -> float:
        """Clip, step if all gradients are finite, clear; returns the norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(self.parameters, max_grad_norm))
        if math.isfinite(norm):
            self.optimizer.step()
        self.discard()
        return norm

    def discard(self) -> None:
        """Clear accumulated gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def advance_schedule(self) -> None:
        """One more ``learn`` has been done."""
        if self.scheduler is None:
            return
        # It may have been set on the optimizer itself.
        self._set_peak(self.optimizer.param_groups[0]["initial_lr"])
        with warnings.catch_warnings():
            # Where no group had two different rewards, there was rightly no optimizer step before.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Moments, schedule position, and the learning rate that was last taken over."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "scheduler": scheduler, "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore moments and schedule position; the live learning rate is kept."""
        with self._keeping_rate(state):
            # torch would keep the given moments, and step them in place.
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))

    @contextlib.contextmanager
    def _keeping_rate(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Within it the optimizer is loaded; then schedule position and learning rate are set.

        Of a saved learning rate nothing is taken but, where both have a schedule, how far it was.
        """
        resumed = self.scheduler is not None and state["scheduler"] is not None
        (live,) = self.optimizer.param_groups
        (saved,) = state["optimizer"]["param_groups"]
        rate = scheduled_rate(saved if resumed else live, self.lr)
        yield
        (group,) = self.optimizer.param_groups
        group.pop("initial_lr", None)
        group["lr"] = self.lr
        if self.scheduler is None:
            return
        if resumed:
            self.scheduler.load_state_dict(state["scheduler"])
        group["lr"], group["initial_lr"] = rate, self.lr
        self._set_peak(self.lr)

    def restore_rates(self, state: Mapping[str, Any]) -> None:
        """After :meth:`load_state_dict`: take the state's learning rates as well, to the last bit.

        They need not be the rate that was last taken over (see :meth:`set_lr`), which comes with
        them: one that was set on the optimizer itself stays until another is taken over, and one
        that is still to be taken over will be. If only one of engine and state has a schedule, the
        live rate is kept.
        """
        if (self.scheduler is None) != (state["scheduler"] is None):
            return
        (group,) = self.optimizer.param_groups
        (saved,) = state["optimizer"]["param_groups"]
        for name in ("lr", "initial_lr"):
            if name in saved:
                group[name] = saved[name]
        # States of earlier versions do not say it.
        self.lr = state.get("lr", saved.get("initial_lr", saved["lr"]))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])

    def _set_peak(self, lr: float) -> None:
        if self.scheduler is not None:
            for schedule in self.scheduler._schedulers:
                schedule.base_lrs = [lr for _ in schedule.base_lrs]

    def close(self) -> None:
        """Let go of the parameters; the engine must not be used afterwards."""
