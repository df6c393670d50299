"""The bundled model learns its task, and does not when its rewards are shuffled."""

from __future__ import annotations

import pytest
from learning_runs import learn_to_spell, speller

from agilerl.algorithms import CISPO, GRPO, GSPO

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("agent_class", "clip_coef"), [(GRPO, 0.2), (GSPO, (0.8, 1.25)), (CISPO, (0.0, 5.0))]
)
def test_reward_rises(agent_class: type[GRPO], clip_coef: object) -> None:
    before, after = learn_to_spell(speller(agent_class, clip_coef=clip_coef))
    assert after > before + 0.03


def test_shuffled_rewards_teach_nothing() -> None:
    before, after = learn_to_spell(speller(), shuffle=True)
    assert after < before + 0.02
