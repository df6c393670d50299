"""Evaluations as training functions make them, and the columns that they give."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from agilerl.algorithms.core.evaluation import EvaluationStopped
from agilerl.checks import require
from agilerl.training.collectors.experience import accuracy, right_answers
from agilerl.typing import Act, ActionResult, EvaluableEnv, Evaluation, ReasoningPrompts

if TYPE_CHECKING:
    import numpy as np

    from agilerl.distributed import Ranks
    from agilerl.training.interrupts import GracefulStop
    from agilerl.training.population import Member
    from agilerl.training.protocols import Agent, EvaluationPlan

logger = logging.getLogger(__name__)

_evaluations = count()


class StopCheck:
    """Stops one evaluation when a signal has reached any of the processes.

    Each makes one for the same evaluation, and calls it whenever the agent is about to answer.

    Args:
        stop: Knows of the signals of this process.
        ranks: The processes.
    """

    def __init__(self, stop: GracefulStop, ranks: Ranks) -> None:
        self._stop, self._ranks = stop, ranks
        # All processes make the same evaluations, so the number is the same on each.
        self._event = f"stop evaluation {next(_evaluations)}"

    def __call__(self) -> None:
        """Raise ``EvaluationStopped`` if one has.

        Ranks answer at their own pace, so this is no collective.
        """
        if self._stop.requested is not None:
            self._ranks.notify(self._event)
        elif not self._ranks.notified(self._event):
            return
        raise EvaluationStopped


class WatchedEnv:
    """An environment whose evaluations are made after a plan, and kept.

    Args:
        env: The environment, to which all else is left.
        plan: The plan.
        **arguments: Further arguments of the environment's ``evaluate``.
    """

    def __init__(self, env: EvaluableEnv, plan: EvaluationPlan, **arguments: Any) -> None:
        self._env, self._plan, self._arguments = env, plan, arguments
        self.evaluation = Evaluation(torch.zeros(0))
        """The last one, of this process."""

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
        """As the environment's."""

        def answer(prompts: list[ReasoningPrompts]) -> ActionResult:
            self._plan.before_answers()
            return act(prompts)

        self.evaluation = self._env.evaluate(answer, loop, **self._arguments)
        return self.evaluation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


@dataclass(frozen=True)
class Evaluated:
    """The N answers of an evaluation, over all ranks once gathered.

    Two samples of two rows, in a set each::

        rewards        [1.0, 0.0, 1.0, 1.0]
        rows           [0, 0, 1, 1]
        sets           ["easy", "easy", "hard", "hard"]
        final_answers  ["4", "5", "12", "12"]
    """

    rewards: torch.Tensor
    """``(N,)`` float32."""
    rows: list[int] = field(default_factory=list)
    """As :attr:`agilerl.typing.Evaluation.rows`; so are ``sets`` and ``final_answers``."""
    sets: list[str] = field(default_factory=list)
    final_answers: list[str | None] = field(default_factory=list)

    def of_set(self, name: str) -> Evaluated:
        """Those of a test set."""
        kept = [i for i, each in enumerate(self.sets) if each == name]
        return Evaluated(
            self.rewards[torch.tensor(kept)],
            [self.rows[i] for i in kept] if self.rows else [],
            [name] * len(kept),
            [self.final_answers[i] for i in kept] if self.final_answers else [],
        )


def evaluate_members(
    members: Sequence[Member],
    plan: EvaluationPlan,
    ranks: Ranks,
    accuracy_threshold: float,
    show: Callable[[Agent, Evaluation], None],
) -> list[dict[str, float]] | None:
    """Evaluate every agent.

    Args:
        members: Whose agents.
        plan: How.
        ranks: The processes, which must all call this.
        accuracy_threshold: Answers with at least this reward are right.
        show: Shows each agent's answers, those of this process, once all are evaluated.

    Returns:
        What it adds to the row of each; None: it was stopped, and nothing has changed.
    """
    before = [(len(member.agent.fitness), len(member.agent.steps)) for member in members]
    rows, shown = [], []
    try:
        for member in members:
            started = time.perf_counter()
            rewards, own = member.collector.evaluate(member.agent, plan)
            shown.append((member.agent, own))
            answers = evaluated(rewards, own, ranks)
            if plan.samples is not None and ranks.rank == 0:
                _warn_of_incomplete_rows(answers, plan.samples)
            rows.append(
                {
                    "evaluation_seconds": time.perf_counter() - started,
                    "fitness": float(member.agent.fitness[-1]),
                    **evaluation_statistics(answers, accuracy_threshold, plan.samples),
                }
            )
    except EvaluationStopped:
        for member, (evaluations, steps) in zip(members, before, strict=True):
            del member.agent.fitness[evaluations:]
            del member.agent.steps[steps:]
        return None
    for agent, own in shown:
        show(agent, own)
    return rows


