"""Tables of completions: which are shown, and how they look in a terminal and in a notebook."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

# Here, not when it is needed: rich draws from the global random stream when it is imported, which
# in the middle of a run would change what is drawn after it.
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agilerl.training.collectors.experience import Sample
from agilerl.training.trackers.protocol import CompletionTable, number_text
from agilerl.typing import Evaluation

_LONGEST_CELL = 400
"""Characters of a text in a terminal; trackers get all of them."""

Shown = tuple[str, Sample]
"""What a completion is shown as, such as ``"best"``, and it."""


def training_table(
    agent: str, index: int, iteration: int, samples: Sequence[Sample], group_size: int, count: int
) -> CompletionTable:
    """The best and the worst completion of groups, and one that failed.

    Batches are shuffled, so the groups are not chosen: they are the first.

    Args:
        agent: Names the agent in the title.
        index: Its index.
        iteration: Names the iteration.
        samples: All completions of a batch, group by group.
        group_size: G.
        count: Rows of the table, at most.
    """
    shown: list[Shown] = []
    for start in range(0, len(samples), group_size):
        shown += _of_group(samples[start : start + group_size])
        if len(shown) >= count:
            break
    title = f"{agent}, iteration {iteration}: completions of the training batch"
    return _table(f"agent_{index}/training", title, shown[:count])


def evaluation_table(
    agent: str, index: int, iteration: int, evaluation: Evaluation, count: int
) -> CompletionTable:
    """The best and the worst answers of an evaluation, and why one failed.

    Args:
        agent: Names the agent in the title.
        index: Its index.
        iteration: Names the iteration.
        evaluation: The evaluation; may lack texts.
        count: Rows of the table, at most.
    """
    rewards = evaluation.rewards.tolist()
    answers = evaluation.answers or [None] * len(rewards)
    texts = zip(evaluation.questions, evaluation.completions, answers, rewards, strict=False)
    ordered = sorted((Sample(*each) for each in texts), key=lambda each: -(each.reward or 0.0))
    failed = [Sample("", "", None, None, failure=each) for each in evaluation.failures[:1]]
    room = count - len(failed)
    best, worst = -(-room // 2), room // 2
    worst = max(min(worst, len(ordered) - best), 0)
    shown = [("best", each) for each in ordered[:best]]
    shown += [("worst", each) for each in ordered[len(ordered) - worst :]]
    shown += [("failed", each) for each in failed]
    title = f"{agent}, iteration {iteration}: answers of the evaluation"
    return _table(f"agent_{index}/evaluation", title, shown)


def print_table(table: CompletionTable, say: Callable[[str], None]) -> None:
    """Print a table: in a notebook as its output, elsewhere as lines of the terminal's width.

    Args:
        table: The table. What could move a terminal's cursor in its texts is shown as an escape.
        say: Prints text without breaking the progress bar.
    """
    numbers = [all(not isinstance(row[i], str) for row in table.rows) for i in _places(table)]
    drawn = Table(box=box.ROUNDED, show_lines=True)
    for name, right in zip(table.columns, numbers, strict=True):
        # Numbers keep their width; the texts share what is left.
        drawn.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row in table.rows:
        # Not as str: rich would read "[...]" in them as markup.
        cells = [_visible(each) if isinstance(each, str) else number_text(each) for each in row]
        drawn.add_row(*map(Text, cells))
    console = Console()
    if console.is_jupyter:
        console.print(table.title, drawn, sep="\n", markup=False)
        return
    encoding = sys.stdout.encoding or "utf-8"
    buffer = io.StringIO()
    width = shutil.get_terminal_size((100, 24)).columns
    colours = sys.stdout.isatty()
    drawn.box = box.ROUNDED if encoding.lower().startswith("utf") else box.ASCII
    Console(file=buffer, width=width, force_terminal=colours, no_color=not colours).print(drawn)
    text = buffer.getvalue().rstrip("\n")
    text = f"{_visible(table.title)}\n{text}"
    say(text.encode(encoding, "backslashreplace").decode(encoding))


def _of_group(group: Sequence[Sample]) -> list[Shown]:
    """Of one group: the first of equal ones."""
    scored = [each for each in group if each.reward is not None and each.failure is None]
    failed = [each for each in group if each.failure is not None]
    shown: list[Shown] = []
    if scored:
        best = max(scored, key=_reward)
        worst = min(scored, key=_reward)
        same = _reward(best) == _reward(worst)
        shown = [("all equal", best)] if same else [("best", best), ("worst", worst)]
    return shown + [("failed", each) for each in failed[:1]]


def _reward(sample: Sample) -> float:
    assert sample.reward is not None
    return sample.reward


def _table(name: str, title: str, shown: Sequence[Shown]) -> CompletionTable:
    """The columns that have a value."""
    rewards = dict.fromkeys(reward for _, sample in shown for reward in sample.rewards)
    columns = ["shown as", "prompt", "completion", "answer", "reward", *rewards, "remark"]
    rows = [
        [
            kind,
            sample.question,
            sample.completion,
            None if sample.answer is None else str(sample.answer),
            sample.reward,
            *(sample.rewards.get(reward) for reward in rewards),
            sample.failure or ("cut off" if sample.truncated else None),
        ]
        for kind, sample in shown
    ]
    table = CompletionTable(name, title, columns, rows)
    kept = [i for i in _places(table) if i < 3 or any(row[i] is not None for row in rows)]
    return replace(
        table,
        columns=[columns[i] for i in kept],
        rows=[[row[i] for i in kept] for row in rows],
    )


def _places(table: CompletionTable) -> range:
    return range(len(table.columns))


def _visible(text: str) -> str:
    """Without the middle of a long text, and with escapes for what is not printable."""
    if len(text) > _LONGEST_CELL:
        half = _LONGEST_CELL // 2
        text = f"{text[:half]} [{len(text) - 2 * half} more characters] {text[-half:]}"
    shown = (each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)
    return "".join(shown)
