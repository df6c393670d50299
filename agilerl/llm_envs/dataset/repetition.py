"""Notices a test split that repeats the training rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from agilerl.checks import warn_once
from agilerl.llm.prompts import Conversation

logger = logging.getLogger(__name__)

# With fewer, as in a toy, repetitions are no sign of a mistake.
_LEAST_TEST_PROMPTS = 8
_LARGE_SHARE = 0.1


def prompt_key(conversation: Conversation) -> int:
    """The same number, in this process, for the same messages."""
    return hash(repr(conversation))


class RepetitionCheck:
    """Warns once if a large share of the test prompts are training prompts as well.

    Args:
        test_keys: :func:`prompt_key` of every test prompt.
    """

    def __init__(self, test_keys: Iterable[int]) -> None:
        self._held_out = set(test_keys)
        self._repeated: set[int] = set()
        self._warned = False

    def trained_on(self, keys: Iterable[int]) -> None:
        """Take training prompts into account, all at once or as they come."""
        self._repeated |= self._held_out.intersection(keys)
        share = len(self._repeated) / len(self._held_out)
        enough = len(self._held_out) >= _LEAST_TEST_PROMPTS and share >= _LARGE_SHARE
        if enough and not self._warned:
            self._warned = True  # of a stream the share grows, and so would change the message
            warn_once(
                logger,
                "Of the prompts of test_dataset at least %.0f%% are in train_dataset too, so its "
                "fitness does not show how an agent does on new ones; hold rows out, for example "
                "with dataset.train_test_split(test_size=0.1, seed=0).",
                100 * share,
            )
