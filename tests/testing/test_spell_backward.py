from __future__ import annotations

import pytest
from datasets import Dataset

from agilerl.testing import (
    spell_backward_correct,
    spell_backward_datasets,
    spell_backward_reward,
)
from agilerl.testing.tasks import is_held_out


def words(rows: Dataset) -> list[str]:
    return [question.rsplit(" ", 1)[1].lower() for question in rows["question"]]


def test_held_out_words_do_not_occur_in_training_whatever_the_seeds() -> None:
    train, test = spell_backward_datasets(5000, 400, seed=0)
    other_train, other_test = spell_backward_datasets(5000, 400, seed=1)
    seen = {*words(train), *words(other_train)}
    seen |= {answer.lower() for rows in (train, other_train) for answer in rows["answer"]}
    assert seen.isdisjoint([*words(test), *words(other_test)])


def test_every_row_is_another_word_of_three_to_seven_letters() -> None:
    for rows, size in zip(spell_backward_datasets(3000, 400, seed=3), (3000, 400), strict=True):
        assert rows.column_names == ["question", "answer"]
        assert len(rows) == len(set(words(rows))) == size
        assert {len(word) for word in words(rows)} == {3, 4, 5, 6, 7}
        for word, answer in zip(words(rows), rows["answer"], strict=True):
            assert answer.lower() == word[::-1]


def test_the_seed_decides_the_rows() -> None:
    first, again = (spell_backward_datasets(100, 50, seed=5) for _ in range(2))
    other = spell_backward_datasets(100, 50, seed=6)
    for side in range(2):
        assert first[side].to_list() == again[side].to_list()
        # reasoning-gym draws row i from seed + i: neighbouring seeds must not give shifted copies.
        assert len(set(words(first[side])) & set(words(other[side]))) < 5


def test_a_smaller_set_is_the_beginning_of_a_larger_one() -> None:
    small, large = spell_backward_datasets(10, 5, seed=2), spell_backward_datasets(30, 50, seed=2)
    assert small[0].to_list() == large[0].to_list()[:10]
    assert small[1].to_list() == large[1].to_list()[:5]


def test_a_word_and_its_reversal_are_on_the_same_side_in_any_case() -> None:
    assert len({is_held_out(word) for word in ("live", "evil", "Live", "EVIL")}) == 1


def test_an_empty_side_keeps_its_columns() -> None:
    train, test = spell_backward_datasets(0, 1)
    assert len(train) == 0
    assert train.column_names == test.column_names == ["question", "answer"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, 5), "train_size is -1; it must be at least 0"),
        ((5, 8000), "test_size is 8000; it must be .* at most"),
    ],
)
def test_sizes_beyond_the_words_are_refused(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spell_backward_datasets(*sizes)


@pytest.mark.parametrize(
    ("completion", "reward", "correct"),
    [
        ("nus", 1.0, 1.0),
        (" NUS\n", 1.0, 1.0),
        ("nuss", 0.8, 0.0),
        ("nut", 2 / 3, 0.0),
        ("sun", 1 / 3, 0.0),
        ("n", 1 / 3, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_reward_is_reasoning_gyms_own(completion: str, reward: float, correct: float) -> None:
    assert spell_backward_reward(completion, "nus", "") == pytest.approx(reward)
    assert spell_backward_correct(completion, "nus", "") == correct


@pytest.mark.parametrize("answer", ["nus", "drow", "sdrow", "dlrows", "sdlrows"])
def test_an_answer_with_a_letter_too_many_is_never_correct(answer: str) -> None:
    # reasoning-gym takes 0.2 off where the letters in place sum to 1.0: six sixths fall just short.
    assert spell_backward_correct(answer + "s", answer, "") == 0.0
    assert spell_backward_correct(answer, answer, "") == 1.0
