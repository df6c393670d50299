"""Whether a saved optimizer and schedule are those of an engine, and what of them it takes over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from agilerl.checks import require
from agilerl.llm.engine.local import LocalEngine

PLACE = ("params", "lr", "initial_lr")
"""Of a saved group of AdamW. Betas, weight decay and so on are the engine's own."""


def restored(engine: LocalEngine, state: Mapping[str, Any], keep_lr: bool) -> LocalEngine:
    """A new engine, with a saved optimizer and schedule; closed if it does not take them.

    Raises:
        ValueError: If the state is damaged, or that of another optimizer or other parameters.
    """
    try:
        engine.load_state_dict(_fitting_state(engine, state), keep_lr=keep_lr)
    except Exception as error:  # whatever torch runs into in content that is not its own
        engine.close()
        raise ValueError(
            "the checkpoint's optimizer state is damaged, or that of another model or optimizer "
            f"({error!r}); load without load_optimizer, or use another checkpoint"
        ) from error
    return engine


def _fitting_state(engine: LocalEngine, state: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state as :meth:`LocalEngine.load_state_dict` takes it.

    Raises:
        ValueError: If it is the state of another optimizer or schedule, or of other parameters.
    """
    saved, kind = state["optimizer"], state.get("kind")
    require(
        kind == engine.kind,
        f"it is that of {_argument(kind)}, but the agent's is {_argument(engine.kind)}; give the "
        "agent the optimizer that was saved",
    )
    shapes = {number: p.shape for number, p in enumerate(engine.parameters)}
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    fits = numbers == list(shapes) and saved["state"].keys() <= shapes.keys()
    if kind is None:
        fits = fits and all(
            name == "step" or values.shape == shapes[number]
            for number, moments in saved["state"].items()
            for name, values in moments.items()
        )
    require(fits, "its moments have other shapes than this agent's parameters")
    if engine.scheduler is not None and state["scheduler"] is not None:
        same = _form(state["scheduler"]) == _form(engine.scheduler.state_dict())
        require(same, "its schedule is of another kind")
    pairs = zip(engine.optimizer.param_groups, saved["param_groups"], strict=True)
    groups = [own | _taken(group, kind) for own, group in pairs]
    return {**state, "optimizer": {**saved, "param_groups": groups}}


def _argument(kind: str | None) -> str:
    """The constructor argument that gives an optimizer of this kind."""
    names = {None: "'adamw'", "AdamW8bit": "'adamw_8bit'"}
    return f"optimizer={names.get(kind, f'a function that makes {kind}')}"


def _taken(group: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    """Of another optimizer than AdamW all numbers: some count there, or adapt their rate."""
    return {
        name: value
        for name, value in group.items()
        if name in PLACE or (kind is not None and isinstance(value, int | float))
    }


def _form(state: Any) -> Any:
    """A state with types in place of its values."""
    if isinstance(state, dict):
        return {name: _form(value) for name, value in state.items()}
    if isinstance(state, list):
        return [_form(value) for value in state]
    return "number" if type(state) in (int, float) and math.isfinite(state) else type(state)
