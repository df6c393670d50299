"""What the probes of an unknown model have in common: a few tokens, run in two ways, compared."""

from __future__ import annotations

import torch


def equal_up_to_rounding(made: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results of the same computation differ by no more than rounding explains.

    Relative to the largest value; by the dtype of ``expected``. NaN equals nothing.
    """
    if made.shape != expected.shape:
        return False
    tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    largest = expected.abs().max().clamp(min=1e-6)
    return bool((made - expected).abs().max() <= tolerance * largest)
