"""What shows up in front of the user: a notebook or a terminal, and what logging prints there."""

from __future__ import annotations

import logging
import sys

# Here, not when it is needed: rich draws from the global random stream when it is imported, which
# in the middle of a run would change what is drawn after it.
from rich.logging import RichHandler


def in_notebook() -> bool:
    """Whether this is the kernel of a Jupyter notebook, where the user has no terminal."""
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    return type(get_ipython()).__name__ == "ZMQInteractiveShell"


def is_printed_by_logging(logger: logging.Logger, level: int) -> bool:
    """Whether a message of this level goes from ``logger`` to the terminal (or notebook)."""
    if not logger.isEnabledFor(level):
        return False
    at: logging.Logger | None = logger
    while at is not None:
        if any(level >= each.level and _prints(each) for each in at.handlers):
            return True
        at = at.parent if at.propagate else None
    return False


def _prints(handler: logging.Handler) -> bool:
    if isinstance(handler, logging.StreamHandler):
        return handler.stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, RichHandler)
