"""The first columns of ``metrics.csv``, in their order, and what a tracker is asked for."""

from __future__ import annotations

from agilerl.training.logs.files import FIRST_COLUMNS
from agilerl.training.trackers import Tracker

COLUMNS = (
    "iteration", "agent", "steps", "wall_seconds", "reward_mean", "reward_std", "accuracy",
    "failed_completions", "truncated_share", "fitness", "eval_accuracy", "tokens_per_second",
    "generation_seconds", "environment_seconds", "learning_seconds", "evaluation_seconds",
)  # fmt: skip


def test_first_columns() -> None:
    assert FIRST_COLUMNS == COLUMNS


def test_trackers() -> None:
    members = {name for name in vars(Tracker) if not name.startswith("_")}
    assert members == {"run_id", "start", "write", "write_completions", "close"}
