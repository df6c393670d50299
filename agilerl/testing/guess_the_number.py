"""GEM's Guess The Number, and players of mixed quality whose games warm a model up.

The game is GEM's own, unmodified. The players only serve the warm-up: at every guess they either
heed the hints or, carelessly, come back to a favourite number.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from agilerl.checks import COUNT, Number
from agilerl.testing.tokenizer import TURN_END_TOKEN, TURN_START_TOKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_NUMBER = 1
MAX_NUMBER = 6
MAX_TURNS = 3
"""Three guesses find any of six numbers, if the first two split what the hints leave."""

HELD_OUT_SEED = 1_000_000_000
"""Seeds from here on are for evaluation: the warm-up uses none of them."""

MIDDLE_OPENINGS = 0.9
"""Share of the first guesses that are in the middle of the range, by players who think at all."""

Player: TypeAlias = Callable[[Sequence[str]], int]
"""From the observations so far, instructions first, to the next guess."""

_HINT = re.compile(r"you guessed (\d+), and the target number is (higher|lower)")


@dataclass(frozen=True)
class Game:
    r"""One game that was played to its end, as text.

    A game won at the second guess::

        observations  ("You are playing ... next guess.", "At turn 1, ... next guess.")
        actions       ("\boxed{3}", "\boxed{5}")
        rewards       (0.0, 1.0)
    """

    observations: tuple[str, ...]
    """What was shown before each action, the environment's prefix and suffix included."""
    actions: tuple[str, ...]
    """What was answered."""
    rewards: tuple[float, ...]
    """What each answer earned: 1 for the number, else 0; the last turn pays 1 - distance/range."""

    @property
    def won(self) -> bool:
        """Whether the number was found."""
        return self.rewards[-1] == 1.0


def guess_the_number_env(
    min_number: int = MIN_NUMBER, max_number: int = MAX_NUMBER, max_turns: int = MAX_TURNS
) -> Any:
    """Make GEM's ``GuessTheNumberEnv``, unmodified; :func:`boxed` writes a guess for it.

    GEM seeds and draws from Python's *global* random numbers, and seeds numpy's: ``reset(seed)`` in
    two threads at once gives games that their seeds do not decide. Making the environment leaves
    both as they were; so does :func:`reset`.

    Args:
        min_number: Smallest number, 1 or more (GEM takes a guess of 0 for no guess).
        max_number: Largest number, above ``min_number``.
        max_turns: Guesses in a game, 1 or more.

    Raises:
        ValueError: An argument is out of range.
        ImportError: GEM is not installed.
    """
    COUNT("min_number", min_number)
    Number(min_number + 1, integer=True)("max_number", max_number)
    COUNT("max_turns", max_turns)
    try:
        from gem.envs.game_env.guess_the_number import GuessTheNumberEnv
    except ImportError as error:
        raise ImportError(
            "the guess_the_number task needs gem-llm: pip install 'agilerl[demo]'"
        ) from error
    with kept_random_state():
        return GuessTheNumberEnv(min_number, max_number, max_turns)


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore Python's and numpy's global random states afterwards; GEM seeds both."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def play(env: Any, player: Player, seed: int) -> Game:
    """Play one game; the global random numbers stay as they were.

    Args:
        env: A GEM environment, such as :func:`guess_the_number_env` makes.
        player: Says the guesses.
        seed: Decides the number, and the example that the instructions give.
    """
    observations = [reset(env, seed)]
    actions: list[str] = []
    rewards: list[float] = []
    while True:
        actions.append(boxed(player(observations)))
        text, reward, terminated, truncated, info = env.step(actions[-1])
        rewards.append(float(reward))
        if terminated or truncated:
            return Game(tuple(observations), tuple(actions), tuple(rewards))
        observations.append(_whole(text, info))


def reset(env: Any, seed: int) -> str:
    """Start a game and return its first observation, prefix and suffix included.

    The global random numbers stay as they were.
    """
    with kept_random_state():
        return _whole(*env.reset(seed))


def _whole(text: str, info: Mapping[str, Any]) -> str:
    return f"{info.get('prefix', '')}{text}{info.get('suffix', '')}"


def boxed(number: int) -> str:
    r"""Write a guess as the game reads it, such as ``\boxed{3}``."""
    return f"\\boxed{{{number}}}"


def possible_range(
    observations: Sequence[str], low: int = MIN_NUMBER, high: int = MAX_NUMBER
) -> tuple[int, int]:
    """Return the smallest and the largest number that the hints in ``observations`` leave."""
    for guess, hint in _HINT.findall("\n".join(observations)):
        if hint == "higher":
            low = max(low, int(guess) + 1)
        else:
            high = min(high, int(guess) - 1)
    return low, high


def mixed_player(
    heed: float, rng: random.Random, low: int = MIN_NUMBER, high: int = MAX_NUMBER
) -> Player:
    """Make a player who heeds the hints at some guesses and not at others.

    A guess that heeds them is drawn from the numbers they leave, one nearer the middle more often.
    Any other guess is careless: the largest number, repeated or not. The first guess, without
    hints, is in the middle of the range, but for a few times when it is any number.

    Args:
        heed: Probability that a guess heeds the hints, 0 to 1.
        rng: What the player draws from.
        low: Smallest number of the game.
        high: Largest number of the game.

    Raises:
        ValueError: ``heed`` is no probability.
    """
    Number(0, 1)("heed", heed)

    def guess(observations: Sequence[str]) -> int:
        if len(observations) == 1:
            anywhere = rng.random() >= MIDDLE_OPENINGS
            return rng.randint(low, high) if anywhere else (low + high + rng.randint(0, 1)) // 2
        if rng.random() >= heed:
            return high
        least, most = possible_range(observations, low, high)
        left = range(least, most + 1)
        return rng.choices(left, [min(n - least, most - n) + 1 for n in left])[0]

    return guess


def random_player(rng: random.Random, low: int = MIN_NUMBER, high: int = MAX_NUMBER) -> Player:
    """Make a player who draws every guess from the whole range, repetitions included."""
    return lambda observations: rng.randint(low, high)


def game_tokens(tokenizer: PreTrainedTokenizerBase, game: Game) -> tuple[list[int], list[bool]]:
    """Lay a game out in tokens, as a model that plays it sees and writes them.

    Piece by piece, each tokenised on its own: the chat template around the first observation; then
    in turns an action with the end of the turn, which is what the model writes, and the template's
    text between that and the next action. Nothing follows the last action.

    Args:
        tokenizer: With a ChatML template, such as those of :mod:`agilerl.testing.tokenizer`.
        game: A game.

    Returns:
        The token ids, and for each whether it belongs to an action, the end of the turn included.
    """
    ids: list[int] = []
    written: list[bool] = []
    for turn, (observation, action) in enumerate(zip(game.observations, game.actions, strict=True)):
        shown = chat_piece(observation, first=turn == 0)
        for text, is_action in ((shown, False), (action + TURN_END_TOKEN, True)):
            piece = tokenizer(text, add_special_tokens=False).input_ids
            ids += piece
            written += [is_action] * len(piece)
    return ids, written


def chat_piece(observation: str, *, first: bool) -> str:
    """Put an observation into the chat, up to where the model writes.

    Args:
        observation: Text, prefix and suffix included.
        first: Whether it opens the conversation; else it follows the end of the model's turn.
    """
    before = "" if first else "\n"
    return (
        f"{before}{TURN_START_TOKEN}user\n{observation}{TURN_END_TOKEN}\n"
        f"{TURN_START_TOKEN}assistant\n"
    )
