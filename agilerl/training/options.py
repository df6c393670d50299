"""The options that all training functions share, checked when they are put together."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any

from agilerl.training.arguments import check_count, check_directory, check_seconds, check_type


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """The options that all training functions share, checked when the record is made.

    A leading ``~`` of a path is the home directory.

    Raises:
        ValueError: For a value or a combination that makes no sense.
        TypeError: For a value of the wrong type.
    """

    max_steps: int | None = None
    num_epochs: int | None = None
    max_wall_seconds: float | None = None
    evaluation_interval: int = 10
    checkpoint_steps: int | None = None
    checkpoint_path: str | Path | None = None
    keep_checkpoints: int = 2
    resume_from: str | Path | None = None
    save_elite: bool | None = None
    elite_path: str | Path | None = None
    max_reward: float | None = None
    init_hp: Mapping[str, Any] | None = None
    verbose: bool = True
    tensorboard: bool = False
    tensorboard_log_dir: str | Path | None = None
    wb: bool = False
    wandb_kwargs: Mapping[str, Any] | None = None
    wandb_api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.max_steps is None and self.num_epochs is None:
            raise ValueError(
                "max_steps and num_epochs are both None, which makes an endless run: set max_steps "
                "(per agent), num_epochs (passes over the training data) or both."
            )
        if self.max_wall_seconds is not None:
            check_seconds("max_wall_seconds", self.max_wall_seconds)
        check_count("evaluation_interval", self.evaluation_interval)
        check_count("keep_checkpoints", self.keep_checkpoints)
        for name in ("max_steps", "num_epochs", "checkpoint_steps"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in ("verbose", "tensorboard", "wb"):
            check_type(name, getattr(self, name), bool, "True or False")
        if self.save_elite is not None:
            check_type("save_elite", self.save_elite, bool, "True, False or None")
        for name in ("init_hp", "wandb_kwargs"):
            if getattr(self, name) is not None:
                check_type(name, getattr(self, name), Mapping, "a dict or None")
        if self.wandb_api_key is not None and not isinstance(self.wandb_api_key, str):
            # The value is a secret: name the type only.
            raise TypeError(
                f"wandb_api_key must be a str or None, not {type(self.wandb_api_key).__name__}."
            )
        self._check_max_reward()
        self._check_paths()
        self._warn_without_effect()

    @property
    def accuracy_threshold(self) -> float:
        """Completions with at least this reward count as accurate."""
        return 1.0 if self.max_reward is None else float(self.max_reward)

    def total_prompts(self, rows: int, agents_per_env: int) -> int:
        """Prompts per agent that the run will consume, up to the last batch.

        Args:
            rows: Training rows of an environment.
            agents_per_env: Agents that share one.
        """
        bounds = []
        if self.max_steps is not None:
            bounds.append(self.max_steps)
        if self.num_epochs is not None:
            bounds.append(-(-self.num_epochs * rows // agents_per_env))
        return min(bounds)

    def _check_max_reward(self) -> None:
        if self.max_reward is None:
            return
        if isinstance(self.max_reward, bool) or not isinstance(self.max_reward, Real):
            raise TypeError(
                f"max_reward={self.max_reward!r} must be a number, or None for 1.0: the reward "
                "from which a completion counts as accurate."
            )
        if not math.isfinite(self.max_reward):
            raise ValueError(f"max_reward={self.max_reward!r} must be finite, or None for 1.0.")

    def _check_paths(self) -> None:
        for name in ("checkpoint_path", "resume_from", "elite_path", "tensorboard_log_dir"):
            value = getattr(self, name)
            check_directory(name, value)
            if value is not None:
                object.__setattr__(self, name, Path(os.path.expanduser(value)))
        if self.checkpoint_steps is not None and self.checkpoint_path is None:
            raise ValueError(
                f"checkpoint_steps={self.checkpoint_steps} needs checkpoint_path, the directory "
                "that the checkpoints go to."
            )
        if self.save_elite and self.elite_path is None:
            raise ValueError(
                "save_elite=True needs elite_path, the directory for the best agent's checkpoint."
            )
        if self.elite_path is not None and not self.save_elite:
            raise ValueError(
                f"elite_path={str(self.elite_path)!r} was given without save_elite=True: set it, "
                "or leave elite_path out."
            )

    def _warn_without_effect(self) -> None:
        pairs = (
            ("tensorboard_log_dir", "tensorboard"),
            ("wandb_kwargs", "wb"),
            ("wandb_api_key", "wb"),
        )
        for name, switch in pairs:
            if getattr(self, name) is not None and not getattr(self, switch):
                warnings.warn(
                    f"{name} has no effect without {switch}=True.", UserWarning, stacklevel=5
                )


def options_among(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a training function's arguments that :class:`LoopOptions` has."""
    names = {option.name for option in fields(LoopOptions)}
    return {name: value for name, value in values.items() if name in names}
