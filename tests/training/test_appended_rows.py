"""A run goes on with more data than it was started with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from resume_helpers import (
    After,
    checkpoints_in,
    differences,
    everything,
    make_agents,
    make_gym,
    reseed,
    rows_of,
    run_multiturn,
    run_reasoning,
    seed_all,
    state_of,
)

from agilerl.algorithms import GRPO
from agilerl.training.logs import rank_zero_log
from agilerl.training.train_llm import finetune_llm_reasoning

Run = dict[str, Any]


def run_on(path: Path, rows: int, stop: int | None = None, agents: int = 1, **options: Any) -> Run:
    """All of a run on so many questions, two at a time, that a Ctrl-C ends after ``stop`` batches.

    It goes on with what is in its folder already.
    """
    if path.exists():
        options = {"resume_from": path, "allow_appended_rows": True} | options
        reseed()
    else:
        seed_all()
    pop, env = make_agents(agents), make_gym(After(stop or -1), rows=rows)
    settings = {"max_steps": None, "num_epochs": 2, "save_elite": None, "elite_path": None}
    run_reasoning(path, pop=pop, env=env, **(settings | options))
    return everything(path, pop)


def steps(run: Run, agent: int = 0) -> list[int]:
    return [int(row["steps"]) for row in run["rows"] if row["agent"] == str(agent)]


def asked(run: Run) -> list[list[str]]:
    """The questions of every iteration."""
    lines = [json.loads(line) for line in run["completions"].splitlines()]
    iterations = sorted({line["iteration"] for line in lines})
    return [
        list(dict.fromkeys(line["question"] for line in lines if line["iteration"] == each))
        for each in iterations
    ]


def test_the_pass_goes_on_as_it_would_have_and_then_over_the_appended_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plain = run_on(tmp_path / "plain", 5)
    run_on(tmp_path / "run", 5, stop=2)
    assert "segments" not in state_of(tmp_path / "run" / "iteration_00000002")["environments"][0]
    whole = run_on(tmp_path / "run", 8)
    assert "with appended training rows: 3" in caplog.text
    (resumed,) = json.loads((tmp_path / "run" / "config.json").read_text())["resumed"]
    assert (resumed["iteration"], resumed["appended_rows"]) == (2, [3])

    # To the old end bit for bit the run without them.
    lines = [run["completions"].splitlines() for run in (plain, whole)]
    old = [[line for line in each if json.loads(line)["iteration"] <= 3] for each in lines]
    assert old[0] == old[1]
    assert whole["rows"][:4] == plain["rows"][:4]
    # A pass of 5 + 3 rows, and one of 8.
    assert steps(whole) == [0, 2, 4, 5, 7, 8, 10, 12, 14, 16]
    batches = asked(whole)
    every = {f"train{i}?" for i in range(8)}
    assert {*sum(batches[:5], [])} == {*sum(batches[5:], [])} == every  # noqa: RUF017
    assert {*batches[3], *batches[4]} == {"train5?", "train6?", "train7?"}


def test_a_run_with_appended_rows_resumes_exactly(tmp_path: Path) -> None:
    """In the appended rows and after them, by data that are the same now; and appended twice."""
    run_on(tmp_path / "whole", 5, stop=2)
    run_on(tmp_path / "parts", 5, stop=2)
    run_on(tmp_path / "whole", 8, stop=2)
    whole = run_on(tmp_path / "whole", 10)
    run_on(tmp_path / "parts", 8, stop=1)
    (data,) = state_of(tmp_path / "parts" / "iteration_00000003")["environments"]
    position = data["position"]
    assert (position["offset"], position["rows"], position["segments"]) == (5, 8, [5, 3])
    run_on(tmp_path / "parts", 8, stop=1, allow_appended_rows=False)
    for _ in range(3):
        run_on(tmp_path / "parts", 10, stop=1)
    parts = run_on(tmp_path / "parts", 10, allow_appended_rows=False)
    assert differences(parts, whole) == []
    assert steps(parts) == [0, 2, 4, 5, 7, 8, 10, *range(12, 21, 2)]
    assert {*asked(parts)[5]} == {"train8?", "train9?"}


@pytest.mark.parametrize("stop_again", [False, True])
def test_passes_are_those_that_were_completed(
    stop_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 5 rows, and two of 8; the progress bar counts the same."""
    totals: list[int | None] = []

    class Bar(rank_zero_log.ProgressBar):
        def __init__(self, total: int | None, **options: Any) -> None:
            totals.append(total)
            super().__init__(total, **options)

    monkeypatch.setattr(rank_zero_log, "ProgressBar", Bar)
    run_on(tmp_path / "run", 5, stop=4, num_epochs=3)
    if stop_again:
        run_on(tmp_path / "run", 8, stop=1, num_epochs=3)
        state = state_of(tmp_path / "run" / "iteration_00000005")
        assert state["earlier_passes"] == [{"passes": 1, "prompts": 5}]
    run = run_on(tmp_path / "run", 8, num_epochs=3)
    assert steps(run)[-1] == 5 + 8 + 8
    assert totals == [15, *[21] * (1 + stop_again)]


