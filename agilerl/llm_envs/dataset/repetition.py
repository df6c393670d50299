"""Notices evaluations on prompts that are trained on."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from agilerl.checks import warn_once
from agilerl.llm.prompts import Conversation
from agilerl.typing import ReasoningPrompts

logger = logging.getLogger(__name__)

# With fewer, as in a toy or a game of few positions, repetitions are no sign of a mistake.
_LEAST_DIFFERENT_PROMPTS = 8
_LARGE_SHARE = 0.1


def prompt_key(conversation: Conversation) -> int:
    """The same number, in this process, for the same messages."""
    return hash(repr(conversation))


def key_of_ids(prompt: ReasoningPrompts) -> int:
    """The same number, in this process, for the same token ids."""
    return hash(prompt["input_ids"].cpu().numpy().tobytes())


class RepetitionCheck:
    """Warns once if a large share of the evaluation prompts are training prompts as well.

    Prompts are given as keys: equal numbers for equal ones. Training prompts are kept only until
    the evaluation prompts are known.

    Args:
        evaluation: What messages call the data of evaluation.
        training: What they call that of training.
        remedy: How to keep them apart.
    """

    def __init__(self, evaluation: str, training: str, remedy: str) -> None:
        self._evaluation, self._training, self._remedy = evaluation, training, remedy
        self._held_out: frozenset[int] = frozenset()
        self._trained: set[int] = set()
        """Until the evaluation prompts are known all of them, then those among them."""
        self._warned = False

    def evaluated_on(self, keys: Iterable[int]) -> None:
        """Take the prompts of evaluation, which are the same every time, into account."""
        if not self._held_out:
            self._held_out = frozenset(keys)
            self._trained &= self._held_out
            self._check()

    def trained_on(self, keys: Iterable[int]) -> None:
        """Take training prompts into account, all at once or as they come."""
        self._trained |= self._held_out.intersection(keys) if self._held_out else set(keys)
        self._check()

    def _check(self) -> None:
        if self._warned or len(self._held_out) < _LEAST_DIFFERENT_PROMPTS:
            return
        share = len(self._trained) / len(self._held_out)
        if share >= _LARGE_SHARE:
            self._warned = True  # of a stream the share grows, and so would change the message
            warn_once(
                logger,
                "Of the prompts of %s at least %.0f%% are in %s too, so its fitness does not show "
                "how an agent does on new ones; %s.",
                *(self._evaluation, 100 * share, self._training, self._remedy),
            )
