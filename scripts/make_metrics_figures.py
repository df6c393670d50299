"""Runs for docs/metrics.md: a healthy one and four that are sick, and their curves.

``python scripts/make_metrics_figures.py`` trains the model of ``make demo`` five times for a few
minutes in all and writes ``docs/metrics.png`` and ``benchmarking/results/metrics-page.json``.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.llm_envs import ReasoningGym
from agilerl.testing import (
    SPELL_BACKWARD_CONVERSATION,
    load_bundled_model,
    spell_backward_correct,
    spell_backward_datasets,
)
from agilerl.training.train_llm import finetune_llm_reasoning

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (
    "reward_mean",
    "eval_accuracy",
    "truncated_share",
    "zero_variance_groups",
    "entropy",
    "grad_norm",
    "completion_length",
)


def share_of_e(completion: str, answer: str) -> float:
    """A reward that can be had without the answer."""
    return completion.count("e") / 10


def tagged(completion: str, answer: str) -> float:
    """A reward for a format that the model does not know."""
    return float(f"<answer>{answer}</answer>" in completion)


RUNS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "lr too high": {"lr": 2e-2},
    "reward always 0": {"reward": tagged},
    "all truncated": {"max_output_tokens": 3},
    "entropy collapse": {"reward": share_of_e},
}


def rows_of(name: str, iterations: int, folder: Path) -> list[dict[str, str]]:
    """The metrics of one run."""
    changes = dict(RUNS[name])
    train, test = spell_backward_datasets(train_size=4096, test_size=100)
    model, tokenizer = load_bundled_model()
    env = ReasoningGym(
        train,
        test,
        tokenizer,
        changes.pop("reward", spell_backward_correct),
        SPELL_BACKWARD_CONVERSATION,
        data_batch_size_per_gpu=32,
        eval_batch_size=100,
    )
    lora = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    settings = {"lr": 5e-4, "max_output_tokens": 10} | changes
    agent = GRPO(
        tokenizer.pad_token_id,
        tokenizer.pad_token,
        actor_network=model,
        lora_config=lora,
        batch_size=128,
        group_size=8,
        beta=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        gradient_checkpointing=False,
        **settings,
    )
    path = folder / name.replace(" ", "_")
    finetune_llm_reasoning(
        [agent],
        env,
        max_steps=32 * iterations,
        evaluation_interval=10,
        checkpoint_path=path,
        verbose=False,
    )
    env.close()
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def draw(runs: dict[str, list[dict[str, str]]], path: Path) -> None:
    """A panel per column, a line per run."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = ("reward_mean", "eval_accuracy", "truncated_share", "zero_variance_groups")
    columns += ("entropy", "grad_norm")
    figure, axes = plt.subplots(2, 3, figsize=(10, 5), layout="constrained")
    for axis, column in zip(axes.flat, columns, strict=True):
        for name, rows in runs.items():
            points = [(int(r["iteration"]), float(r[column])) for r in rows if r[column]]
            axis.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
        axis.set_title(column, fontsize=10)
        axis.grid(alpha=0.3)
    axes.flat[-1].set_yscale("log")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=90)


def summary(rows: list[dict[str, str]]) -> dict[str, list[float | None]]:
    """Of each column the first and the last value that there is; None: not a number."""
    values = {name: [float(row[name]) for row in rows if row[name]] for name in SHOWN}
    return {name: [_plain(each[0]), _plain(each[-1])] for name, each in values.items()}


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def main() -> None:
    """Train, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=40)
    iterations = parser.parse_args().iterations
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: rows_of(name, iterations, Path(folder)) for name in RUNS}
    draw(runs, ROOT / "docs" / "metrics.png")
    figures = {
        "iterations": iterations,
        "first and last value": {name: summary(rows) for name, rows in runs.items()},
    }
    file = ROOT / "benchmarking" / "results" / "metrics-page.json"
    file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
