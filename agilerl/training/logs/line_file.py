"""A file that grows by whole lines only, also on a disk that fills up meanwhile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class LineFile:
    """Appends lines to a file, each call's whole or not at all, past any buffer of this process.

    Args:
        path: The file; lines are appended to one that exists.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._end = path.stat().st_size
        with path.open("rb") as existing:
            self.lines = sum(1 for _ in existing)
        """Lines in the file."""

    def append(self, lines: Sequence[str]) -> None:
        """Append lines, which end with a line break.

        Raises:
            OSError: If not all of them can be written; then none is.
        """
        # A lone surrogate, which UTF-8 cannot hold, becomes its JSON escape.
        data = "".join(lines).encode("utf-8", "backslashreplace")
        written = 0
        try:
            while written < len(data):  # the last bytes that fit are no error yet
                written += self._file.write(data[written:])
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(data)
        self.lines += len(lines)

    def sync(self) -> None:
        """Flush to disk what was written."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
