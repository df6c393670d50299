"""The page's code runs, its figures are those of the runs, and it has every column."""

from __future__ import annotations

import contextlib
import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from documentation_page import run_page

from agilerl.algorithms import GRPO
from agilerl.llm_envs import ReasoningGym, TokenObservationWrapper
from agilerl.training.logs.files import FIRST_COLUMNS
from agilerl.training.train_llm import finetune_llm_multiturn, finetune_llm_reasoning

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
TABLE = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.partition("## Healthy")[0].splitlines()
    if line.startswith("| `")
]
WHERE = {name: row[-1] for row in TABLE for name in re.findall(r"`([^`]+)`", row[0])}
"""Every column of the page, with what its last cell says of where it is written."""


def as_on_the_page(columns: Iterable[str]) -> set[str]:
    """The columns, with the page's placeholders for names and numbers."""
    pattern = r"^(rewards|fitness|eval_accuracy|\w+@\d+)/[^/]+"
    named = (re.sub(pattern, r"\1/<name>", column) for column in columns)
    return {re.sub(r"@\d+", "@k", column) for column in named}


def columns_of(run: Path) -> set[str]:
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return as_on_the_page(name for row in rows for name, value in row.items() if value)


class Game:
    """Two turns; the second one pays."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return f"game {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return "on", float(self.turn == 2 and len(action) % 2), self.turn == 2, False, {}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The names that the page's code leaves, and where it ran."""
    folder = tmp_path_factory.mktemp("page")
    with contextlib.chdir(folder):
        return run_page(PAGE, shown=1), folder


@pytest.fixture(scope="module")
def written(page: tuple[dict[str, Any], Path]) -> dict[str, set[str]]:
    """The columns of a run of each function with all options that add some."""
    names, folder = page
    agent, tokenizer = names["agent"], names["tokenizer"]
    rows = [{"question": word, "answer": word[::-1]} for word in names["words"]]
    options: dict[str, Any] = {
        "verbose": False, "evaluation_samples": 2, "zero_variance": "resample"
    }  # fmt: skip
    env = ReasoningGym(
        rows,
        {"easy": rows[:1], "hard": rows[1:2]},
        tokenizer,
        {"odd": lambda completion: len(completion) % 2, "half": lambda completion: 0.5},
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=2,
        extract_answer=lambda completion: completion[:1],
    )
    finetune_llm_reasoning([agent], env, checkpoint_path=folder / "all", max_steps=4, **options)
    finetune_llm_multiturn(
        [agent],
        2,
        lambda: TokenObservationWrapper(Game(), tokenizer, max_turns=2),
        checkpoint_path=folder / "episodes",
        max_steps=8,
        groups_per_iteration=2,
        evaluation_episodes=2,
        max_workers=1,
        **options,
    )
    return {run: columns_of(folder / run) for run in ("run", "all", "episodes")}


def test_code_and_output(page: tuple[dict[str, Any], Path]) -> None:
    assert (page[1] / "run" / "metrics.csv").exists()


def test_the_columns_of_both_functions_are_those_of_the_page(
    written: dict[str, set[str]],
) -> None:
    assert set(FIRST_COLUMNS) <= set(WHERE)
    for columns in written.values():
        assert columns <= set(WHERE)
    reasoning, episodes = written["all"], written["episodes"]

    def said(where: str) -> set[str]:
        return {name for name, each in WHERE.items() if each == where}

    assert len(said("")) > 20
    assert said("") <= reasoning & episodes
    assert said("multi-turn") == episodes - reasoning
    assert said("reasoning") <= reasoning - episodes


def learned(names: dict[str, Any], **options: Any) -> set[str]:
    """What ``learn`` measures of an agent with these options, given the sampler's log-probs."""
    tokenizer = names["tokenizer"]
    agent = GRPO(
        tokenizer.pad_token_id,
        tokenizer.pad_token,
        actor_network=names["model"],
        group_size=2,
        batch_size=2,
        lr=1e-4,
        max_output_tokens=3,
        **options,
    )
    action = agent.get_action(names["env"].reset()[:1])
    logps = [torch.full((int(mask.sum()),), -1.0) for mask in action.action_masks[0]]
    metrics = agent.learn((*action, torch.tensor([[0.0, 1.0]])), sampling_logps=logps)
    agent.clean_up()
    return set(metrics)


def test_every_column_of_the_page_is_written_by_some_run(
    page: tuple[dict[str, Any], Path], written: dict[str, set[str]]
) -> None:
    options = {"dual_clip": 3.0, "top_entropy_quantile": 0.5, "beta": 0.1}
    with_options = learned(page[0], **options), learned(page[0], importance_anchor="sampler")
    found = set().union(*written.values(), *with_options)
    assert found == set(WHERE)


def test_the_figures_are_those_of_the_runs() -> None:
    file = ROOT / "benchmarking" / "results" / "metrics-page.json"
    runs = json.loads(file.read_text())["first and last value"]
    table = {line.split("|")[1].strip(): line for line in PAGE.splitlines() if line[:2] == "| "}
    for name, column, form in [
        ("healthy", "reward_mean", "{0:.2f} to {1:.2f}"),
        ("healthy", "eval_accuracy", "{0:.2f} to {1:.2f}"),
        ("healthy", "zero_variance_groups", "{0:.0f} to {1:.0f}"),
        ("healthy", "entropy", "{0:.2f} to {1:.2f}"),
        ("all truncated", "truncated_share", "`truncated_share` {1:.2f}"),
        ("entropy collapse", "reward_mean", "{0:.2f} to {1:.2f}"),
        ("entropy collapse", "entropy", "from {0:.2f} to {1:.2f}"),
    ]:
        assert form.format(*runs[name][column]) in table[name], (name, column)
    assert (ROOT / "docs" / "metrics.png").stat().st_size < 150_000
