"""Log-probs of chosen tokens in tiles of logits: some tokens by a part of the vocabulary.

Softmax is computed online over the parts: sums and means under it are kept relative to the largest
logit yet, as in FlashAttention (https://arxiv.org/abs/2205.14135, section 3.1). A frozen head's
log-prob is a scalar per row, so its gradient with respect to the hidden state (the head's row at
the target minus the mean row under the softmax) is computed with the value and kept; backward only
scales it. A trained head (LoRA on it) takes the whole vocabulary at a time, and recomputes its
tiles in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from agilerl.llm.causal_lm import LogitHead

# A tile that fits a processor core's cache is fastest on a CPU; larger ones fill an accelerator.
TILE_BYTES = {"cpu": 2 * 2**20}
DEFAULT_TILE_BYTES = 256 * 2**20
TILE_COLUMNS = {"cpu": 1024}
DEFAULT_TILE_COLUMNS = 16384
LEAST_TILE_ROWS = 16


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probs and entropies of ``N`` tokens."""

    logp: torch.Tensor
    """``(N,)``, with gradient to the hidden states where they have one."""
    entropy: torch.Tensor
    """``(N,)`` entropy in nats of the distribution each token was drawn from; no gradient unless
    asked for."""


def token_logprobs(  # noqa: PLR0913 - a record of settings per call would be built of as many
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: LogitHead,
    *,
    temperature: float = 1.0,
    fp32: bool = True,
    tile_rows: int | None = None,
    entropy: bool = True,
    entropy_gradient: bool = False,
    tiled_for: str | None = None,
) -> TokenLogProbs:
    """Log-probs of ``targets`` under ``softmax(logits(hidden) / temperature)``.

    Args:
        hidden: ``(N, D)``.
        targets: ``(N,)`` token ids.
        head: The model's head.
        temperature: Divides the logits.
        fp32: Reduce over the vocabulary in float32 (float64 hidden states stay float64); otherwise
            in the dtype of the logits.
        tile_rows: Rows per tile; None: as many as fit ``TILE_BYTES``.
        entropy: Also compute entropies; zeros otherwise.
        entropy_gradient: With their gradient, which takes a second ``(N, D)`` tensor.
        tiled_for: Type of the device that the size of tiles is for; None: that of ``hidden``.
    """
    device = tiled_for or hidden.device.type
    columns = TILE_COLUMNS.get(device, DEFAULT_TILE_COLUMNS)
    columns = head.vocab_size if head.weight is None else min(columns, head.vocab_size)
    fitting = TILE_BYTES.get(device, DEFAULT_TILE_BYTES) // (4 * max(columns, 1))
    rows = tile_rows or max(LEAST_TILE_ROWS, fitting)
    dtype = _reduction_dtype(hidden, fp32)
    settings = _Tiles(rows, columns, dtype, temperature, entropy, entropy_gradient)
    if head.weight is not None:
        return TokenLogProbs(*_FrozenHeadLogProbs.apply(hidden, targets, head, settings))
    tiles = [
        _trained_head_tile(
            hidden[start : start + rows], targets[start : start + rows], head, settings
        )
        for start in range(0, hidden.shape[0], rows)
    ]
    if not tiles:
        empty = hidden.new_zeros(0, dtype=dtype)
        return TokenLogProbs(empty + hidden.sum(), empty)
    return TokenLogProbs(torch.cat([t[0] for t in tiles]), torch.cat([t[1] for t in tiles]))


@dataclass(frozen=True)
class _Tiles:
    """How tiles are cut and reduced over the vocabulary."""

    rows: int
    columns: int
    dtype: torch.dtype
    temperature: float
    entropy: bool
    entropy_gradient: bool


def _reduction_dtype(hidden: torch.Tensor, fp32: bool) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32) if fp32 else hidden.dtype


