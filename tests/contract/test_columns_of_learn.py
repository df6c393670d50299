"""What ``learn`` returns, by name: the columns of metrics that each setting adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.testing import tiny_model

ALWAYS = {
    "mean_loss", "mean_kl", "clip_fraction", "entropy", "grad_norm", "ratio_mean", "ratio_max",
    "advantage_mean", "advantage_std", "completion_length", "zero_variance_groups", "skipped_steps",
    "lr",
}  # fmt: skip
CORRECTION = {
    "importance_weight_mean", "importance_weight_max", "importance_weight_capped",
    "importance_weight_nonfinite", "sampler_kl",
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "added"),
    [
        ({}, CORRECTION),
        ({"vllm_importance_sampling_correction": False}, set()),
        ({"importance_correction": "geometric_mask", "importance_floor": 0.5}, CORRECTION),
        ({"importance_anchor": "sampler"}, {"sampler_kl", "ratio_nonfinite"}),
        ({"dual_clip": 3.0}, CORRECTION | {"dual_clip_fraction"}),
        ({"top_entropy_quantile": 0.5}, CORRECTION | {"top_entropy_share"}),
        (
            {"advantage_baseline": "leave_one_out", "adv_norm": "batch_std", "entropy_coef": 0.1},
            CORRECTION,
        ),
        ({"loss_reduction": "prompt"}, CORRECTION),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_columns(settings: dict[str, Any], added: set[str]) -> None:
    agent = GRPO(
        pad_token_id=256,
        pad_token="<|pad|>",
        actor_network=tiny_model(hidden_size=32, layers=1),
        group_size=2,
        batch_size=2,
        **settings,
    )
    ids = torch.arange(24).view(4, 6)
    mask = torch.arange(5).expand(4, 5) > 2
    logps = [torch.full((2,), -5.0)] * 4
    metrics = agent.learn((ids, mask, torch.rand(4)), sampling_logps=logps)
    assert metrics.keys() == ALWAYS | added
