"""One call of ``run_update`` with everything that a test may want to change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from rollout_helpers import (
    PLAIN,
    random_batch,
)

from agilerl.llm.batch import TrainBatch
from agilerl.llm.config import ForwardConfig, LossConfig, Reduction, UpdateConfig
from agilerl.llm.engine.local import LocalEngine
from agilerl.llm.losses import LOSS_TABLE, LossTerms, policy_objective
from agilerl.llm.policy import Policy
from agilerl.llm.step_results import SkippedSteps
from agilerl.llm.update import run_update

FORWARD = replace(PLAIN, layout="packed")
MANY = 10_000
ONE_STEP = UpdateConfig(batch_size=MANY, micro_batch_size=MANY, epochs=1, max_grad_norm=1e9)


class RecordingEngine(LocalEngine):
    """The local engine with plain gradient descent, which keeps the gradient of every step."""

    def __init__(self, policy: Policy, lr: float = 1e-3) -> None:
        super().__init__(policy.parameters().values(), lr)
        self.optimizer = torch.optim.SGD(self.parameters, lr=lr)
        self.names = list(policy.parameters())
        self.seen: list[dict[str, torch.Tensor]] = []
        self.backwards = 0

    def backward(self, loss: torch.Tensor) -> None:
        self.backwards += 1
        super().backward(loss)

    def _reduce_gradients(self) -> None:
        grads = [p.grad for p in self.parameters]
        self.seen.append(
            {
                name: torch.zeros(1) if gradient is None else gradient.clone()
                for name, gradient in zip(self.names, grads, strict=True)
            }
        )


@dataclass
class Run:
    """One call of ``run_update`` with everything that a test may want to change."""

    batch: TrainBatch = field(default_factory=lambda: random_batch(turns=True))
    values: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sampling_logp: torch.Tensor | None = None
    forward: ForwardConfig = FORWARD
    update: UpdateConfig = ONE_STEP
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    lr: float = 1e-3

    def __post_init__(self) -> None:
        if self.values is None:
            self.values = random_values(self.batch)
        if self.mask is None:
            self.mask = self.batch.action_mask

    def __call__(self, policy: Policy, loss: Objective) -> tuple[dict[str, float], RecordingEngine]:
        assert self.values is not None
        assert self.mask is not None
        engine = RecordingEngine(policy, self.lr)
        batch = replace(
            self.batch,
            advantages=torch.where(self.mask, self.values, 0.0),
            loss_mask=self.mask,
            sampling_logp=self.sampling_logp,
            has_sampling_logp=torch.ones(len(self.batch), dtype=torch.bool),
            group_ids=self.batch.prompt_index if loss.reduction == "prompt" else None,
        )
        update = replace(
            self.update,
            reduction=loss.reduction,
            max_output_tokens=loss.max_output_tokens,
            needs_reference=loss.beta != 0.0,
            skip_zero_advantages=loss.beta == 0.0 and loss.entropy_coef == 0.0,
            needs_old=loss.importance_anchor == "old",
            needs_entropy=loss.entropy_coef != 0.0,
            top_entropy_quantile=loss.top_entropy_quantile,
        )
        rng = torch.Generator().manual_seed(0)
        metrics = run_update(policy, engine, batch, loss, self.forward, update, rng, self.skipped)
        return metrics.result(), engine


def random_values(batch: TrainBatch, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(len(batch), 1, generator=rng, dtype=torch.float64)
    return values.expand(batch.action_mask.shape)


@dataclass(frozen=True)
class Objective(LossConfig):
    """``policy_objective`` with its settings, and those of the update that go with it."""

    reduction: Reduction = "sequence"
    max_output_tokens: int | None = None
    top_entropy_quantile: float | None = None

    def __call__(self, logp: torch.Tensor, batch: TrainBatch, weights: torch.Tensor) -> LossTerms:
        return policy_objective(self)(logp, batch, weights)


def objective(loss_type: str = "grpo", **changes: object) -> Objective:
    row = LOSS_TABLE[loss_type]
    config = Objective(
        loss_type=loss_type,
        ratio_level=row.forced_level or "token",
        clip_band=(0.8, 1.2),
        reduction=row.default_reduction,
        max_output_tokens=8,
    )
    return replace(config, **changes)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.parameters().items()}
