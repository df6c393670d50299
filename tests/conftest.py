"""How every test runs: one thread a process, no model hub, and no process that is not announced."""

from __future__ import annotations

import importlib.util
import os
import platform
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, and for what tests start: pools of threads would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# How fast examples are made says something about the machine, not about the code.
settings.register_profile(
    "any machine", suppress_health_check=[HealthCheck.too_slow], deadline=None
)
settings.load_profile("any machine")

# A shell ignores Ctrl-C for what it starts in the background, and some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

STARTING = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
started: list[str] = []


def note_started(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTING:
        started.append(f"{event}{arguments[:2]}")


# It runs a program the first time a process asks, which some libraries do while a model is loaded.
platform.processor()
# The one place that sees every way to start a process. A hook cannot be taken off again.
sys.addaudithook(note_started)


@pytest.fixture(autouse=True)
def no_hidden_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that starts a process says so, so that ``-m "not process"`` leaves it out."""
    started.clear()
    yield
    if started and request.node.get_closest_marker("process") is None:
        pytest.fail(f"needs @pytest.mark.process, because it started {started[0]}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs packages that are not there, and begins with what takes longest."""
    for item in items:
        skip_without_packages(item)
    # So that no worker is left with it at the end.
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=rank)


def skip_without_packages(item: pytest.Item) -> None:
    needed = [name for marker in item.iter_markers("needs") for name in marker.args]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))


def rank(item: pytest.Item) -> int:
    """0 for slow tests, 1 for those that start processes, 2 for the rest."""
    markers = ("slow", "process")
    found = [rank for rank, name in enumerate(markers) if item.get_closest_marker(name)]
    return found[0] if found else len(markers)
