"""The page's code runs, its figures are those of the runs, and it has every column."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.training.logs.files import FIRST_COLUMNS
from agilerl.training.train_llm import finetune_llm_reasoning

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
NAMES = {each for line in PAGE.splitlines() for each in re.findall(r"`([^`]+)`", line)}


def missing(columns: Any) -> set[str]:
    """Columns that the page does not name."""

    def as_written(column: str) -> str:
        column = re.sub(r"^(rewards|fitness)/[^/]+", r"\1/<name>", column)
        return re.sub(r"@\d+$", "@k", column)

    return {column for column in columns if as_written(column) not in NAMES}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """The names that the page's code leaves, what it printed, and where it ran."""
    folder = tmp_path_factory.mktemp("page")
    names: dict[str, Any] = {"__name__": "page"}
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
            exec(compile(code, "metrics.md", "exec"), names)
    return names, printed.getvalue(), folder


def test_code_and_output(page: tuple[dict[str, Any], str, Path]) -> None:
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
    assert page[1] == shown


def test_every_column_of_runs_is_on_the_page(page: tuple[dict[str, Any], str, Path]) -> None:
    names, _, folder = page
    assert not missing(FIRST_COLUMNS)
    env, agent = names["env"], names["agent"]
    finetune_llm_reasoning(
        *([agent], env),
        max_steps=4,
        verbose=False,
        evaluation_samples=2,
        zero_variance="resample",
        checkpoint_path=folder / "all",
    )
    for run in ("run", "all"):
        with (folder / run / "metrics.csv").open() as file:
            columns = csv.DictReader(file).fieldnames
        assert columns is not None and len(columns) > 25
        assert not missing(columns)
    assert missing(["reward", "rewards/a/mean", "fitness/hard", "pass@8"]) == {"reward"}


@pytest.mark.parametrize(
    "options",
    [
        {"dual_clip": 3.0, "top_entropy_quantile": 0.5, "beta": 0.1},
        {"importance_anchor": "sampler"},
    ],
)
def test_what_options_of_the_loss_measure_is_on_the_page(
    options: dict[str, Any], page: tuple[dict[str, Any], str, Path]
) -> None:
    names, tokenizer = page[0], page[0]["tokenizer"]
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
    assert "sampler_kl" in metrics and not missing(metrics)
    agent.clean_up()


def test_episodes_have_no_other_columns() -> None:
    source = (ROOT / "agilerl" / "training" / "collectors" / "multiturn_collector.py").read_text()
    assert re.findall(r'^        "(\w+_\w+)": float', source, flags=re.MULTILINE) == ["turns_mean"]
    assert not missing(["turns_mean"])


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
