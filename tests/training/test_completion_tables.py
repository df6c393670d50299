"""The tables of completions: which are shown, and how they are printed."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from training_fakes import FakeAgent, FakeGym

from agilerl.training.collectors.experience import Sample
from agilerl.training.logs.completion_tables import (
    evaluation_table,
    print_table,
    training_table,
)
from agilerl.training.train_llm import finetune_llm_reasoning
from agilerl.typing import Evaluation


def samples(*rewards: float | None, **changes: Any) -> list[Sample]:
    return [Sample("2+2?", f"c{i}", "4", reward, **changes) for i, reward in enumerate(rewards)]


def printed(table: Any, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    print_table(table, print)
    return capsys.readouterr().out


def test_the_best_and_the_worst_of_groups() -> None:
    group = [*samples(0.0, 1.0, 0.5), *samples(0.5, 0.5, 0.5), *samples(9.0, 9.0, 9.0)]
    table = training_table("GRPO agent 3", 3, 20, group, group_size=3, count=3)
    assert (table.name, table.title) == (
        "agent_3/training",
        "GRPO agent 3, iteration 20: completions of the training batch",
    )
    assert list(table.columns) == ["shown as", "prompt", "completion", "answer", "reward"]
    assert [(row[0], row[2], row[4]) for row in table.rows] == [
        ("best", "c1", 1.0),
        ("worst", "c0", 0.0),
        ("all equal", "c0", 0.5),
    ]


def test_several_rewards_and_why_one_failed() -> None:
    group = [
        Sample("q", "a", None, 1.5, {"right": 1.0, "short": 0.5}),
        Sample("q", "b", None, 0.5, {"right": 0.0, "short": 0.5}, truncated=True),
        Sample("q", "c", None, None, {"right": None, "short": 0.5}, failure="TimeoutError: 60 s"),
    ]
    table = training_table("GRPO agent 0", 0, 1, group, group_size=3, count=4)
    assert list(table.columns)[3:] == ["reward", "right", "short", "remark"]
    assert [list(row)[3:] for row in table.rows] == [
        [1.5, 1.0, 0.5, None],
        [0.5, 0.0, 0.5, "cut off"],
        [None, None, 0.5, "TimeoutError: 60 s"],
    ]


@pytest.mark.parametrize(
    ("rewards", "count", "shown"),
    [
        ([0.1, 0.9, 0.5, 0.3], 2, [("best", 0.9), ("worst", 0.1)]),
        ([0.1, 0.9, 0.5, 0.3], 3, [("best", 0.9), ("best", 0.5), ("worst", 0.1)]),
        ([0.1, 0.9, 0.5], 9, [("best", 0.9), ("best", 0.5), ("best", 0.1)]),
    ],
)
def test_the_best_and_the_worst_of_an_evaluation(
    rewards: list[float], count: int, shown: list[tuple[str, float]]
) -> None:
    names = [str(each) for each in rewards]
    evaluation = Evaluation(torch.tensor(rewards), names, names, names)
    table = evaluation_table("GRPO agent 0", 0, 1, evaluation, count)
    assert [(row[0], pytest.approx(row[-1])) for row in table.rows] == [
        (kind, pytest.approx(reward)) for kind, reward in shown
    ]
    assert all(float(str(row[1])) == pytest.approx(row[-1]) for row in table.rows)


def test_an_evaluation_with_a_failure_and_one_without_texts() -> None:
    evaluation = Evaluation(torch.tensor([1.0]), ["q"], [], ["c"], ["OSError: gone"])
    table = evaluation_table("GRPO agent 0", 0, 1, evaluation, 4)
    assert [row[-1] for row in table.rows] == [None, "OSError: gone"]
    assert not evaluation_table("GRPO agent 0", 0, 1, Evaluation(torch.ones(3)), 4).rows


def test_texts_cannot_move_the_cursor_or_set_styles(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[red]x[/red] \x1b[2J \ud800 ü\nnext"
    shown = printed(training_table("a", 0, 1, [Sample("q", text, None, 1.0)], 1, 4), capsys)
    assert "[red]x[/red]" in shown and r"\x1b[2J" in shown and r"\ud800" in shown
    assert "\x1b" not in shown and "ü" in shown and "next" in shown


def test_long_texts_keep_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    text = "begin" + "x" * 2000 + "end"
    table = training_table("a", 0, 1, [Sample("q", text, None, 1.0)], 1, 4)
    assert table.rows[0][2] == text  # trackers get all of it
    shown = printed(table, capsys)
    assert len(shown) < 2000
    joined = "".join(each for each in shown if each.isalnum())
    assert "beginxxx" in joined and "1608morecharacters" in joined and "xxxend" in joined


def test_a_terminal_that_knows_ascii_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    print_table(training_table("a", 0, 1, [Sample("ü", "c", None, 1.0)], 1, 4), print)
    stream.flush()
    shown = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert r"\xfc" in shown and "+---" in shown


def test_when_tables_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"max_steps": 8, "verbose": False, "evaluation_interval": 3}
    finetune_llm_reasoning(
        *([FakeAgent()], FakeGym(rows=20)),
        completions_interval=2,
        completions_shown=2,
        checkpoint_path=tmp_path / "r",
        **options,
    )
    shown = capsys.readouterr().out
    assert shown.count("completions of the training batch") == 2
    assert "GSPO agent 0, iteration 2: completions" in shown and "iteration 4: comp" in shown
    assert shown.count("best") == shown.count("worst") == 2
    assert "q2" in shown and "q3" not in shown


def test_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    from test_multiturn_training import finetune, make_agent

    finetune([make_agent()], max_steps=8, completions_interval=1)
    shown = capsys.readouterr().out
    assert "GRPO agent 0, iteration 1: completions of the training batch" in shown
    assert "GRPO agent 0, iteration 0: answers of the evaluation" in shown
