"""Common parts of the benchmarks: options, description of the machine, printing and writing."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measure import StolenTime, describe_machine, load_average


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of a benchmark, with the options that all have.

    Args:
        description: The docstring of the script.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=count, default=1, help="CPU threads of torch")
    parser.add_argument("--quick", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--out", type=Path, help="JSON file to write; by default none")
    return parser


def count(text: str) -> int:
    """Read an argument that is a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; it must be 1 or more")
    return number


def run_workloads(
    names: Iterable[str],
    run: Callable[[str], dict[str, Any]],
    print_summary: Callable[[str, dict[str, Any]], None],
    threads: int,
    out: Path | None,
    **facts: Any,
) -> None:
    """Run workloads one after the other, print each result, and write them all.

    Args:
        names: Of the workloads.
        run: The result of one.
        print_summary: Prints it.
        threads: CPU threads torch uses, for the file.
        out: The file; None: nowhere.
        **facts: What else belongs at the top of the file.
    """
    results: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **describe_machine(threads),
        **facts,
        "workloads": {},
    }
    for name in names:
        stolen = StolenTime()
        result = run(name)
        result["stolen_time_share"] = round(stolen.share(), 3)
        results["workloads"][name] = result
        print_summary(name, result)
        results["load_average_at_end"] = load_average()
        if out:  # after every workload: what an interrupted run has measured is kept
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(results, indent=2) + "\n")
    if out:
        print(f"written to {out}")
