from __future__ import annotations

import builtins
import random
import sys
from typing import Any

import numpy as np
import pytest

from agilerl.testing import guess_the_number_env
from agilerl.testing.guess_the_number import (
    boxed,
    chat_piece,
    game_tokens,
    mixed_player,
    play,
    possible_range,
    random_player,
    reset,
)
from agilerl.testing.tokenizer import TURN_END_TOKEN_ID, byte_tokenizer

TEN_GUESSES = "At turn 1, you guessed {}, and the target number is {} than {}."


def hints(*pairs: tuple[int, str]) -> list[str]:
    return ["Instructions", *(TEN_GUESSES.format(guess, hint, guess) for guess, hint in pairs)]


def test_the_environment_is_gems_own() -> None:
    from gem.envs.game_env.guess_the_number import GuessTheNumberEnv

    env = guess_the_number_env()
    assert type(env) is GuessTheNumberEnv
    assert (env.min_number, env.max_number, env.max_turns) == (1, 6, 3)
    assert guess_the_number_env(1, 10, max_turns=4).max_number == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 6, 3), "min_number is 0; it must be at least 1"),
        ((6, 6, 3), "max_number is 6; it must be at least 7"),
        ((1, 6, 0), "max_turns is 0; it must be at least 1"),
    ],
)
def test_sizes_out_of_range_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        guess_the_number_env(*arguments)


def test_without_gem_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def import_without_gem(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "gem":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.split(".")[0] == "gem"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", import_without_gem)
    with pytest.raises(ImportError, match=r"agilerl\[demo\]"):
        guess_the_number_env()


def test_a_game_leaves_the_global_random_numbers_as_they_were() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    play(guess_the_number_env(), random_player(random.Random(0)), seed=1)
    assert (random.random(), np.random.random()) == expected


def test_the_seed_decides_the_game() -> None:
    env = guess_the_number_env()
    numbers = []
    for seed in (3, 4, 5, 6, 7, 3, 4, 5, 6, 7):
        reset(env, seed)
        numbers.append(env.game_number)
    assert numbers[:5] == numbers[5:]
    assert len(set(numbers)) > 1


def test_a_game_holds_what_was_shown_answered_and_paid() -> None:
    env = guess_the_number_env()
    reset(env, 0)
    number = env.game_number
    wrong = 1 if number > 1 else 2
    guesses = iter([wrong, number])
    game = play(env, lambda observations: next(guesses), seed=0)
    assert game.actions == (boxed(wrong), boxed(number))
    assert game.rewards == (0.0, 1.0)
    assert game.won
    assert all(text.endswith("Enter your next guess.") for text in game.observations)
    assert game.observations[0].startswith("You are playing Guess The Number.\n")
    assert possible_range(game.observations) == ((2, 6) if number > wrong else (1, 1))


def test_hints_narrow_the_range() -> None:
    assert possible_range(hints()) == (1, 6)
    assert possible_range(hints((2, "higher"))) == (3, 6)
    assert possible_range(hints((2, "higher"), (6, "lower"))) == (3, 5)
    assert possible_range(hints((9, "lower"), (2, "higher")), 1, 20) == (3, 8)


def test_players_heed_the_hints_as_often_as_asked() -> None:
    rng = random.Random(0)
    always, sometimes = mixed_player(1.0, rng), mixed_player(0.3, rng)
    shown = hints((2, "higher"), (6, "lower"))
    assert {always(shown) for _ in range(200)} == {3, 4, 5}
    guesses = [sometimes(shown) for _ in range(2000)]
    assert set(guesses) == {3, 4, 5, 6}
    assert guesses.count(6) / 2000 == pytest.approx(0.7, abs=0.04)
    openings = [sometimes(hints()) for _ in range(2000)]
    assert set(openings) == {1, 2, 3, 4, 5, 6}
    assert (openings.count(3) + openings.count(4)) / 2000 == pytest.approx(0.93, abs=0.03)
    with pytest.raises(ValueError, match=r"heed is 1\.5; it must be at least 0 and at most 1"):
        mixed_player(1.5, rng)


def test_heeding_wins_far_more_often_than_guessing() -> None:
    env = guess_the_number_env()
    rng = random.Random(0)
    rates = [
        sum(play(env, player, seed).won for seed in range(600)) / 600
        for player in (random_player(rng), mixed_player(0.5, rng), mixed_player(1.0, rng))
    ]
    assert rates == pytest.approx([0.42, 0.62, 0.90], abs=0.06)


def test_tokens_of_a_game_piece_by_piece() -> None:
    tokenizer = byte_tokenizer()
    game = play(guess_the_number_env(), mixed_player(0.0, random.Random(1)), seed=11)
    ids, written = game_tokens(tokenizer, game)
    assert len(game.actions) == 3  # so that there are hints
    messages = [{"role": "user", "content": game.observations[0]}]
    for action, observation in zip(game.actions, game.observations[1:], strict=False):
        messages += [
            {"role": "assistant", "content": action},
            {"role": "user", "content": observation},
        ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == whole + game.actions[-1] + "<|im_end|>"
    actions = "".join(action + "<|im_end|>" for action in game.actions)
    marked = [token for token, is_written in zip(ids, written, strict=True) if is_written]
    assert tokenizer.decode(marked) == actions
    assert marked.count(TURN_END_TOKEN_ID) == 3
    assert not any(
        written[: len(tokenizer(chat_piece(game.observations[0], first=True)).input_ids)]
    )
