"""Rows and scores of reasoning-gym's tasks."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agilerl.checks import OPTIONAL_COUNT, InstanceOf, Number, require, shorten

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

    from agilerl.llm_envs.rewards import RewardFunctions

logger = logging.getLogger(__name__)

_SIZE, _SEED = 1000, 42
_MOST_DRAWS = 20
"""Questions drawn for each held-out one that is asked for, as some repeat training questions."""

# What some tasks raise for an answer of another form. Anything else is a failure of the task.
_UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, SyntaxError)

Entry = Mapping[str, Any]
"""What a task generates: ``question``, ``answer`` (None where many are right), ``metadata``."""


class ProceduralTask:
    """A task of reasoning-gym, with questions to train on and others to evaluate on.

    Args:
        task: The task's name, a list of names, or a dataset, whose questions are then those to
            train on.
        size: Training questions of a named task; None: 1,000.
        seed: Of the questions of a named task; None: 42.
        test_size: Held-out questions; 0: none.
        config: Further parameters of a named task; of several, a dict by name of such dicts.
        answer_tag: Answers stand between ``<answer>`` and ``</answer>`` if this is ``"answer"``;
            None: the whole completion is the answer.

    Raises:
        ImportError: reasoning-gym is not installed.
        TypeError: An argument of the wrong type.
        ValueError: No task of that name; parameters that it does not take; no question is left to
            be held out.
    """

    def __init__(
        self,
        task: str | Sequence[str] | ProceduralDataset,
        size: int | None,
        seed: int | None,
        test_size: int,
        config: Mapping[str, Any] | None,
        answer_tag: str | None,
    ) -> None:
        OPTIONAL_COUNT("size", size)
        Number(0, integer=True, optional=True)("seed", seed)
        Number(0, integer=True)("test_size", test_size)
        InstanceOf(Mapping, "a dict of the task's parameters")("config", config)
        InstanceOf(str, "the name of a tag")("answer_tag", answer_tag)
        self._dataset = _dataset(task, size, seed, config)
        self._answer_tag = answer_tag
        self.name = task if isinstance(task, str) else "reasoning_gym"
        self.seed: int = self._dataset.seed
        entries = [self._dataset[i] for i in range(len(self._dataset))]
        self.train = [_row(entry) for entry in entries]
        """Training rows: what the task generates, and all of it once more as ``entry``."""
        self.test = [_row(entry) for entry in self._held_out(entries, test_size)] or None
        """Held-out rows, whose questions differ from each other and from those of training."""
        # A task that cannot score its own answer raises here, not on every completion.
        self._dataset.score_answer(entries[0]["answer"], entries[0])

    def score_answer(self, completion: str, entry: Entry) -> float:
        """The task's own score, 0 to 1; 0 without an answer, or with one that it cannot read."""
        answer = self.extract_answer(completion)
        try:
            return float(self._dataset.score_answer(answer, dict(entry)))
        except _UNREADABLE:
            return 0.0

    def extract_answer(self, completion: str) -> str | None:
        """What a completion gives as its answer; None: it has no tags."""
        if self._answer_tag is None:
            return completion.strip()
        from reasoning_gym.utils import extract_answer

        found: str | None = extract_answer(completion, tag_name=self._answer_tag)
        return found

    def _held_out(self, entries: list[Entry], test_size: int) -> list[Entry]:
        if not test_size:
            return []
        draws = _MOST_DRAWS * test_size
        # reasoning-gym makes question i from seed + i: with the next seed nearly all would repeat.
        seed = self.seed + len(entries)
        config = dataclasses.replace(self._dataset.config, size=draws, seed=seed)
        source = type(self._dataset)(config)
        seen = {entry["question"] for entry in entries}
        found: list[Entry] = []
        for i in range(draws):
            entry = source[i]
            if entry["question"] not in seen:
                seen.add(entry["question"])
                found.append(entry)
            if len(found) == test_size:
                return found
        require(
            bool(found),
            f"{self.name} has too few questions: all of {draws} drawn are among the {len(entries)} "
            "to train on; pass a smaller size, a config with more questions, or test_size=0",
        )
        logger.warning(
            "%s: %d of %d held-out questions found; the others of %d drawn are among those to "
            "train on.",
            *(self.name, len(found), test_size, draws),
        )
        return found


def default_template() -> list[dict[str, str]]:
    """reasoning-gym's own instructions: think, then answer between ``<answer>`` tags."""
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return [
        {"role": "system", "content": SYSTEM_PROMPTS["default"]},
        {"role": "user", "content": "{question}"},
    ]


def _row(entry: Entry) -> dict[str, Any]:
    return {**entry, "entry": entry}


def with_task_score(task: ProceduralTask, reward_fn: RewardFunctions | None) -> RewardFunctions:
    """The task's own reward and those of the user.

    Raises:
        ValueError: One of the user's is called ``score_answer`` too.
    """
    if reward_fn is None:
        return task.score_answer
    if isinstance(reward_fn, Mapping):
        require(
            "score_answer" not in reward_fn,
            "reward_fn has the name 'score_answer', which is the task's own reward; name it "
            "otherwise",
        )
        return {"score_answer": task.score_answer, **reward_fn}
    others = reward_fn if isinstance(reward_fn, list | tuple) else [reward_fn]
    return [task.score_answer, *others]


def _dataset(
    task: Any, size: int | None, seed: int | None, config: Mapping[str, Any] | None
) -> ProceduralDataset:
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.dataset import ProceduralDataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(
            "from_reasoning_gym needs reasoning-gym: pip install 'agilerl[envs]'"
        ) from error
    if isinstance(task, ProceduralDataset):
        given = [
            name
            for name, value in {"size": size, "seed": seed, "config": config}.items()
            if value is not None
        ]
        require(
            not given,
            f"task is a dataset with its own {', '.join(given)}; set them when you create it, or "
            "pass the name of the task",
        )
        return task
    names = [task] if isinstance(task, str) else task
    require(
        isinstance(names, list | tuple) and bool(names) and all(isinstance(n, str) for n in names),
        f"task is {shorten(task)}; it must be the name of a reasoning-gym task, a list of names, "
        "or one of its datasets",
        TypeError,
    )
    for name in names:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        require(
            name in DATASETS,
            f"reasoning-gym has no task {name!r}{f'; did you mean {close[0]!r}?' if close else ''}",
        )
    options = dict(config or {})
    if not isinstance(task, str):
        extra = options.keys() - set(names)
        require(not extra, f"config names {sorted(extra)}; the tasks are {', '.join(names)}")
        specs = [DatasetSpec(name=n, weight=1.0, config=options.get(n, {})) for n in names]
        task, options = "composite", {"datasets": specs}
    size, seed = _SIZE if size is None else size, _SEED if seed is None else seed
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym's {task} does not take {config}: {error}") from error
