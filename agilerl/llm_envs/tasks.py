"""The tasks of question-answer environments: which one a seed picks, in training and evaluation."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from agilerl.checks import warn_once
from agilerl.llm_envs.base import shorten
from agilerl.llm_envs.vector import EVALUATION_SEED_START

logger = logging.getLogger(__name__)

Task: TypeAlias = Mapping[str, Any]
"""A question (text) and its ``answer``, which only the reward function sees."""
TaskFunction: TypeAlias = Callable[[int | None], Task]
"""From a seed (None: any) to a task."""
Tasks: TypeAlias = Sequence[Task] | TaskFunction


class TaskPicker:
    """Picks tasks by seed; those from ``EVALUATION_SEED_START`` on are for evaluation.

    Args:
        tasks: For training.
        test_tasks: For evaluation; None: ``tasks`` too.

    Raises:
        TypeError: Something else than tasks.
        ValueError: No tasks; a task without question or answer.
    """

    def __init__(self, tasks: Tasks, test_tasks: Tasks | None = None) -> None:
        self._tasks = _checked_tasks("tasks", tasks)
        self._test_tasks = None if test_tasks is None else _checked_tasks("test_tasks", test_tasks)

    def pick(self, seed: int | None) -> Task:
        """Task ``seed % len(tasks)`` of a list, or any; what a function returns for the seed.

        Raises:
            TypeError: A function returned no task.
            ValueError: Its task has no question or no answer.
        """
        tasks, index = self._tasks, seed
        if seed is not None and seed >= EVALUATION_SEED_START:
            if self._test_tasks is not None:
                tasks, index = self._test_tasks, seed - EVALUATION_SEED_START
            elif not callable(tasks):
                # Once: every episode has an environment of its own.
                warn_once(
                    logger,
                    "Evaluation is on the tasks that are trained on; pass test_tasks=[...] to keep "
                    "them apart.",
                )
        if callable(tasks):
            return _checked_task(tasks(seed))
        return random.choice(tasks) if index is None else tasks[index % len(tasks)]


def _checked_tasks(name: str, tasks: Any) -> list[Task] | TaskFunction:
    if callable(tasks):
        return cast(TaskFunction, tasks)
    if isinstance(tasks, str | Mapping) or not isinstance(tasks, Iterable):
        raise TypeError(f"{name} must be a list of dicts or a function, got {shorten(tasks)}")
    checked = [_checked_task(task) for task in tasks]
    if not checked:
        raise ValueError(f"{name} is empty; pass at least one dict with question and answer")
    return checked


def _checked_task(task: Any) -> Task:
    if not isinstance(task, Mapping):
        raise TypeError(f"a task must be a dict with question and answer, got {shorten(task)}")
    missing = [key for key in ("question", "answer") if key not in task]
    if missing:
        raise ValueError(
            f"the task {shorten(dict(task))} has no {' and no '.join(missing)}; a task is a dict "
            "with both"
        )
    if not isinstance(task["question"], str):
        raise TypeError(f"a task's question must be text, got {shorten(task['question'])}")
    return task