def _trained_head_tile(
    hidden: torch.Tensor, targets: torch.Tensor, head: LogitHead, settings: _Tiles
) -> tuple[torch.Tensor, torch.Tensor]:
    def tile(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head.logits(hidden).to(settings.dtype) / settings.temperature
        log_softmax = logits.log_softmax(-1)
        logp = log_softmax.gather(1, targets[:, None]).squeeze(1)
        if not settings.entropy:
            return logp, torch.zeros_like(logp)
        with torch.set_grad_enabled(settings.entropy_gradient and torch.is_grad_enabled()):
            entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        return logp, entropy

    if not torch.is_grad_enabled():
        return tile(hidden)
    return checkpoint(tile, hidden, use_reentrant=False, preserve_rng_state=False)


class _FrozenHeadLogProbs(torch.autograd.Function):
    """Value, entropy and gradient of the hidden states in one pass over the tiles."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, targets: torch.Tensor, head: LogitHead, settings: _Tiles
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logp = hidden.new_empty(hidden.shape[0], dtype=settings.dtype)
        entropy = torch.zeros_like(logp)
        need_grad = ctx.needs_input_grad[0]
        gradients = [
            torch.empty_like(hidden) if needed else None
            for needed in (need_grad, need_grad and settings.entropy_gradient)
        ]
        for start in range(0, hidden.shape[0], settings.rows):
            part = slice(start, start + settings.rows)
            rows = _Rows(hidden[part], targets[part], head, settings)
            softmax = rows.softmax(with_gradient=need_grad)
            logp[part] = softmax.target - softmax.log_total
            if settings.entropy:
                entropy[part] = softmax.log_total - softmax.mean
            if gradients[0] is not None:
                gradients[0][part] = rows.logp_gradient(softmax)
            if gradients[1] is not None:
                gradients[1][part] = rows.entropy_gradient(softmax)
        if not settings.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(*gradients)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        gradient, entropy_gradient = ctx.saved_tensors
        result = grad_logp[:, None] * gradient
        if entropy_gradient is not None:
            result += grad_entropy[:, None] * entropy_gradient
        return result.to(gradient.dtype), None, None, None


class _Softmax(NamedTuple):
    """What is known of ``n`` rows after a pass over the vocabulary."""

    largest: torch.Tensor
    """``(n,)`` logit; the following are relative to it."""
    log_total: torch.Tensor
    """``(n,)`` logarithm of the sum of the exponentials."""
    target: torch.Tensor
    """``(n,)`` logit of the target."""
    target_slope: torch.Tensor | None
    """``(n,)`` derivative of the target's logit by the head's output; None: a constant."""
    mean: torch.Tensor
    """``(n,)`` mean logit under the softmax; only where entropies are asked for."""
    others: torch.Tensor | None
    """``(n, D)`` mean row of the head under the softmax, with 0 at the target, times the slope."""


class _Rows:
    """Rows of hidden states that run through the tiles together."""

    def __init__(
        self, hidden: torch.Tensor, targets: torch.Tensor, head: LogitHead, settings: _Tiles
    ) -> None:
        assert head.weight is not None
        self.hidden, self.targets, self.head, self.settings = hidden, targets, head, settings
        self.weight = head.weight
        # Of the logits by the head's output, where there is no soft cap.
        self.factor = head.scale / settings.temperature

    def _tiles(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        """Columns, logits ``(n, columns)`` and, with a soft cap, their slope, tile by tile."""
        head, settings = self.head, self.settings
        for start in range(0, self.weight.shape[0], settings.columns):
            part = slice(start, start + settings.columns)
            bias = None if head.bias is None else head.bias[part]
            z = nn.functional.linear(self.hidden, self.weight[part], bias).to(settings.dtype)
            slope = None
            if head.softcap is None:
                if self.factor != 1.0:
                    z *= self.factor
            else:
                tanh = z.mul_(head.scale / head.softcap).tanh_()
                slope = 1.0 - tanh.square()
                z = tanh.mul_(head.softcap / settings.temperature)
            yield part, z, slope

    def _at_targets(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rows have their target in a tile, ``(n, 1)`` bool, and its column in there."""
        column = self.targets[:, None] - part.start
        inside = (column >= 0) & (column < self.settings.columns)
        width = min(part.stop, self.weight.shape[0]) - part.start
        return inside, column.clamp(0, width - 1)

    def softmax(self, *, with_gradient: bool) -> _Softmax:
        """One pass over the vocabulary."""
        settings, n = self.settings, len(self.hidden)
        # Sums over many tiles, whatever the dtype of these.
        wide = torch.promote_types(settings.dtype, torch.float32)
        lowest = torch.finfo(settings.dtype).min / 2
        largest = torch.full((n, 1), lowest, dtype=wide, device=self.hidden.device)
        total, weighted, target = (torch.zeros_like(largest) for _ in range(3))
        slope_at_target = None if self.head.softcap is None else torch.zeros_like(target)
        others = None
        if with_gradient:
            others = torch.zeros(self.hidden.shape, dtype=wide, device=self.hidden.device)
        for part, z, slope in self._tiles():
            inside, column = self._at_targets(part)
            target = torch.where(inside, z.gather(1, column).to(wide), target)
            before, largest = largest, torch.maximum(largest, z.amax(1, keepdim=True).to(wide))
            z.sub_(largest)
            p = z.exp() if settings.entropy else z.exp_()
            shrink = (before - largest).exp_()
            if settings.entropy:
                # Of logits relative to the largest, which are not needed any more.
                weighted.add_((before - largest) * total).mul_(shrink)
                weighted.add_(z.mul_(p).sum(1, keepdim=True, dtype=wide))
            before_total, total = total * shrink, p.sum(1, keepdim=True, dtype=wide)
            total += before_total
            if slope is not None and slope_at_target is not None:
                slope_at_target = torch.where(
                    inside, slope.gather(1, column).to(wide), slope_at_target
                )
                p.mul_(slope)
            if others is not None:
                # Left out, as 1 - p of a likely target is lost beside p in lower precision.
                p.scatter_(1, column, p.gather(1, column).masked_fill_(inside, 0.0))
                # The mean so far: a sum may leave the range of float16.
                _add_product(others.mul_(before_total / total), p.div_(total), self.weight[part])
        return _Softmax(
            largest=largest.squeeze(1),
            log_total=total.log().squeeze(1),
            target=(target - largest).squeeze(1),
            target_slope=None if slope_at_target is None else slope_at_target.squeeze(1),
            mean=(weighted / total).squeeze(1),
            others=others,
        )

    def logp_gradient(self, softmax: _Softmax) -> torch.Tensor:
        """``(n, D)`` of log-probs: with logits z, dz of the target minus the mean of all dz."""
        assert softmax.others is not None
        # One minus the target's probability.
        share = -(softmax.target - softmax.log_total).expm1()
        if softmax.target_slope is not None:
            share = share * softmax.target_slope
        of_target = share[:, None] * self.weight[self.targets]
        return of_target.sub_(softmax.others).mul_(self.factor)

    def entropy_gradient(self, softmax: _Softmax) -> torch.Tensor:
        """``(n, D)`` of entropies: ``dH / dz = -p (log p + H)``, in another pass."""
        entropy = (softmax.log_total - softmax.mean)[:, None]
        gradient = torch.zeros(
            self.hidden.shape, dtype=self.settings.dtype, device=self.hidden.device
        )
        for part, z, slope in self._tiles():
            logp = z.sub_((softmax.largest + softmax.log_total)[:, None])
            residual = logp.exp().mul_(logp.add_(entropy)).neg_()
            if slope is not None:
                residual.mul_(slope)
            _add_product(gradient, residual, self.weight[part])
        return gradient.mul_(self.factor)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right``, where the product has the dtype of ``right``."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:  # accumulated in float32 there, and kept in it
        total.add_(torch.mm(left.to(right.dtype), right, out_dtype=total.dtype))
    else:
        total.add_(left.to(right.dtype) @ right)
