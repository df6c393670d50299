"""What is printed where: nothing twice, and in a notebook what interrupting does there."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from interpreters import environment, python
from nbclient import NotebookClient

from agilerl.training.logs.terminal import in_notebook, is_printed_by_logging

SETTINGS = {
    "none": ("", 1),
    "to the terminal": ("logging.basicConfig(level=logging.INFO)", 1),
    "only warnings": ("logging.basicConfig(level=logging.WARNING)", 1),
    "to a file": ("logging.basicConfig(filename='l.txt', level=logging.INFO)", 1),
    "with rich": (
        "from rich.console import Console\n"
        "from rich.logging import RichHandler\n"
        "handler = RichHandler(console=Console(width=200))\n"  # lines are not wrapped
        "logging.basicConfig(handlers=[handler], level=logging.INFO, format='%(message)s')",
        1,
    ),
}
RUN = """
import logging, os, signal
{setting}
from training_fakes import FakeAgent, FakeGym
from agilerl.training.train_llm import finetune_llm_reasoning
stop = lambda agent: os.kill(os.getpid(), signal.SIGINT)
finetune_llm_reasoning([FakeAgent(on_learn=stop)], FakeGym(), max_steps=4, checkpoint_path="r")
"""


@pytest.mark.process
@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_is_said_twice(setting: str) -> None:
    result = python(RUN.format(setting=SETTINGS[setting][0]))
    assert result.returncode == 0, result.stderr
    printed = " ".join((result.stdout + result.stderr).split())
    for said in ("Run directory:", "Stopped by SIGINT after iteration 1"):
        assert printed.count(said) == 1, printed
    assert "Press Ctrl-C again" in printed and "the kernel" not in printed
    if setting == "to a file":
        assert Path("l.txt").read_text().count("Run directory:") == 1


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.Logger("alone", logging.INFO)
    yield logger
    logger.handlers.clear()


def test_which_handlers_print(logger: logging.Logger, tmp_path: Path) -> None:
    assert not is_printed_by_logging(logger, logging.INFO)
    for quiet in (logging.NullHandler(), logging.StreamHandler(io.StringIO())):
        logger.addHandler(quiet)
    assert not is_printed_by_logging(logger, logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    assert is_printed_by_logging(logger, logging.INFO)
    handler.setLevel(logging.WARNING)
    assert not is_printed_by_logging(logger, logging.INFO)
    child = logging.Logger("child")
    child.parent = logger
    assert is_printed_by_logging(child, logging.ERROR)
    child.propagate = False
    assert not is_printed_by_logging(child, logging.ERROR)


@pytest.mark.slow
@pytest.mark.process
def test_a_notebook_says_what_interrupting_does_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    code = RUN.format(setting="") + "print('learned')"
    cells = [nbformat.v4.new_code_cell(code.replace('"r")', '"r", completions_interval=1)'))]
    notebook: Any = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = notebook.cells[0].outputs
    text = "".join(each.text for each in outputs if each.output_type == "stream")
    assert text.count("Interrupt the kernel (the square button) to end the run") == 1
    assert "SIGINT: finishing this iteration, or" in text and "Interrupt the kernel again" in text
    assert "Ctrl-C" not in text and "learned" in text
    # The table is the notebook's own output, which neither wraps nor loses its box.
    tables = [each.data for each in outputs if "text/html" in each.get("data", {})]
    assert any(
        "white-space:pre" in each["text/html"] and "best" in each["text/html"] for each in tables
    )


def test_this_is_no_notebook() -> None:
    assert not in_notebook()
