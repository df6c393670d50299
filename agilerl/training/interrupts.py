"""Ctrl-C and SIGTERM ask a run to finish what it does and end; a second Ctrl-C stops it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Self

from agilerl.training.logs.terminal import in_notebook

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class GracefulStop:
    """Context in which the first SIGINT or SIGTERM only sets ``requested``.

    The handlers that were installed before come back on exit. Outside the main thread, where Python
    allows no handlers, and for signals that the process ignores (``nohup``-style), nothing changes.
    Processes forked within it, such as a ``multiprocessing.Pool`` of a reward function, get the
    earlier handlers back at once, so that they can be terminated.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        """Name of the signal that asked for the stop, None while there was none."""
        self._previous: dict[signal.Signals, Any] = {}
        self._in_notebook = in_notebook()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                previous = signal.getsignal(number)
                # None: a handler that C code installed; it could not be put back.
                if previous is not None and previous is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        _active.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore_handlers()

    def restore_handlers(self) -> None:
        """Bring back the handlers that were installed before."""
        _active.discard(self)
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before, name = self.requested, signal.Signals(number).name
        if before is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = strongest((before, name))
        if before is not None:
            return
        # print() is not safe here: the signal may have interrupted another print(). Nor is there
        # always a reader left: in `train.py 2>&1 | tee log` the same Ctrl-C ends tee.
        how = "Interrupt the kernel" if self._in_notebook else "Press Ctrl-C"
        again = f"{how} again" if number == signal.SIGINT else how
        message = (
            f"\n{name}: finishing this iteration, or this batch of an evaluation, then saving. "
            f"{again} to stop at once without saving.\n"
        )
        if self._in_notebook:  # its stream may be written to here, and the file is not shown
            sys.stderr.write(message)
            return
        with contextlib.suppress(OSError):
            os.write(2, message.encode())


_active: weakref.WeakSet[GracefulStop] = weakref.WeakSet()


def _restore_handlers_in_child() -> None:
    for stop in list(_active):
        stop.restore_handlers()


os.register_at_fork(after_in_child=_restore_handlers_in_child)


def strongest(requested: Iterable[str | None]) -> str | None:
    """Of several signals the one to act on: SIGTERM, which ends the program, before SIGINT."""
    names = set(requested)
    return next((number.name for number in _SIGNALS if number.name in names), None)
