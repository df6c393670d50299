"""The numbers that ``learn`` returns, accumulated over micro-batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from agilerl.checks import warn_once
from agilerl.distributed import Ranks, mean_and_std
from agilerl.llm.batch import TrainBatch
from agilerl.llm.losses import LossTerms

logger = logging.getLogger(__name__)


@dataclass
class UpdateMetrics:
    """Sums over the trained tokens of every micro-batch, turned into means at the end.

    Losses, norms and skipped steps are of all ranks from the start, the others of this one until
    :meth:`reduce`.
    """

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped_steps: int = 0

    def add(self, terms: LossTerms, entropy: torch.Tensor) -> None:
        """Add one micro-batch; ``entropy`` is that of its ``(N,)`` trained tokens."""
        self.tokens += entropy.numel()
        for name, value in {**terms.sums, "entropy": entropy.sum()}.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in terms.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, -math.inf), float(value))

    def add_step(self, outcome: str, loss: float, grad_norm: float) -> None:
        """Add one optimizer step, see :class:`agilerl.llm.step_results.StepResult`."""
        if outcome == "skipped":
            self.skipped_steps += 1
            return
        self.losses.append(loss)
        if outcome == "taken":
            self.grad_norms.append(grad_norm)

    def reduce(self, ranks: Ranks) -> None:
        """Make this the metrics of all ranks; each must call it."""
        if ranks.world_size == 1:
            return
        # A rank that ran nothing has not measured what others have.
        measured = ranks.gather((self.sums, self.maxima, self.tokens))
        self.sums, self.maxima, self.tokens = {}, {}, 0
        for sums, maxima, tokens in measured:
            self.tokens += tokens
            for name, value in sums.items():
                self.sums[name] = self.sums.get(name, 0.0) + value
            for name, value in maxima.items():
                self.maxima[name] = max(self.maxima.get(name, -math.inf), value)

    def result(self) -> dict[str, float]:
        """Means per token, maxima, and the mean loss and gradient norm of the optimizer steps.

        nan where nothing was measured.
        """
        means = {name: value / max(self.tokens, 1) for name, value in self.sums.items()}
        return {
            "mean_loss": _mean(self.losses),
            "mean_kl": math.nan,
            "clip_fraction": 0.0,
            "entropy": math.nan,
            "ratio_mean": 1.0,
            "ratio_max": 1.0,
            "grad_norm": _mean(self.grad_norms),
            "skipped_steps": float(self.skipped_steps),
            **means,
            **self.maxima,
        }


def batch_metrics(
    batch: TrainBatch, zero_variance_groups: int, ranks: Ranks
) -> Mapping[str, float]:
    """What is known of all ranks' batches without a forward; lengths in generated tokens.

    It is over the rows with an action; if no rank has any to train, a warning says so.

    Args:
        batch: The rows that count.
        zero_variance_groups: Of this rank.
        ranks: The processes.
    """
    assert batch.advantages is not None
    count, mean, std = mean_and_std(batch.advantages[batch.loss_mask], ranks)
    tokens, rows = batch.action_mask.sum(), batch.action_mask.any(1).sum()
    masked = batch.counted & ~batch.loss_mask
    trained = (batch.action_mask & ~masked).any(1).sum()
    own = [float(number) for number in (tokens, rows, trained, zero_variance_groups)]
    tokens, rows, trained, equal_groups = ranks.sum(torch.tensor(own).double()).tolist()
    if not trained and ranks.rank == 0:
        _warn_of_nothing_to_train(masked=bool(rows))
    return {
        "advantage_mean": mean,
        "advantage_std": std if count > 1 else 0.0,
        "completion_length": tokens / rows if rows else math.nan,
        "zero_variance_groups": equal_groups,
    }


def _warn_of_nothing_to_train(masked: bool) -> None:
    if masked:
        logger.warning(
            "update skipped: mask_truncated_completions leaves out every trajectory that has a "
            "generated token"
        )
        return
    # Once: training functions say it of runs that go on like that.
    warn_once(
        logger,
        "update skipped: sample_mask leaves out every trajectory that has a generated token. In a "
        'training function that is zero_variance="skip" where no group has two different rewards, '
        "or failures that are dropped",
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
