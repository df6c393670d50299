"""The options that both training functions have, checked when they are put together."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from agilerl.checks import (
    COUNT,
    FLAG,
    OPTIONAL_COUNT,
    InstanceOf,
    Number,
    OneOf,
    missing_members,
    require,
    warn,
)
from agilerl.hpo.mutation import Mutation
from agilerl.hpo.selection import Selection
from agilerl.training.callbacks.protocol import Callback, check_callback
from agilerl.training.collectors.dynamic_sampling import DynamicSampling, ZeroVariance
from agilerl.training.trackers.protocol import Tracker

_RULES: dict[str, Callable[[str, Any], None]] = {
    "max_steps": OPTIONAL_COUNT,
    "num_epochs": OPTIONAL_COUNT,
    "max_wall_seconds": Number(0, open_low=True, optional=True),
    "exit_code_on_sigterm": Number(0, 255, integer=True),
    "evaluation_interval": COUNT,
    "evaluation_rows": OPTIONAL_COUNT,
    "evaluation_samples": OPTIONAL_COUNT,
    "zero_variance": OneOf(("keep", "skip", "resample")),
    "max_resamples": COUNT,
    "evo_steps": OPTIONAL_COUNT,
    "tournament": InstanceOf(Selection, "a selection such as agilerl.hpo.TournamentSelection"),
    "checkpoint_steps": OPTIONAL_COUNT,
    "keep_checkpoints": COUNT,
    "allow_appended_rows": FLAG,
    "save_elite": InstanceOf(bool, "True, False"),
    "max_reward": Number(-math.inf, optional=True),
    "init_hp": InstanceOf(Mapping, "a dict"),
    "verbose": FLAG,
    "completions_interval": OPTIONAL_COUNT,
    "completions_shown": Number(2, integer=True),
    "trackers": InstanceOf((list, tuple), "a list of trackers"),
    "tensorboard": FLAG,
    "wb": FLAG,
    "wandb_kwargs": InstanceOf(Mapping, "a dict"),
}
OPTIONS_LINE = "    The options of both functions: those of :class:`TrainingOptions`."
"""Stands in a docstring where :func:`documents_options` fills them in."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_PATH = InstanceOf((str, os.PathLike), "a str or Path")
_DIRECTORIES = ("checkpoint_path", "resume_from", "elite_path", "tensorboard_log_dir")
_TRACKER_OPTIONS = {
    "tensorboard_log_dir": "tensorboard",
    "wandb_kwargs": "wb",
    "wandb_api_key": "wb",
}
"""Options that have an effect only where a tracker is on."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options that both training functions have, checked when the record is made.

    Args:
        max_steps: Steps per agent after which the run ends: prompts consumed, or with several turns
            the turns of all episodes. The last batch is not cut. None: no bound.
        num_epochs: Passes over the training prompts (or seeds) after which it ends, from this call
            on; of a run that is resumed, from the call that started it. None: no bound, or 1 where
            ``max_steps`` and ``max_wall_seconds`` are None too.
        max_wall_seconds: The run ends with the iteration in which it has taken this long, the time
            before it was resumed included. None: no bound.
        exit_code_on_sigterm: 143, which is 128 + 15, is what a program that SIGTERM ended has: it
            tells a scheduler that the job is not done. 0: that it is.
        evaluation_interval: Iterations from one evaluation to the next.
        evaluation_rows: Evaluate on so many rows of each test set, drawn at random, the same ones
            every time; None: on all.
        evaluation_samples: Evaluate on so many answers per row (episodes per evaluation seed), k of
            them, sampled as in training, with columns ``avg@k``, ``pass@k`` and, where answers can
            be compared, ``maj@k``; None: one greedy answer each. See ``docs/training.md``.
        zero_variance: What becomes of prompts whose completions all got the same reward (of seeds
            whose episodes all got the same return, or with credit per turn the same rewards of each
            turn), which teach nothing: ``"keep"``; ``"skip"`` leaves them out of ``learn``, also of
            its KL penalty and of what its means divide by; ``"resample"`` draws further batches
            until as many prompts as a batch has got different rewards, and learns from these.
            What was drawn for it counts as steps and in epochs.
        max_resamples: Further batches that an iteration may draw; prompts without different rewards
            fill what is lacking after them.
        checkpoint_steps: Write ``<checkpoint_path>/iteration_<number>`` every ``checkpoint_steps``
            iterations, and after the last one.
        checkpoint_path: The run directory.
        keep_checkpoints: How many of the newest checkpoints to keep, besides the one of highest
            fitness.
        resume_from: A run checkpoint, or a run directory: its newest one. ``pop`` and the
            environment, made as for the run, give the models and the data; all else, from
            hyperparameters to random streams, is the checkpoint's. With the same
            ``checkpoint_path`` the run's files are continued, with another they are copied up to
            the checkpoint. See ``docs/checkpoints.md``.
        allow_appended_rows: Whether the training data (or ``train_seeds``) may have more rows than
            those of the checkpoint, which come first in them. The pass that is under way goes on as
            it would have, and then over the appended rows; the next ones shuffle all rows together.
            False: such a checkpoint is refused, as one of other data always is.
        save_elite: Save the best agent whenever an evaluation brings a new best fitness.
        elite_path: Directory of that checkpoint. An earlier run's elite there is moved to
            ``<elite_path>.earlier_1`` (2, 3, ...) when this run saves its first one, which the
            evaluation before training does not do where there is an earlier one.
        max_reward: Completions (episodes) with at least this reward (return) count as accurate, 1.0
            when None.
        init_hp: Recorded in ``config.json`` and the W&B configuration; without effect otherwise.
        verbose: Show a progress bar and the run directory.
        tensorboard: Log to TensorBoard.
        tensorboard_log_dir: Parent of this run's event folder; None: in the run directory.
        wb: Log to Weights & Biases.
        wandb_kwargs: Further arguments of ``wandb.init``.
        wandb_api_key: W&B key; kept in memory only.
        tournament: Selection of a generation, such as ``agilerl.hpo.TournamentSelection``; None:
            the agents of ``pop`` are trained side by side.
        mutation: Mutation of a generation, such as ``agilerl.hpo.Mutations``.
        evo_steps: Iterations between two generations; every one is evaluated first.
        callbacks: Called while the run trains, in this order; they can end it. See
            :mod:`agilerl.training.callbacks`.
        completions_interval: Print a table of completions (transcripts of episodes) every
            ``completions_interval`` iterations, the best and the worst of groups, and one of
            answers after every evaluation, with ``verbose=False`` too; trackers get the same
            tables. None: none.
        completions_shown: Rows of such a table.
        trackers: Further trackers, such as ``agilerl.training.trackers.MLflowTracker()``. One that
            fails is named in the log and gets nothing more; the run goes on.

    Raises:
        ValueError: For a value or a combination that makes no sense.
        TypeError: For a value of the wrong type.
    """

    max_steps: int | None = None
    num_epochs: int | None = None
    max_wall_seconds: float | None = None
    exit_code_on_sigterm: int = 143
    evaluation_interval: int = 10
    evaluation_rows: int | None = None
    evaluation_samples: int | None = None
    zero_variance: ZeroVariance = "keep"
    max_resamples: int = 3
    checkpoint_steps: int | None = None
    checkpoint_path: str | Path | None = None
    keep_checkpoints: int = 2
    resume_from: str | Path | None = None
    allow_appended_rows: bool = False
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
    tournament: Selection | None = None
    mutation: Mutation | None = None
    evo_steps: int | None = None
    callbacks: Sequence[Callback] | None = None
    completions_interval: int | None = None
    completions_shown: int = 4
    trackers: Sequence[Tracker] | None = None

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            rule(name, vars(self)[name])
        if self.max_steps is None and self.num_epochs is None and self.max_wall_seconds is None:
            object.__setattr__(self, "num_epochs", 1)
        key = self.wandb_api_key
        require(  # the value is a secret: name the type only
            key is None or isinstance(key, str),
            f"wandb_api_key is of type {type(key).__name__}; it must be a str or None",
            TypeError,
        )
        for name in _DIRECTORIES:
            if (value := vars(self)[name]) is not None:
                object.__setattr__(self, name, _directory(name, value))
        InstanceOf((list, tuple), "a list of callbacks")("callbacks", self.callbacks)
        for number, callback in enumerate(self.callbacks or ()):
            check_callback(f"callbacks[{number}]", callback)
        self._check_combinations()
        if self.zero_variance != "resample" and self.max_resamples != 3:
            warn(f"max_resamples has no effect with zero_variance={self.zero_variance!r}.")
        for name, switch in _TRACKER_OPTIONS.items():
            if vars(self)[name] is not None and not vars(self)[switch]:
                warn(f"{name} has no effect without {switch}=True.")

    @property
    def accuracy_threshold(self) -> float:
        """Completions with at least this reward count as accurate."""
        return 1.0 if self.max_reward is None else float(self.max_reward)

    @property
    def sampling(self) -> DynamicSampling:
        """What becomes of groups without variance."""
        return DynamicSampling(self.zero_variance, self.max_resamples)

    def check_evaluation(self, evaluates: bool) -> None:
        """Refuse what is decided by fitness where there is no held-out data.

        Raises:
            ValueError: Naming the option.
        """
        choosing = {"tournament": self.tournament is not None, "save_elite": bool(self.save_elite)}
        for name, given in choosing.items():
            require(
                evaluates or not given,
                f"{name} chooses agents by their fitness, but there is none without held-out data "
                "(test_dataset=None): give the environment a test_dataset, or leave it out.",
            )
        for name in ("evaluation_rows", "evaluation_samples"):
            require(
                evaluates or vars(self)[name] is None,
                f"{name}={vars(self)[name]} was given, but there is no held-out data to evaluate "
                "on (test_dataset=None): give the environment a test_dataset, or leave it out.",
            )

    def check_elite_path(self, run_directory: Path) -> None:
        """Refuse an elite path whose replacement would take the run directory with it.

        Raises:
            ValueError: If ``run_directory`` is ``elite_path`` or lies in it.
        """
        if self.elite_path is not None:
            require(
                not run_directory.resolve().is_relative_to(Path(self.elite_path).resolve()),
                f"elite_path={str(self.elite_path)!r} holds the run directory "
                f"{str(run_directory)!r}, and saving the elite replaces what is there: choose a "
                f"directory of its own, such as {str(run_directory / 'elite')!r}.",
            )

    def _check_combinations(self) -> None:
        names = ("tournament", "mutation", "evo_steps")
        given = [name for name in names if vars(self)[name] is not None]
        missing = [name for name in names if name not in given]
        require(
            not given or not missing,
            f"Evolution needs tournament, mutation and evo_steps together: {' and '.join(given)} "
            f"given, {' and '.join(missing)} missing. Give all three, or none to train without it.",
        )
        absent = [] if self.mutation is None else missing_members(self.mutation, Mutation)
        require(
            not absent,
            f"mutation is a {type(self.mutation).__name__}, which lacks {', '.join(absent)}; pass "
            "one such as agilerl.hpo.Mutations",
            TypeError,
        )
        for number, tracker in enumerate(self.trackers or ()):
            lacking = missing_members(tracker, Tracker)
            require(
                not lacking,
                f"trackers[{number}] is a {type(tracker).__name__}, which lacks "
                f"{', '.join(lacking)}; pass objects such as "
                "agilerl.training.trackers.MLflowTracker()",
                TypeError,
            )
        require(
            self.checkpoint_steps is None or self.checkpoint_path is not None,
            f"checkpoint_steps={self.checkpoint_steps} needs checkpoint_path, the directory that "
            "the checkpoints go to.",
        )
        require(
            not self.save_elite or self.elite_path is not None,
            "save_elite=True needs elite_path, the directory for the best agent's checkpoint.",
        )
        require(
            self.elite_path is None or bool(self.save_elite),
            f"elite_path={str(self.elite_path)!r} was given without save_elite=True: set it, or "
            "leave elite_path out.",
        )


