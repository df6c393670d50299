"""A reward for programs: run the code of a completion against the tests of its row."""

from __future__ import annotations

import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from agilerl.checks import COUNT, FLAG, Number, require, shorten

_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(\S*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE
)
_PYTHON = ("", "py", "python", "python3")
_LAUNCHER = Path(__file__).with_name("limited_program.py")
_MEGABYTE = 2**20
_POLL_SECONDS = 0.005


@dataclass(frozen=True)
class CodeTest:
    """One test of a program: assertions that run after it, or what it prints for an input."""

    assertions: str | None = None
    """Python code that is appended to the program."""
    stdin: str = ""
    stdout: str | None = None
    """Compared without white space at the ends of lines and of the whole."""


class CodeExecutionReward:
    """Does the program in a completion pass its tests?

    The program is the last Python block between fences (three backticks); without one the reward is
    0. Every test runs it anew, in a process of its own: in an empty folder, without the environment
    variables of this process, with limits on time, memory, processes and output. What goes beyond a
    limit fails its test.

    Programs may not start processes, nor threads; where this process runs as root, only Python
    itself refuses processes, and threads are possible.

    **This keeps accidents away from the training run, and is no sandbox.** A program runs as the
    same user, reads every file that this user may read, and may use the network. Untrusted models
    belong in a container.

    Tests come from a column of the dataset. A row has one of:

    * text: Python code with assertions, which run after the program; or a list of such texts;
    * ``{"stdin": ..., "stdout": ...}``: an input and the expected output; or a list of them;
    * ``{"inputs": [...], "outputs": [...]}``: the same as two lists;
    * None: the reward does not apply to the row.

    Assertions have to be reached: a program that exits before them has not passed.

    Args:
        tests_column: The column with the tests.
        timeout: Seconds for all tests of a completion together; keep it below ``reward_timeout``.
        memory_mb: Megabytes of address space.
        max_output_bytes: Most that the program may print, or write to any one file.
        partial_credit: Whether a program that passes some of the tests gets their share; otherwise
            one that passes all gets 1.0 and any other 0.0.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An argument out of range.
        RuntimeError: Not on a POSIX system, whose limits this uses.
    """

    def __init__(
        self,
        tests_column: str = "tests",
        *,
        timeout: float = 10.0,
        memory_mb: int = 1024,
        max_output_bytes: int = _MEGABYTE,
        partial_credit: bool = False,
    ) -> None:
        require(
            isinstance(tests_column, str) and tests_column.isidentifier(),
            f"tests_column is {tests_column!r}; it must be the name of a column, such as 'tests'",
            TypeError,
        )
        Number(0, open_low=True)("timeout", timeout)
        COUNT("memory_mb", memory_mb)
        COUNT("max_output_bytes", max_output_bytes)
        FLAG("partial_credit", partial_credit)
        require(
            os.name == "posix",
            "CodeExecutionReward needs a POSIX system, whose resource limits it uses",
            RuntimeError,
        )
        self.tests_column = tests_column
        self.timeout = timeout
        self.memory_mb = memory_mb
        self.max_output_bytes = max_output_bytes
        self.partial_credit = partial_credit
        # What a reward asks for is read off its signature.
        names = dict.fromkeys(["completion", tests_column])
        self.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])

    def __call__(self, **columns: Any) -> float | None:
        """Run the program of ``completion`` against the tests in ``tests_column``.

        Returns:
            The reward; None for a row whose tests are None.

        Raises:
            TypeError: Tests that are none of the kinds above.
            ValueError: No tests.
        """
        if columns[self.tests_column] is None:
            return None
        tests = read_tests(columns[self.tests_column])
        program = extract_program(columns["completion"])
        if program is None:
            return 0.0
        deadline = time.monotonic() + self.timeout
        passed = 0
        for test in tests:
            ok = self._passes(program, test, deadline - time.monotonic())
            passed += ok
            if not (ok or self.partial_credit):
                return 0.0
        return passed / len(tests)

    def _passes(self, program: str, test: CodeTest, seconds: float) -> bool:
        if seconds <= 0:
            return False
        # Only a program that runs to its end exits with this number.
        status = secrets.choice(range(64, 128)) if test.assertions is not None else 0
        source = program if test.assertions is None else f"{program}\n\n{test.assertions}\n"
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / "program.py").write_text(source, encoding="utf-8", errors="replace")
            (folder / "stdin").write_text(test.stdin, encoding="utf-8", errors="replace")
            if self._run(folder, status, seconds) != status:
                return False
            if test.stdout is None:
                return True
            printed = (folder / "stdout").read_text(encoding="utf-8", errors="replace")
        return _lines(printed) == _lines(test.stdout)

    def _run(self, folder: Path, status: int, seconds: float) -> int | None:
        """Run a folder's program; its exit status, None where it took too long."""
        work = folder / "work"
        work.mkdir()
        limits = (
            self.memory_mb * _MEGABYTE, self.max_output_bytes, math.ceil(seconds) + 1, status
        )  # fmt: skip
        command = [sys.executable, "-I", str(_LAUNCHER), str(folder / "program.py")]
        with (folder / "stdin").open("rb") as stdin, (folder / "stdout").open("wb") as stdout:
            process = subprocess.Popen(
                [*command, *map(str, limits)],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                cwd=work,
                env={"PATH": os.defpath, "HOME": str(work), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        ended = _ends_within(process.pid, seconds)
        # With everything that it has started. Until wait() no other group has this number.
        os.killpg(process.pid, signal.SIGKILL)
        exit_status = process.wait()
        return exit_status if ended else None


def _ends_within(pid: int, seconds: float) -> bool:
    """Wait for a child without reaping it."""
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def extract_program(completion: str) -> str | None:
    """The last block of Python code between fences, None without one that is closed."""
    blocks = [code for language, code in _BLOCK.findall(completion) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else None


def read_tests(tests: Any) -> list[CodeTest]:
    """Tests as a dataset has them.

    Raises:
        TypeError: None of the kinds that :class:`CodeExecutionReward` lists.
        ValueError: No tests.
    """
    if isinstance(tests, str):
        found = [CodeTest(assertions=tests)] if tests.strip() else []
    elif isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        inputs, outputs = tests["inputs"], tests["outputs"]
        require(
            len(inputs) == len(outputs),
            f"tests have {len(inputs)} inputs and {len(outputs)} outputs; give one for each",
        )
        pairs = zip(inputs, outputs, strict=True)
        found = [CodeTest(stdin=str(given), stdout=str(wanted)) for given, wanted in pairs]
    elif isinstance(tests, Mapping) and isinstance(tests.get("stdout"), str):
        found = [CodeTest(stdin=tests.get("stdin") or "", stdout=tests["stdout"])]
    elif isinstance(tests, Sequence):
        found = [each for test in tests for each in read_tests(test)]
    else:
        raise TypeError(
            f"tests are {shorten(tests)}; they must be Python code with assertions, a dict with "
            "stdin and stdout, a list of one of these, or a dict with the lists inputs and outputs"
        )
    require(bool(found), f"tests are {shorten(tests)}, so any program would pass; add one")
    return found


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
