"""reasoning-gym's `spell_backward` as a pair of datasets that share no word, and its reward.

One rule, a hash of the word, says which words are held out. It does not depend on the seed, so
what the bundled model saw in its warm-up is disjoint from every held-out question ever drawn.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any

from agilerl.checks import Number

if TYPE_CHECKING:
    from datasets import Dataset

MIN_WORD_LEN = 3
MAX_WORD_LEN = 7

SPELL_BACKWARD_CONVERSATION = [{"role": "user", "content": "{question}"}]
"""Conversation template of the warm-up, as ``ReasoningGym`` takes it."""

_HELD_OUT_SHARE = 8
"""One word in this many is held out."""


def spell_backward_datasets(
    train_size: int = 16_384, test_size: int = 400, seed: int = 0
) -> tuple[Dataset, Dataset]:
    """Draw training and held-out questions, each about another word of 3 to 7 letters.

    No held-out word occurs in training, in other letter case or as an answer either. Questions and
    answers are reasoning-gym's own.

    Args:
        train_size: Training questions, 0 or more; about 50,000 words are there to draw from.
        test_size: Held-out questions, 0 or more; about 7,000 words are there.
        seed: Which words are drawn, and in which order.

    Returns:
        The training and the held-out dataset, both with the columns ``question`` and ``answer``.

    Raises:
        ValueError: A size is negative or larger than the number of words.
        ImportError: reasoning-gym is not installed.
    """
    wanted = {False: train_size, True: test_size}
    _check_sizes(wanted)
    source = _source(Random(seed).getrandbits(32))
    rows: dict[bool, list[dict[str, str]]] = {False: [], True: []}
    seen: set[str] = set()
    index = 0
    while any(len(rows[side]) < size for side, size in wanted.items()):
        entry = source[index]
        index += 1
        word = entry["metadata"]["word"].lower()
        side = is_held_out(word)
        if word not in seen and len(rows[side]) < wanted[side]:
            seen.add(word)
            rows[side].append({"question": entry["question"], "answer": entry["answer"]})
    train, test = (_columns(rows[side]) for side in (False, True))
    return train, test


def is_held_out(word: str) -> bool:
    """Say whether a word is held out; a word and its reversal are on the same side."""
    word = word.lower()
    return zlib.crc32(min(word, word[::-1]).encode()) % _HELD_OUT_SHARE == 0


def spell_backward_reward(completion: str, answer: str, question: str) -> float:
    """Score a completion with reasoning-gym's own ``score_answer``.

    Args:
        completion: The model's text without special tokens; white space around it is not counted.
        answer: The right answer.
        question: The question, unused by this family's score.

    Returns:
        1.0 for the right answer in any letter case, else the share of letters that are in place.
        (A right answer with letters too many gets 0.8 to just below 1.0: reasoning-gym's rule.)
    """
    entry = {"question": question, "answer": answer}
    return float(_source(0).score_answer(completion.strip(), entry))


def spell_backward_correct(completion: str, answer: str, question: str) -> float:
    """Score the right answer 1.0 and any other 0.0, arguments as :func:`spell_backward_reward`."""
    return float(spell_backward_reward(completion, answer, question) == 1.0)


def _columns(rows: list[dict[str, str]]) -> Dataset:
    """Make a dataset that has its columns also when it has no rows."""
    from datasets import Dataset, Features, Value

    names = ("question", "answer")
    features = Features({name: Value("string") for name in names})
    return Dataset.from_dict({name: [row[name] for row in rows] for name in names}, features)


@lru_cache(maxsize=8)
def _source(seed: int) -> Any:
    """Return reasoning-gym's dataset; any index has a question, ``size`` is not a limit."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "the spell_backward task needs reasoning-gym: pip install 'agilerl[demo]'"
        ) from error
    return reasoning_gym.create_dataset(
        "spell_backward", min_word_len=MIN_WORD_LEN, max_word_len=MAX_WORD_LEN, seed=seed, size=1
    )


@lru_cache(maxsize=1)
def _available() -> dict[bool, int]:
    """Count the words on each side, other letter case not counted: ``{held out: words}``."""
    words = {word.lower() for word in _source(0).words}
    held_out = sum(map(is_held_out, words))
    return {False: len(words) - held_out, True: held_out}


def _check_sizes(wanted: dict[bool, int]) -> None:
    available = _available()
    for side, size in wanted.items():
        Number(0, available[side], integer=True)("test_size" if side else "train_size", size)
