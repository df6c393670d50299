"""Reading a directory while another process replaces it; writing: tests/algorithms."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agilerl.llm.checkpoint.atomic_directory import READ_ATTEMPTS, atomic_directory, read_directory

MARKER = "second"


def write(path: Path, text: str) -> None:
    with atomic_directory(path, MARKER) as folder:
        (folder / "first").write_text(text)
        (folder / MARKER).write_text(text)


class Reader:
    """Reads both files, and has the directory replaced between them in the first few calls."""

    def __init__(self, path: Path, disturbances: int) -> None:
        self.path, self.disturbances, self.calls = path, disturbances, 0

    def __call__(self, folder: Path) -> tuple[str, str]:
        first = (folder / "first").read_text()
        self.calls += 1
        if self.calls <= self.disturbances:
            write(self.path, f"version {self.calls}")
        return first, (folder / MARKER).read_text()


@pytest.mark.parametrize("disturbances", range(READ_ATTEMPTS))
def test_what_is_read_is_of_one_writer(tmp_path: Path, disturbances: int) -> None:
    write(tmp_path / "run", "version 0")
    reader = Reader(tmp_path / "run", disturbances)
    assert read_directory(tmp_path / "run", MARKER, reader) == (f"version {disturbances}",) * 2
    assert reader.calls == disturbances + 1
    assert len(os.listdir(tmp_path)) == 1


def test_it_does_not_try_for_ever(tmp_path: Path) -> None:
    write(tmp_path / "run", "version 0")
    reader = Reader(tmp_path / "run", 99)
    with pytest.raises(RuntimeError, match="replaced faster than it could be read"):
        read_directory(tmp_path / "run", MARKER, reader)
    assert reader.calls == READ_ATTEMPTS


def test_errors_of_what_is_there_are_raised_at_once(tmp_path: Path) -> None:
    write(tmp_path / "run", "version 0")
    (tmp_path / "run" / "first").unlink()
    reader = Reader(tmp_path / "run", 0)
    with pytest.raises(FileNotFoundError, match="first"):
        read_directory(tmp_path / "run", MARKER, reader)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        read_directory(tmp_path / "nowhere", MARKER, reader)
    assert reader.calls == 0
