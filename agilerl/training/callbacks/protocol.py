"""What a callback is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agilerl.checks import InstanceOf, require

Columns = dict[str, float]


@dataclass(frozen=True)
class RunProgress:
    """How far a run is, as a callback is told.

    After an iteration of one agent::

        iteration  12
        rows       [{"iteration": 12, "agent": 0, "steps": 192, "reward_mean": 0.5, ...}]
    """

    iteration: int
    """Iterations that are completed."""
    wall_seconds: float
    """Seconds that the run has taken, the time before it was resumed included."""
    agents: list[Any]
    """The agents, which train on as the callback leaves them."""
    rows: list[Columns]
    """Columns of ``metrics.csv`` by name, a dict per agent: in ``on_iteration`` those of the
    iteration without its evaluation, in ``on_evaluation`` with it; elsewhere the last ones of this
    call, and empty before there are any."""
    directory: Path
    """The run directory."""
    evaluates: bool = True
    """Whether there are evaluations: False without held-out data."""
    is_main_process: bool = True
    """False on all processes but the one that writes: print and save there only."""
    checkpoint: Path | None = None
    """In ``on_checkpoint`` the run checkpoint that was written, in ``on_end`` the last one that
    this call has written, if any; else None."""
    stopped_by: str | None = None
    """In ``on_end`` why it ended early: ``"SIGINT"``, ``"SIGTERM"`` or what a callback said."""
    _say: Callable[[str], None] = field(default=print, repr=False)
    _stop: Callable[[str], None] = field(default=print, repr=False)

    def stop(self, reason: str) -> None:
        """End the run as if it had reached a bound: evaluated, and saved with ``checkpoint_steps``.

        The iteration under way is finished, also one that only begins.

        It stays ended when it is resumed with a callback of the same settings.

        Args:
            reason: Is shown to the user.
        """
        self._stop(reason)

    def say(self, text: str) -> None:
        """Print, beside the progress bar and on one process only."""
        self._say(text)


class Callback:
    """Base of callbacks: every method does nothing, override those that you need.

    What they return is not used; to end the run call ``progress.stop(reason)``.

    With several processes each has its callbacks, which are called with the same rows. All
    processes stop where one of them asks for it, and an exception on one is raised on all.

    Attributes without a leading underscore are taken for settings, which have to be the same in all
    processes if they are numbers or text.
    """

    def on_start(self, progress: RunProgress) -> None:
        """Before the first iteration of a call, also of one that resumes a run.

        The place to forget an earlier run, if the object is to be used for several.
        """

    def on_iteration_start(self, progress: RunProgress) -> None:
        """Before every iteration; ``progress.iteration`` is the one before it."""

    def on_iteration(self, progress: RunProgress) -> None:
        """After every agent has learned, before this iteration's evaluation if there is one."""

    def on_evaluation(self, progress: RunProgress) -> None:
        """After all agents were evaluated, also before training."""

    def on_checkpoint(self, progress: RunProgress) -> None:
        """After a run checkpoint was written, also because of a signal or a failing callback."""

    def on_end(self, progress: RunProgress) -> None:
        """When the run has ended, but not by an error, and is saved."""

    def state_dict(self) -> dict[str, Any]:
        """What has to survive until the run is resumed; plain JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave, before :meth:`on_start`."""

    def __repr__(self) -> str:
        plain = (int, float, str, type(None))
        settings = {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_") and isinstance(value, plain)
        }
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in settings.items())})"


def check_callback(name: str, callback: Any) -> None:
    """Refuse what is no callback, or has a method that looks like one of a callback but is none.

    Args:
        name: What messages call it.
        callback: What the user gave.

    Raises:
        TypeError: Naming the method and those that there are.
    """
    InstanceOf(Callback, "an agilerl.training.callbacks.Callback", optional=False)(name, callback)
    hooks = [method for method in vars(Callback) if method.startswith("on_")]
    others = [each for each in dir(callback) if each.startswith("on_") and each not in hooks]
    require(
        not others,
        f"{name} is a {type(callback).__name__} with {', '.join(others)}, which would never be "
        f"called: the methods of a callback are {', '.join(hooks)}. Rename it; helpers of your own "
        "need another name than on_...",
        TypeError,
    )
