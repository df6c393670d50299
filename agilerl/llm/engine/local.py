"""The engine of a single process: a plain optimizer over the trained adapters' parameters."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR
from torch.optim.optimizer import ParamsT

from agilerl.distributed import Ranks
from agilerl.llm.config import LRSchedule, OptimizerSettings
from agilerl.llm.engine.optimizers import build_optimizer, check_storable


def build_schedule(optimizer: torch.optim.Optimizer, schedule: LRSchedule) -> SequentialLR:
    """Linear warm-up from 1/n of the learning rate, then what ``schedule`` says, per ``learn``."""
    warmup, kind = schedule.warmup, schedule.kind
    decay = max((schedule.steps or 0) - warmup, 1)

    def after_warmup(epoch: int) -> float:
        done = min(epoch / decay, 1.0)
        if kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0 - done if kind == "linear" else 1.0

    schedules: list[LRScheduler] = [LambdaLR(optimizer, after_warmup)]
    if warmup:
        schedules.insert(0, LambdaLR(optimizer, lambda epoch: min((epoch + 1) / warmup, 1.0)))
    return SequentialLR(optimizer, schedules, milestones=[warmup] if warmup else [])


def scheduled_rate(group: Mapping[str, Any], lr: float) -> float:
    """A parameter group's learning rate at its place in the schedule, with ``lr`` as the peak."""
    peak = group.get("initial_lr", group["lr"])
    if peak in (0, lr):
        return float(group["lr"] if peak else lr)
    return float(lr * group["lr"] / peak)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float | Sequence[float]) -> None:
    """Set the learning rate at once, and where it is scheduled its peak.

    Args:
        optimizer: Its parameter groups are changed.
        lr: One for all groups, or one per group.
    """
    for group, rate in zip(optimizer.param_groups, _rate_per_group(optimizer, lr), strict=True):
        group["lr"] = rate
        if "initial_lr" in group:
            group["initial_lr"] = rate


def _rate_per_group(optimizer: torch.optim.Optimizer, lr: float | Sequence[float]) -> list[float]:
    return list(lr) if isinstance(lr, Sequence) else [lr] * len(optimizer.param_groups)


