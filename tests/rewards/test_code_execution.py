"""Programs that are right, wrong, and too much, in real processes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from agilerl.llm_envs import RewardPool
from agilerl.rewards import CodeExecutionReward
from agilerl.rewards.code_execution import extract_program, read_tests

pytestmark = pytest.mark.process

DOUBLE = "def double(x):\n    return 2 * x\n"
ECHO = "import sys\nfor line in sys.stdin:\n    print(int(line) + 1)\n"


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def score(program: str, tests: Any, **options: Any) -> float | None:
    return CodeExecutionReward(**options)(completion=block(program), tests=tests)


@pytest.mark.parametrize(
    ("program", "tests", "reward"),
    [
        (DOUBLE, "assert double(2) == 4", 1.0),
        (DOUBLE, "assert double(2) == 5", 0.0),
        (DOUBLE, ["assert double(2) == 4", "assert double('a') == 'aa'"], 1.0),
        (DOUBLE, ["assert double(2) == 4", "assert double(1) == 1"], 0.0),
        ("def double(x):\n    return 2 *\n", "assert True", 0.0),
        (ECHO, {"stdin": "1\n2\n", "stdout": "2\n3"}, 1.0),
        (ECHO, {"stdin": "1\n2\n", "stdout": "23"}, 0.0),
        (ECHO, {"inputs": ["1", "5"], "outputs": ["2", "6"]}, 1.0),
        ("import sys\nprint('  a \\nb')\nsys.exit(0)", [{"stdin": None, "stdout": "a\nb\n"}], 1.0),
        ("print('a')\nraise SystemExit(3)", {"stdin": "", "stdout": "a"}, 0.0),
        ("print('ä')", {"stdin": "", "stdout": "ä"}, 1.0),
        (DOUBLE, None, None),
    ],
)
def test_programs(program: str, tests: Any, reward: float | None) -> None:
    assert score(program, tests) == reward


def test_numpy_fits_the_default_limits() -> None:
    assert (
        score("import numpy as np\na = np.ones((9, 9)) @ np.ones((9, 9))", "assert a[0, 0] == 9")
        == 1
    )


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "import os; os._exit(0)", "exit()"])
def test_leaving_before_the_assertions_passes_nothing(leave: str) -> None:
    assert score(leave, "assert False") == 0.0
    assert score("import atexit, os\natexit.register(os._exit, 0)", "assert False") == 0.0


def test_partial_credit() -> None:
    tests = ["assert double(2) == 4", "assert double(1) == 1", "assert double(0) == 0"]
    assert score(DOUBLE, tests, partial_credit=True) == pytest.approx(2 / 3)


def test_time(tmp_path: Path) -> None:
    """Everything that the program started ends with it, and all tests share the time."""
    started = time.perf_counter()
    assert score("while True: pass", ["assert True"] * 50, timeout=0.5, partial_credit=True) == 0.0
    assert time.perf_counter() - started < 10.0
    assert score("import time\ntime.sleep(60)", "assert True", timeout=0.5) == 0.0


def test_memory() -> None:
    assert score("x = bytearray(10**9)", "assert x", memory_mb=256) == 0.0
    assert score("x = bytearray(10**7)", "assert x", memory_mb=256) == 1.0


def test_output() -> None:
    """Neither memory nor disk of the run is filled."""
    endless = "while True: print('x' * 1000)"
    assert score(endless, {"stdin": "", "stdout": "x"}, max_output_bytes=10_000) == 0.0
    to_file = "open('big', 'w').write('x' * 20_000)"
    assert score(to_file, "assert True", max_output_bytes=10_000) == 0.0
    assert score(to_file, "assert True") == 1.0


@pytest.mark.parametrize(
    "start",
    [
        "import os; os.fork()",
        "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing as m\np = m.Process(target=print)\np.start()\np.join()",
    ],
)
def test_processes_are_refused(start: str) -> None:
    assert score(start, "assert True") == 0.0


def test_a_program_knows_nothing_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")
    program = "import os, sys\nfound = os.environ.get('MY_API_KEY')\nfiles = os.listdir()\n"
    assert score(program, "assert found is None and files == [] and len(sys.argv) == 1") == 1.0


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd"))
    score("open('a', 'w')", "assert True")
    score("while True: pass", "assert True", timeout=0.3)
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_in_a_pool_beside_another_reward() -> None:
    """Programs of several completions run at the same time."""
    reward = CodeExecutionReward("checks")
    barrier = threading.Barrier(2)

    def together(completion: str) -> float:
        barrier.wait(60)
        return 0.0

    pool = RewardPool([reward, together], columns=["checks"], reward_workers=4)
    assert pool.names == ["CodeExecutionReward", "together"]
    assert pool.columns == {"completion", "checks"}
    scores = pool.score_columns(
        {
            "completion": [block(DOUBLE), "no program"],
            "answer": [None] * 2,
            "question": ["q"] * 2,
            "checks": ["assert double(1) == 2"] * 2,
        }
    )
    assert scores.total == [1.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nor\n```py\nb\n```", "b\n"),
        ("```text\nx\n```\nSo:\n```python\na\n```", "a\n"),
        ("```python\na\n```\nprints\n```text\nx\n```", "a\n"),
        ("  ```Python\n  a\n  ```  ", "  a\n"),
        ("```python\na", None),
        ("a", None),
    ],
)
def test_the_last_block_of_python(completion: str, program: str | None) -> None:
    assert extract_program(completion) == program


@pytest.mark.parametrize(
    ("tests", "error", "message"),
    [
        ("", ValueError, "tests are '', so any program would pass"),
        ([], ValueError, r"tests are \[\], so any"),
        ([" "], ValueError, "tests are ' ', so any"),
        ({"inputs": [], "outputs": []}, ValueError, "so any program would pass"),
        ({"inputs": ["1"], "outputs": []}, ValueError, "1 inputs and 0 outputs"),
        (3, TypeError, "tests are 3; they must be Python code with assertions"),
        ([3], TypeError, "tests are 3"),
        ({"stdin": "a"}, TypeError, "a dict with stdin and stdout"),
    ],
)
def test_tests_that_are_none(tests: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_tests(tests)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tests_column": "my tests"}, TypeError, "tests_column is 'my tests'"),
        ({"timeout": 0}, ValueError, "timeout is 0; it must be above 0"),
        ({"memory_mb": 0}, ValueError, "memory_mb is 0"),
        ({"max_output_bytes": 1.5}, TypeError, "max_output_bytes is 1.5"),
        ({"partial_credit": 1}, TypeError, "partial_credit is 1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CodeExecutionReward(**options)