def evaluated(rewards: np.ndarray, own: Evaluation, ranks: Ranks) -> Evaluated:
    """What all ranks have evaluated.

    Args:
        rewards: ``(N,)``, of all ranks in their order.
        own: This rank's evaluation.
        ranks: The processes, which must all call this.
    """
    of_ranks = ranks.gather((own.rows, own.sets, own.final_answers))
    joined = ([each for part in parts for each in part] for parts in zip(*of_ranks, strict=True))
    return Evaluated(torch.as_tensor(rewards, dtype=torch.float32), *joined)


def evaluation_statistics(
    answers: Evaluated, accuracy_threshold: float, samples: int | None
) -> dict[str, float]:
    """Columns of an evaluation besides its fitness.

    Where test sets have names each has columns of its own, such as ``fitness/hard`` and
    ``pass@8/hard``. Those of several samples are over the rows that have all of them: with fewer
    answers a row has no pass@k, and a mean over other rows for every k would not rise with k.
    Without such a row they are nan.

    Args:
        answers: Of all ranks.
        accuracy_threshold: Answers with at least this reward are right.
        samples: How many were sampled per row; None: one greedy answer.

    Raises:
        ValueError: ``samples`` are asked for, but the environment does not say of which rows.
    """
    require(
        samples is None or len(answers.rows) == len(answers.rewards),
        "evaluation_samples needs to know which answers are of the same row, and the Evaluation "
        "that the environment returned does not say: have it fill in rows",
    )
    columns = _right_answer_columns(answers, accuracy_threshold, samples)
    for name in dict.fromkeys(answers.sets):
        of_set = answers.of_set(name)
        columns[f"fitness/{name}"] = float(of_set.rewards.mean())
        of_set_columns = _right_answer_columns(of_set, accuracy_threshold, samples)
        columns |= {f"{column}/{name}": value for column, value in of_set_columns.items()}
    return columns


def _right_answer_columns(
    answers: Evaluated, accuracy_threshold: float, samples: int | None
) -> dict[str, float]:
    """Columns of right answers, of all test sets or of one."""
    columns = {"eval_accuracy": accuracy(answers.rewards, accuracy_threshold)}
    if samples is None:
        return columns
    right = right_answers(answers.rewards, accuracy_threshold).tolist()
    complete = [of_row for of_row in _answers_of_rows(answers) if len(of_row) >= samples]
    counts = [(len(of_row), sum(right[i] for i in of_row)) for of_row in complete]
    columns[f"avg@{samples}"] = _mean([c / n for n, c in counts])
    for k in sizes_of_pass(samples):
        columns[f"pass@{k}"] = _mean([pass_at_k(n, c, k) for n, c in counts])
    if answers.final_answers:
        votes = [
            majority_is_right(
                [answers.final_answers[i] for i in of_row], [right[i] for i in of_row]
            )
            for of_row in complete
        ]
        columns[f"maj@{samples}"] = _mean(votes)
    return columns


def _answers_of_rows(answers: Evaluated) -> list[list[int]]:
    """The places of the answers of each row; of a row that lost all of them nothing."""
    of_rows: dict[int, list[int]] = {}
    for number, row in enumerate(answers.rows):
        of_rows.setdefault(row, []).append(number)
    return list(of_rows.values())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _warn_of_incomplete_rows(answers: Evaluated, samples: int) -> None:
    rows = _answers_of_rows(answers)
    lost = sum(len(of_row) < samples for of_row in rows)
    if lost:
        logger.warning(
            "%d of %d rows of the evaluation have fewer than %d answers, as others were dropped: "
            "they are left out of avg@%d, pass@k and maj@%d",
            lost,
            len(rows),
            *[samples] * 3,
        )


def sizes_of_pass(samples: int) -> list[int]:
    """The k of the columns ``pass@k``: powers of two, and all samples."""
    powers = [2**i for i in range(1, samples.bit_length()) if 2**i < samples]
    return [*powers, samples]


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that one of k answers is right, estimated without bias from more of them.

    ``1 - C(n - c, k) / C(n, k)`` for n samples of which c are right: "Evaluating Large Language
    Models Trained on Code", arXiv:2107.03374, equation 1.

    Args:
        samples: n, at least k.
        right: c.
        k: k.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_is_right(final_answers: Sequence[str | None], right: Sequence[bool]) -> bool:
    """Whether the most frequent answer of a row is right; of several the one that came first.

    Self-consistency, arXiv:2203.11171. Samples without an answer have no vote.
    """
    votes = Counter(answer for answer in final_answers if answer is not None)
    if not votes:
        return False
    ((winner, _),) = votes.most_common(1)  # of equally frequent ones the first
    return right[list(final_answers).index(winner)]
