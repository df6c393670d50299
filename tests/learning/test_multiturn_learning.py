"""The bundled player learns to read the hints over several turns, with either kind of credit."""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_runs import learn_to_guess, player


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_more_games_are_won(credit: str, tmp_path: Path) -> None:
    before, after = learn_to_guess(player(credit), tmp_path / "run")
    assert after > before + 0.1