class LocalEngine:
    """Gradient accumulation, clipping and optimizer of one process.

    Args:
        parameters: What is trained, as torch's optimizers take it: parameters, or groups of them
            such as ``{"params": [...], "lr": 1e-4}``.
        lr: Learning rate, for groups that do not name their own.
        schedule: Warm-up and decay of it; None: constant.
        settings: Of the optimizer.
    """

    lockstep = False
    sharded = False
    """Whether checkpoints keep the optimizer in one file per process."""

    def __init__(
        self,
        parameters: ParamsT,
        lr: float,
        schedule: LRSchedule | None = None,
        settings: OptimizerSettings | None = None,
    ) -> None:
        self.settings = settings or OptimizerSettings()
        self.optimizer = build_optimizer(_as_groups(parameters), lr, self.settings)
        adamw = self.settings.kind == "adamw"
        self.kind = None if adamw else type(self.optimizer).__name__
        """Which optimizer's state :meth:`state_dict` gives; None: AdamW's."""
        self._state_is_checked = adamw
        groups = self.optimizer.param_groups
        self.parameters: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        self.lrs: list[float] = [group["lr"] for group in groups]
        """The learning rate of each parameter group as last set by :meth:`set_lr`."""
        self.scheduler = None if schedule is None else build_schedule(self.optimizer, schedule)
        self.ranks = Ranks()
        self.loss_scale = 1.0

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Take over new learning rates; those that are the current ones change nothing.

        Args:
            lr: One for all parameter groups, or one per group; the peak where it is scheduled.
        """
        lrs = _rate_per_group(self.optimizer, lr)
        if lrs == self.lrs:
            return
        for group, new, current in zip(self.optimizer.param_groups, lrs, self.lrs, strict=True):
            if new != current:
                group["lr"] = new if self.scheduler is None else scheduled_rate(group, new)
                if "initial_lr" in group:
                    group["initial_lr"] = new
        self._follow_peaks()
        self.lrs = lrs

    def set_adamw(self, settings: OptimizerSettings) -> None:
        """Take over weight decay and betas; an optimizer of the user's own has its own."""
        if isinstance(settings.kind, str):
            for group in self.optimizer.param_groups:
                group |= {"weight_decay": settings.weight_decay, "betas": settings.betas}

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients, of ``loss_scale`` times the loss."""
        (loss if self.loss_scale == 1.0 else loss * self.loss_scale).backward()

    def step(self, max_grad_norm: float) -> float:
        """Clip, step if all gradients are finite, clear; returns the norm before clipping."""
        self._unscale_gradients()
        self._reduce_gradients()
        norm = float(nn.utils.clip_grad_norm_(self.parameters, max_grad_norm))
        if math.isfinite(norm):
            self.optimizer.step()
            self._check_state()
        self.discard()
        return norm

    def _check_state(self) -> None:
        """Refuse after the first step, not at the first checkpoint, what none can hold."""
        if not self._state_is_checked:
            check_storable(self.optimizer.state_dict())
            self._state_is_checked = True

    def _unscale_gradients(self) -> None:
        if self.loss_scale != 1.0:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad /= self.loss_scale

    def _reduce_gradients(self) -> None:
        """Make the gradients those of all ranks."""

    def discard(self) -> None:
        """Clear accumulated gradients and the loss scale."""
        self.loss_scale = 1.0
        for parameter in self.parameters:
            parameter.grad = None

    def advance_schedule(self) -> None:
        """Advance the learning-rate schedule by one ``learn``."""
        if self.scheduler is None:
            return
        self._follow_peaks()
        with warnings.catch_warnings():
            # Where no group had two different rewards, there was rightly no optimizer step before.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Moments, schedule position, and the learning rates that were last taken over."""
        kind = {} if self.kind is None else {"kind": self.kind}
        return {"optimizer": self.optimizer.state_dict(), **kind, **self._schedule_state()}

    def _schedule_state(self) -> dict[str, Any]:
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"scheduler": scheduler, "lr": self.lrs[0] if len(self.lrs) == 1 else self.lrs}

    def load_state_dict(self, state: Mapping[str, Any], *, keep_lr: bool = False) -> None:
        """Restore what :meth:`state_dict` of any engine gave.

        Args:
            state: The moments are copied.
            keep_lr: Keep the live learning rates, and take over only how far the schedule was.
                Otherwise they are the state's, unless only one of engine and state has a schedule:
                those of the optimizer, and those last set by :meth:`set_lr`, which differ where one
                was set on the optimizer itself.

        Raises:
            ValueError: If the state is that of other parameters.
        """
        saved_groups = state["optimizer"]["param_groups"]
        same_kind = (self.scheduler is None) == (state["scheduler"] is None)
        live = [dict(group) for group in self.optimizer.param_groups]
        self._load_optimizer(state["optimizer"])
        if self.scheduler is not None and same_kind:
            self.scheduler.load_state_dict(state["scheduler"])
        if same_kind and not keep_lr:
            self.lrs = _last_set_rates(state)
            self._write_rates(saved_groups)
        else:
            followed = saved_groups if same_kind else live
            pairs = zip(followed, self.lrs, strict=True)
            self._write_rates([self._own_rate(group, lr) for group, lr in pairs])
            self._follow_peaks()

    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        # torch would keep the given moments, and step them in place.
        self.optimizer.load_state_dict(copy.deepcopy(dict(state)))

    def _own_rate(self, group: Mapping[str, Any], lr: float) -> dict[str, float]:
        """A group's learning rate with ``lr`` as the peak, as far on as ``group`` is."""
        if self.scheduler is None:
            return {"lr": lr}
        return {"lr": scheduled_rate(group, lr), "initial_lr": lr}

    def _write_rates(self, rates: Sequence[Mapping[str, Any]]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group.pop("initial_lr", None)
            group |= {name: rate[name] for name in ("lr", "initial_lr") if name in rate}

    def _follow_peaks(self) -> None:
        """Have the schedule decay from the optimizer's peaks: they may have been set there."""
        if self.scheduler is not None:
            peaks = [group["initial_lr"] for group in self.optimizer.param_groups]
            for schedule in self.scheduler._schedulers:
                schedule.base_lrs = list(peaks)

    def close(self) -> None:
        """Release the parameters; the engine must not be used afterwards."""


def _as_groups(parameters: ParamsT) -> list[dict[str, Any]]:
    """Parameter groups, also of parameters that are in none."""
    given: list[Any] = list(parameters)
    return given if given and isinstance(given[0], dict) else [{"params": given}]


def _last_set_rates(state: Mapping[str, Any]) -> list[float]:
    """The learning rates that a saved engine had last taken over, by parameter group."""
    groups = state["optimizer"]["param_groups"]
    # Of a single group it is a number, and states of earlier versions have none.
    lrs = state.get("lr", [group.get("initial_lr", group["lr"]) for group in groups])
    return list(lrs) if isinstance(lrs, Sequence) else [lrs]
