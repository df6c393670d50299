"""Accuracy with groups of equal rewards (zero variance) kept, left out or replaced.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarking/learning/zero_variance.py --out build/zero.json

Trains the agent of examples/grpo_reasoning.py with each setting, draws the same number of prompts,
those that are left out included, and measures accuracy on 400 held-out words.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from grpo_reasoning import accuracy, answer_test_split, make_agent, make_env

from agilerl.testing import load_bundled_model
from agilerl.training.train_llm import finetune_llm_reasoning

SETTINGS = ("keep", "skip", "resample")


def main() -> None:
    """Run all settings and seeds, and write what was found after each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=3200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    for seed in args.seeds:
        for setting in SETTINGS:
            runs.append(run(setting, seed, args.prompts))
            print(json.dumps(runs[-1]), flush=True)
            args.out.write_text(json.dumps({"prompts": args.prompts, "runs": runs}, indent=1))


def run(setting: Any, seed: int, prompts: int) -> dict[str, Any]:
    """Train one agent; its accuracy before and after, and what its iterations were like."""
    model, tokenizer = load_bundled_model()
    env, agent = make_env(tokenizer, seed), make_agent("grpo", model, tokenizer, seed)
    before = accuracy(answer_test_split(agent, env))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        finetune_llm_reasoning(
            [agent],
            env,
            max_steps=prompts,
            evaluation_interval=prompts,
            zero_variance=setting,
            checkpoint_path=folder,
            verbose=False,
        )
        seconds = time.perf_counter() - started
        with (Path(folder) / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["reward_mean"]]
    learned_flat = fmean(float(row["zero_variance_groups"]) for row in rows) / 32
    flat = [row["zero_variance_share"] for row in rows if row.get("zero_variance_share")]
    return {
        "zero_variance": setting,
        "seed": seed,
        "accuracy_before": before,
        "accuracy": accuracy(answer_test_split(agent, env)),
        "iterations": len(rows),
        "flat_share": fmean(map(float, flat)) if flat else learned_flat,
        "flat_share_of_learned": learned_flat,
        "seconds": round(seconds),
    }


if __name__ == "__main__":
    main()
