"""What steps the adapters: which optimizer, and what is said about its settings."""

from __future__ import annotations

from typing import Any

import pytest
from agent_helpers import make_agent, small_model

from agilerl import checks
from agilerl.algorithms import CISPO, GRPO


def said(caplog: pytest.LogCaptureFixture, about: str) -> list[str]:
    return [message for message in caplog.messages if message.startswith(about)]


def test_a_rate_that_moves_no_adapter_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    model = small_model()
    make_agent(model=model, lr=1e-6)
    assert not said(caplog, "lr ")
    for rate in (5e-7, 9e-7):
        make_agent(model=model, lr=rate).clone()
    (message,) = said(caplog, "lr ")
    assert "Pass lr=1e-5 to 1e-4" in message


@pytest.mark.parametrize(
    ("cls", "settings", "band"),
    [
        (CISPO, {}, "[0.8, 1.2]"),
        (CISPO, {"clip_coef": 0.3}, "[0.7, 1.3]"),
        (GRPO, {"loss_type": "cispo"}, "[0.8, 1.2]"),
        (CISPO, {"clip_coef": (0.0, 5.0)}, None),
        (GRPO, {}, None),
    ],
)
def test_cispo_with_a_clip_coefficient_of_ppo_says_its_band(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    cls: type[GRPO],
    settings: dict[str, Any],
    band: str | None,
) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    make_agent(cls, **settings)
    messages = said(caplog, "clip_coef ")
    assert len(messages) == (band is not None)
    assert band is None or (band in messages[0] and "clip_coef=(0.0, 5.0)" in messages[0])
