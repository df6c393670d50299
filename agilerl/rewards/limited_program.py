"""Runs a Python program under limits; :mod:`agilerl.rewards.code_execution` starts it as a script.

It imports nothing of this package, which would take longer than most programs. Arguments: the
program's path, bytes of memory, bytes of a file that it writes, seconds of processor time, exit
status of a program that runs to its end.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

_STARTS_PROCESS = (
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system",
    "pty.spawn", "subprocess.Popen",
)  # fmt: skip


def main() -> None:
    """Run the program that the arguments say; does not return."""
    path, *numbers = sys.argv[1:]
    memory, file_size, seconds, status = map(int, numbers)
    sys.argv = [path]
    with open(path, encoding="utf-8") as file:
        code = compile(file.read(), path, "exec")
    _limit(memory, file_size, seconds)
    sys.addaudithook(_refuse_processes)
    exec(code, {"__name__": "__main__"})
    sys.stdout.flush()
    os._exit(status)  # no exit handler of the program comes after it


def _limit(memory: int, file_size: int, seconds: int) -> None:
    for name, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),  # threads too; the kernel does not hold root to it
    ):
        _, hard = resource.getrlimit(name)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS_PROCESS:
        raise PermissionError(f"{event}: programs that are scored may not start processes")


if __name__ == "__main__":
    main()
