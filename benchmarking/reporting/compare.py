"""Compare the ratios and shares of two folders of results.

    make bench ARGS="--out build/bench"
    .venv/bin/python benchmarking/reporting/compare.py build/bench

Ratios are compared relatively: |new / old - 1| may be up to ``--tolerance``. Shares of a whole,
such as of the time of a step, are compared absolutely: they may be up to ``--points`` percentage
points apart. ``figures.py`` says which figures these are. What is in one folder only, or was
measured with other settings, is printed and not compared.

Exits with 1 if a figure differs, or if nothing could be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from figures import FIGURES
from make_report import RESULTS
from tables import Result

STEPS = ("warmup_steps", "measured_steps", "plays")
"""Settings that say how many steps ran only where the file has ``steps`` at its top."""


@dataclass
class Comparison:
    """What two folders of results have in common, and what not.

    Args:
        old: Folder of results.
        new: Folder of results that are to reproduce them.
    """

    old: Path
    new: Path
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Old and new by file, workload and name."""
    shares: dict[str, tuple[float, float]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """What could not be compared, and why."""

    def __post_init__(self) -> None:
        for file in FIGURES:
            old, new = self.old / file, self.new / file
            if old.is_file() and new.is_file():
                results = (json.loads(path.read_text()) for path in (old, new))
                self._compare_workloads(file, *results)
            else:
                missing = [str(path) for path in (old, new) if not path.is_file()]
                self.left_out.append(f"{file}: there is no {' and no '.join(missing)}")

    def _compare_workloads(self, file: str, old: Result, new: Result) -> None:
        before, after = old["workloads"], new["workloads"]
        left_out = () if "steps" in old and "steps" in new else STEPS
        for name in self._shared(file, before, after):
            if len({_settings(workload, left_out) for workload in (before[name], after[name])}) > 1:
                self.left_out.append(f"{file}: {name}: measured with other settings")
                continue
            figures = [FIGURES[file](workloads[name]) for workloads in (before, after)]
            for kind, compared in (("ratios", self.ratios), ("shares", self.shares)):
                a, b = (getattr(each, kind) for each in figures)
                for path in self._shared(f"{file}: {name}", a, b):
                    compared[f"{file}: {name}: {path}"] = (a[path], b[path])

    def _shared(self, where: str, old: Result, new: Result) -> Iterator[str]:
        """The keys of both; notes those of one."""
        for key in old | new:
            if key in old and key in new:
                yield key
            else:
                only = "old" if key in old else "new"
                self.left_out.append(f"{where}: {key}: only in the {only} result")

    def differences(self, tolerance: float, points: float) -> Iterator[str]:
        """A line for each figure that differs.

        Args:
            tolerance: Of ratios, relative to the old one.
            points: Of shares, in percentage points.
        """
        for path, (old, new) in self.ratios.items():
            if not abs(new - old) <= tolerance * abs(old):  # NaN differs too
                yield f"{path} {old:.2f} -> {new:.2f}"
        for path, (old, new) in self.shares.items():
            if not 100 * abs(new - old) <= points:
                yield f"{path} {old:.0%} -> {new:.0%}"


def _settings(workload: Result, left_out: Iterable[str]) -> str:
    settings = {key: value for key, value in workload["settings"].items() if key not in left_out}
    return json.dumps(settings, sort_keys=True)


def main() -> None:
    """Print every figure that differs, and what was not compared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("new", type=Path, help="folder of results")
    parser.add_argument("--old", type=Path, default=RESULTS, help="by default the committed ones")
    parser.add_argument("--tolerance", type=float, default=0.15, help="of ratios, relative")
    parser.add_argument("--points", type=float, default=5.0, help="of shares, percentage points")
    given = parser.parse_args()
    comparison = Comparison(given.old, given.new)
    different = list(comparison.differences(given.tolerance, given.points))
    for line in different:
        print(line)
    for line in comparison.left_out:
        print(f"not compared: {line}")
    compared = len(comparison.ratios) + len(comparison.shares)
    print(
        f"{len(different)} of {compared} figures differ ({len(comparison.ratios)} ratios by more "
        f"than {given.tolerance:.0%}, {len(comparison.shares)} shares by more than "
        f"{given.points:g} percentage points)"
    )
    sys.exit(1 if different or not compared else 0)


if __name__ == "__main__":
    main()
