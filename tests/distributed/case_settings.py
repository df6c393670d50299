"""Under which settings the ranks run, and which cases."""

from __future__ import annotations

from typing import Any

import pytest

ARGUMENTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero2_offload": {"zero_stage": 2, "offload_optimizer": True},
    # The last: DeepSpeed changes torch.nn.functional.linear for all that follows.
    "zero3": {"zero_stage": 3},
    "zero3_offload": {"zero_stage": 3, "offload_optimizer": True},
    "zero3_in_parts": {"zero_stage": 3, "gather_for_generation": False},
}
# All else is the same code as under "ddp" or "zero2".
SOME_CASES = {
    "zero0": ["one_step_grpo", "ten_steps", "agreement"],
    "zero1": [
        "one_step_grpo",
        "ten_steps",
        "non_finite",
        "state",
        "state_of_one_process",
        "two_groups",
    ],
    "zero2_offload": [
        "one_step_grpo",
        "mini_batches",
        "ten_steps",
        "non_finite",
        "state",
        "state_of_one_process",
        "two_groups",
        "fresh_optimizer",
    ],
    # Layers are put together in every forward and backward; on two CPUs that takes its time.
    "zero3": [
        "one_step_grpo",
        "no_actions_on_rank_0",
        "all_left_out_on_rank_0",
        "options_of_the_loss",
        "mini_batches",
        "ten_steps",
        "non_finite",
        "state",
        "agreement",
        "checkpoint_grid",
        "population",
        "evolution",
        "mutations",
    ],
    "zero3_offload": ["one_step_grpo"],
    "zero3_in_parts": ["agreement"],
}
ONLY_UNDER = {
    "appended_rows": "ddp",
    "deepspeed_settings": "zero2",
    "errors": "ddp",
    "other_base": "ddp",
    "failing_save": "zero2",
    "unreadable_on_one_rank": "zero2",
    "partitioned_models": "zero3",
    "partitioned_checkpoints": "zero3",
    "partition_refusals": "zero3",
    "rollouts_in_parts": "zero3_in_parts",
    "resampled_in_parts": "zero3_in_parts",
}


def cases_of(setting: str, every: list[str]) -> list[str]:
    """The cases that a setting runs."""
    chosen = [case for case in every if setting in settings_of(case)]
    # Last what leaves the accelerator changed.
    return sorted(chosen, key=lambda case: case == "deepspeed_settings")


def settings_of(case: str) -> list[str]:
    """The settings that a case runs under."""
    if case in ONLY_UNDER:
        return [ONLY_UNDER[case]]
    return [setting for setting in ARGUMENTS if case in SOME_CASES.get(setting, [case])]


def each_setting(case: str) -> pytest.MarkDecorator:
    """The test's argument ``ranks``: what each rank found in a case, under every setting."""
    settings = settings_of(case)
    given = [(setting, case) for setting in settings]
    return pytest.mark.parametrize("ranks", given, indirect=True, ids=settings)
