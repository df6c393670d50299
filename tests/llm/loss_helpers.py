"""The two sequences of the golden numbers, random batches, and how a loss is taken of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st
from update_helpers import Objective

from agilerl.llm.losses import LOSS_TABLE, LossTerms, clip_band, policy_loss, reduction_weights

ABOUT = {"rel": 1e-7, "abs": 6e-9}  # the golden numbers are given to eight decimals


def rows(first: list[float], second: list[float], pad: float = 0.0) -> torch.Tensor:
    return torch.tensor([first, [*second, pad]], dtype=torch.float64)


LOGP = rows([-1.00, -0.50, -2.00], [-0.70, -1.20])
OLD = rows([-1.20, -0.45, -1.10], [-2.50, -1.00])
GEN = rows([-1.15, -0.55, -1.90], [-2.40, -1.90])
REF = LOGP + rows([0.1, -0.2, 0.3], [0.0, 0.5])
ADVANTAGES = rows([1.0, 1.0, 1.0], [-1.0, -1.0])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def config(loss_type: str = "grpo", **changes: object) -> Objective:
    row = LOSS_TABLE[loss_type]
    plain = Objective(
        loss_type=loss_type,
        ratio_level=row.forced_level or "token",
        clip_band=clip_band(0.2),
        reduction=row.default_reduction,
    )
    return replace(plain, **changes)


def evaluate(
    settings: Objective, logp: torch.Tensor = LOGP, **inputs: torch.Tensor | None
) -> tuple[LossTerms, torch.Tensor]:
    """The terms of the golden batch and the gradient with respect to ``logp``."""
    given = {"advantages": ADVANTAGES, "mask": MASK, "old_logp": OLD, **inputs}
    leaf = logp.clone().requires_grad_()
    weights = reduction_weights(given["mask"], settings.reduction, settings.max_output_tokens)
    terms = policy_loss(leaf, weights=weights, config=settings, **given)
    (gradient,) = torch.autograd.grad(terms.loss, leaf)
    return terms, gradient


@st.composite
def batches(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    seed = draw(st.integers(0, 2**31 - 1))
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 7)))
    rng = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    logp = -noise().abs()
    mask = torch.rand(shape, generator=rng) < 0.7
    mask[0, 0] = True
    return {
        "logp": logp,
        "old_logp": logp + 0.5 * noise(),
        "ref_logp": logp + 0.5 * noise(),
        "sampling_logp": logp + 0.5 * noise(),
        "advantages": noise(),
        "mask": mask,
    }
