"""Which optimizer steps the adapters, and whether a checkpoint can hold its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from agilerl.checks import require, shorten
from agilerl.llm.config import OptimizerSettings

OPTIMIZERS = ("adamw", "adamw_8bit")
FACTORY = "a function (parameter_groups, lr) -> torch.optim.Optimizer"
REMEDY = f"it must be {FACTORY}"


def check_optimizer(name: str, value: Any) -> None:
    """Refuse what is neither the name of an optimizer nor a function."""
    named = isinstance(value, str) and value in OPTIMIZERS
    allowed = " or ".join(map(repr, OPTIMIZERS))
    error = ValueError if isinstance(value, str) else TypeError
    require(
        named or callable(value),
        f"{name} is {value!r}; it must be {allowed}, or {FACTORY}, such as torch.optim.SGD",
        error,
    )


def build_optimizer(
    groups: list[dict[str, Any]], lr: float, settings: OptimizerSettings
) -> torch.optim.Optimizer:
    """An optimizer over parameter groups.

    Args:
        groups: What is trained, such as ``{"params": [...], "lr": 1e-4}``.
        lr: Learning rate, for groups that do not name their own.
        settings: Which one.

    Raises:
        TypeError: If the user's function returns no optimizer.
        ValueError: If its optimizer trains other parameters, or in other groups.
    """
    if settings.kind == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        adamw: Callable[..., torch.optim.Optimizer] = AdamW8bit
    elif settings.kind == "adamw":
        adamw = torch.optim.AdamW
    else:
        return _users_optimizer(groups, lr, settings.kind)
    return adamw(groups, lr=lr, betas=settings.betas, weight_decay=settings.weight_decay)


def _users_optimizer(
    groups: list[dict[str, Any]], lr: float, make: Callable[..., Any]
) -> torch.optim.Optimizer:
    # Copies: torch's optimizers write their settings into the groups that they are given.
    made = make([dict(group) for group in groups], lr)
    require(
        isinstance(made, torch.optim.Optimizer),
        f"optimizer returned {shorten(made)} of type {type(made).__name__}; {REMEDY}",
        TypeError,
    )
    given, found = (
        [[id(parameter) for parameter in group["params"]] for group in each]
        for each in (groups, made.param_groups)
    )
    require(
        given == found,
        "optimizer returned one over other parameters or parameter groups than it was given; hand "
        "the list of groups on as it is",
    )
    for own, group in zip(made.param_groups, groups, strict=True):
        own["lr"] = group.get("lr", lr)
    return made


def check_storable(state: Mapping[str, Any]) -> None:
    """Refuse the state of an optimizer that a checkpoint cannot hold.

    Args:
        state: The optimizer's ``state_dict()``.

    Raises:
        TypeError: If it holds something else than tensors, numbers and text.
    """
    for number, of_parameter in state["state"].items():
        values = dict(of_parameter) if isinstance(number, int) else {str(number): of_parameter}
        for name, value in values.items():
            inner = value.values() if isinstance(value, dict) else [value]
            plain = torch.Tensor | bool | int | float | str | None
            bad = [each for each in inner if not isinstance(each, plain)]
            require(
                isinstance(number, int) and not bad,
                f"the state of optimizer holds {name!r}, which is {shorten(value)}; a checkpoint "
                "can hold tensors and plain numbers of each parameter: use another optimizer",
                TypeError,
            )
