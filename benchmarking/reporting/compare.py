"""Compare the ratios of two folders of results: are those of the pages reproduced?

    make bench ARGS="--out build/bench"
    python benchmarking/reporting/compare.py build/bench

Exits with 1 if a ratio differs by more than the tolerance, or if nothing could be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from make_report import RESULTS
from tables import TABLES


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Every ratio of a result by its path, such as ``tiny.generation``."""
    return {
        f"{name}.{path}": value
        for name, workload in result["workloads"].items()
        for path, value in _leaves(workload.get("ratio"))
    }


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(tree, dict):
        for key, branch in tree.items():
            yield from _leaves(branch, f"{path}.{key}" if path else key)
    elif tree is not None:
        yield path, tree


def differences(old: Path, new: Path) -> Iterator[tuple[str, float, float]]:
    """The ratios that are in the same file of both folders: file and path, old, new."""
    for file in dict.fromkeys(file for file, _ in TABLES.values()):
        if (old / file).is_file() and (new / file).is_file():
            before, after = (ratios(json.loads((f / file).read_text())) for f in (old, new))
            for path in sorted(before.keys() & after.keys()):
                yield f"{file}: {path}", before[path], after[path]


def main() -> None:
    """Print every ratio that differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("new", type=Path, help="folder of results")
    parser.add_argument("--old", type=Path, default=RESULTS, help="by default the committed ones")
    parser.add_argument("--tolerance", type=float, default=0.15)
    given = parser.parse_args()
    compared = list(differences(given.old, given.new))
    far = [row for row in compared if abs(row[2] / row[1] - 1) > given.tolerance]
    for path, before, after in far:
        print(f"{path} {before:.2f} -> {after:.2f}")
    print(f"{len(far)} of {len(compared)} ratios differ by more than {given.tolerance:.0%}")
    sys.exit(1 if far or not compared else 0)


if __name__ == "__main__":
    main()
