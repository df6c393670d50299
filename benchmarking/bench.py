"""Run the benchmarks one after the other, then update the tables and plots from their results.

.venv/bin/python benchmarking/bench.py                    # all; about 90 minutes of one idle core
.venv/bin/python benchmarking/bench.py --only grpo_step   # one of them; about 8 minutes
.venv/bin/python benchmarking/bench.py --quick            # all on small shapes, in some minutes
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Relative, as the command stands in the file that it writes.
RESULTS = Path("benchmarking") / "results"
QUICK_RESULTS = Path("build") / "bench-quick"
SCRIPTS = {
    "grpo_step": "grpo-step-cpu.json",
    "time_shares": "time-shares-cpu.json",
    "token_cost": "token-cost-cpu.json",
    "logprob_memory": "logprob-memory-cpu.json",
    "memory_estimate": "memory-estimate-cpu.json",
    "multiturn_cache": "multiturn-cache-cpu.json",
    "population": "population-cpu.json",
}
"""Scripts of this folder and the files they write, in the order in which they run."""


def command(name: str, *, quick: bool, out: Path, trl: bool) -> list[str]:
    """How a script is run.

    Args:
        name: Out of :data:`SCRIPTS`.
        quick: Whether on small shapes, to see that it runs.
        out: Folder of the results.
        trl: Whether TRL is installed; without it this library's side runs alone.
    """
    words = [sys.executable, f"benchmarking/{name}.py", "--out", str(out / SCRIPTS[name])]
    words += ["--quick"] if quick else []
    words += ["--side", "agilerl"] if name == "grpo_step" and not trl else []
    return words


def main() -> None:
    """Run what was asked for; exit with 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SCRIPTS, nargs="+", help="scripts to run; by default all")
    parser.add_argument("--quick", action="store_true", help="small shapes, into build/bench-quick")
    parser.add_argument("--out", type=Path, help="folder of the JSON; by default results/")
    given = parser.parse_args()
    out = QUICK_RESULTS if given.quick else RESULTS
    if given.out:
        out = given.out.resolve()
    trl = importlib.util.find_spec("trl") is not None
    if not trl and not given.quick:
        parser.error('TRL is not installed, which this compares with: pip install -e ".[bench]"')
    # Here and not in each script, because it is read when torch is loaded.
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
    failed = []
    for name in given.only or SCRIPTS:
        print(f"== {name}", flush=True)
        words = command(name, quick=given.quick, out=out, trl=trl)
        if subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(name)
    if out == RESULTS and not failed:
        subprocess.run(
            [sys.executable, "benchmarking/reporting/make_report.py"], cwd=ROOT, check=True
        )
    if failed:
        sys.exit(f"failed, with the error printed above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
