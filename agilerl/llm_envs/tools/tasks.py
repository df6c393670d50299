"""The tasks of a tool environment: questions with answers, one for each seed."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from agilerl.checks import InstanceOf, require, shorten, warn_once
from agilerl.llm_envs.seeds import EVALUATION_SEED_START

logger = logging.getLogger(__name__)

Task: TypeAlias = Mapping[str, Any]
"""A ``question`` (text) and its ``answer``, which only the reward function sees."""
TaskFunction: TypeAlias = Callable[[int | None], Task]
"""From a seed (None: any) to a task."""
Tasks: TypeAlias = Sequence[Task] | TaskFunction


class TaskChoice:
    """Chooses tasks by seeds.

    Args:
        tasks: A list, or a function from the seed.
        test_tasks: Those of evaluation seeds; None: ``tasks`` too.

    Raises:
        TypeError: Neither a list of dicts nor a function.
        ValueError: No tasks; a task without question or answer.
    """

    def __init__(self, tasks: Tasks, test_tasks: Tasks | None) -> None:
        self._tasks = _checked_tasks("tasks", tasks)
        self._test_tasks = None if test_tasks is None else _checked_tasks("test_tasks", test_tasks)

    def of_seed(self, seed: int | None) -> Task:
        """The task of a seed; None: any."""
        tasks, index = self._tasks, seed
        if seed is not None and seed >= EVALUATION_SEED_START:
            if self._test_tasks is not None:
                tasks, index = self._test_tasks, seed - EVALUATION_SEED_START
            elif not callable(tasks):
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
        function: TaskFunction = tasks
        return function
    is_list = isinstance(tasks, Iterable) and not isinstance(tasks, str | Mapping)
    if not is_list:
        raise TypeError(f"{name} is {shorten(tasks)}; it must be a list of dicts or a function")
    checked = [_checked_task(task) for task in tasks]
    require(bool(checked), f"{name} is empty; pass at least one dict with question and answer")
    return checked


def _checked_task(task: Any) -> Task:
    InstanceOf(Mapping, "a dict with question and answer", optional=False)("a task", task)
    missing = [key for key in ("question", "answer") if key not in task]
    if missing:
        raise ValueError(
            f"the task {shorten(task)} has no {' and no '.join(missing)}; it must have both"
        )
    InstanceOf(str, "text", optional=False)("a task's question", task["question"])
    checked: Task = task
    return checked
