"""Settings that check themselves, and those that must stay frozen."""

from __future__ import annotations

import dataclasses

import pytest

from agilerl.llm import config


def test_a_schedule_needs_at_least_one_epoch_and_a_share_of_warm_up() -> None:
    assert config.CosineLRScheduleConfig(1).warmup_proportion == 0.0
    with pytest.raises(ValueError, match="num_epochs is 0"):
        config.CosineLRScheduleConfig(0)
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="warmup_proportion"):
            config.CosineLRScheduleConfig(10, share)


def test_every_record_is_frozen() -> None:
    records = [item for item in vars(config).values() if dataclasses.is_dataclass(item)]
    assert len(records) == 9
    assert all(record.__dataclass_params__.frozen for record in records)
