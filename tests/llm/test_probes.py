"""What counts as the same result of an unknown model."""

from __future__ import annotations

import pytest
import torch

from agilerl.llm.probes import equal_up_to_rounding


@pytest.mark.parametrize(
    ("dtype", "small", "large"),
    [(torch.float32, 1e-4, 1e-2), (torch.bfloat16, 2e-2, 2e-1)],
)
def test_differences_are_judged_by_the_dtype(
    dtype: torch.dtype, small: float, large: float
) -> None:
    expected = torch.tensor([0.0, 1.0, -50.0], dtype=dtype)
    change = torch.tensor([50.0, 0.0, 0.0], dtype=dtype)
    assert equal_up_to_rounding(expected + small * change, expected)
    assert not equal_up_to_rounding(expected + large * change, expected)


def test_nothing_equals_nan_or_another_shape() -> None:
    ones = torch.ones(3)
    assert not equal_up_to_rounding(ones * torch.nan, ones)
    assert not equal_up_to_rounding(ones, ones * torch.nan)
    assert not equal_up_to_rounding(ones, torch.ones(1))
    assert equal_up_to_rounding(torch.zeros(3), torch.zeros(3))
