"""A run whose terminal, pipe or log file breaks goes on, stops when asked, and saves."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from forking import start, wait
from training_fakes import FakeAgent, FakeGym

from agilerl.training.train_llm import finetune_llm_reasoning


def pipe_without_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_device() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def run_that_loses_its_output(path: Path, broken: Callable[[], int]) -> None:
    """In iteration 2 both streams break, and Ctrl-C is pressed, as when ``tee`` dies of it."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # In the place of pytest's streams.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))

    def learn(agent: FakeAgent) -> None:
        if len(agent.learned) == 1:
            descriptor = broken()
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        if len(agent.learned) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    agent = FakeAgent(on_learn=learn)
    finetune_llm_reasoning([agent], FakeGym(rows=99), max_steps=90, checkpoint_path=path)
    assert len(agent.learned) == 4

    from tqdm.auto import tqdm

    def take_turns() -> None:
        # Given back: forked processes share this lock, and the tests after this one need it.
        with tqdm.get_lock():
            pass

    other = threading.Thread(target=take_turns, daemon=True)
    other.start()
    other.join(timeout=60)
    assert not other.is_alive()  # or the bars of other threads would wait for ever


@pytest.mark.process
@pytest.mark.parametrize("broken", [pipe_without_reader, full_device])
def test_a_run_outlives_its_output(broken: Callable[[], int], tmp_path: Path) -> None:
    assert wait(start(lambda: run_that_loses_its_output(tmp_path / "c", broken))) == 0
    folders = [entry.name for entry in (tmp_path / "c").iterdir() if entry.is_dir()]
    assert folders == ["iteration_00000004"]