def documents_options(function: FunctionT) -> FunctionT:
    """Fill the record's descriptions into the ``Args`` of a function with these arguments.

    They take the place of the line :data:`OPTIONS_LINE` in its docstring.
    """
    if function.__doc__ is None:  # python -OO
        return function
    own = inspect.signature(function).parameters
    described = [text for name, text in option_descriptions().items() if name in own]
    function.__doc__ = inspect.cleandoc(function.__doc__).replace(
        OPTIONS_LINE, "\n".join(described)
    )
    return function


def option_descriptions() -> dict[str, str]:
    """The entry of every option in the ``Args`` section of :class:`TrainingOptions`, indented."""
    doc = inspect.cleandoc(str(TrainingOptions.__doc__))
    section = doc.partition("Args:\n")[2].partition("\n\n")[0]
    # An entry begins at a line indented by four, and goes on with deeper ones.
    entries = re.split(r"\n(?=    \S)", section)
    return {entry.split(":")[0].strip(): entry for entry in entries}


def options_among(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a training function's arguments that :class:`TrainingOptions` has."""
    names = {option.name for option in fields(TrainingOptions)}
    return {name: value for name, value in values.items() if name in names}


def _directory(name: str, value: Any) -> Path:
    """A directory, which need not exist, with its ``~`` replaced."""
    _PATH(name, value)
    require(bool(str(value)), f"{name} is empty: name a directory.")
    path = Path(os.path.expanduser(value))
    require(
        path.is_dir() or not path.exists(),
        f"{name}={str(value)!r} is a file: name a directory.",
    )
    return path