def test_agents_that_share_an_environment_make_its_passes_together(tmp_path: Path) -> None:
    """The first of 5 rows, after which one of them has taken two of the second, of 8."""
    assert [steps(run_on(tmp_path / "run", 5, agents=2, num_epochs=1), i)[-1] for i in (0, 1)] == [
        3,
        4,
    ]
    run = run_on(tmp_path / "run", 8, agents=2)
    assert [steps(run, agent) for agent in (0, 1)] == [[0, 2, 3, 5, 7], [0, 2, 4, 5, 6]]


def test_agents_with_environments_of_their_own(tmp_path: Path) -> None:
    def run(rows: int, *stops: int, **options: Any) -> Run:
        envs = iter([make_gym(After(stop), rows=rows) for stop in stops])
        pop = make_agents(2)
        settings = {"num_epochs": 2, "checkpoint_steps": 1, "checkpoint_path": tmp_path / "run"}
        finetune_llm_reasoning(
            pop, env_fn=lambda: next(envs), verbose=False, **(settings | options)
        )
        return everything(tmp_path / "run", pop)

    run(5, 2, -1)
    resumed = run(8, -1, -1, resume_from=tmp_path / "run", allow_appended_rows=True)
    assert [steps(resumed, agent)[-1] for agent in (0, 1)] == [16, 16]
    with pytest.raises(ValueError, match=r"rows of environment 0: 8 there, 9 here.*goes on"):
        run(9, -1, -1, resume_from=tmp_path / "run")


def test_a_run_that_was_at_its_bound_says_what_to_raise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_on(tmp_path / "run", 5, num_epochs=1)
    names = checkpoints_in(tmp_path / "run")
    assert steps(run_on(tmp_path / "run", 8, num_epochs=1)) == [0, 2, 4, 5]
    assert "not trained on: raise num_epochs=1." in caplog.text
    assert checkpoints_in(tmp_path / "run") == names
    run = run_on(tmp_path / "run", 8)
    assert steps(run) == [0, 2, 4, 5, 7, 9, 11, 13]
    assert len({*sum(asked(run)[3:], [])}) == 8  # noqa: RUF017  shuffled together


def test_more_seeds_of_episodes(tmp_path: Path) -> None:
    def run(seeds: int, stop: int = -1, **options: Any) -> list[GRPO]:
        settings = {"max_steps": None, "num_epochs": 2, "save_elite": None, "elite_path": None}
        pop = make_agents(1)
        options |= settings | {"pop": pop, "train_seeds": seeds, "hook": After(stop)}
        return run_multiturn(tmp_path / "run", **options)

    seed_all()
    run(2, stop=3)  # two first turns of the evaluation, one of the first group
    assert checkpoints_in(tmp_path / "run") == ["iteration_00000001"]
    resume: dict[str, Any] = {"resume_from": tmp_path / "run"}
    with pytest.raises(
        ValueError, match=r"rows of environment 0: 2 there, 3 here\.*. The training"
    ):
        run(3, **resume)
    with pytest.raises(ValueError, match="train_seeds=1 is less than the 2 saved"):
        run(1, allow_appended_rows=True, **resume)
    run(3, allow_appended_rows=True, **resume)
    lines = (tmp_path / "run" / "completions.jsonl").read_text().splitlines()
    games = dict.fromkeys((json.loads(e)["iteration"], json.loads(e)["question"]) for e in lines)
    names = [question.split("game ")[1][0] for _, question in games]
    assert [{*names[:2]}, names[2], {*names[3:]}] == [{*"01"}, "2", {*"012"}]
    assert len(rows_of(tmp_path / "run")) == 1 + 3 + 3
