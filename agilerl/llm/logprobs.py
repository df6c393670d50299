"""Log-probs of chosen tokens in row tiles: ``(tile_rows, V)`` is the largest tensor that exists.

A frozen head takes the fast path: a row's log-prob is a scalar, so its gradient with respect to the
hidden state (the head's row at the target minus the mean row under the softmax) is computed in the
same pass over the tiles as the value, and backward only scales it. A trained head (LoRA on it)
recomputes each tile in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from agilerl.llm.causal_lm import LogitHead

# A tile that fits the processor's cache is fastest on CPU; larger ones fill an accelerator better.
TILE_BYTES = {"cpu": 16 * 2**20}
DEFAULT_TILE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probs and entropies of ``N`` tokens."""

    logp: torch.Tensor
    """``(N,)``, with gradient to the hidden states where they have one."""
    entropy: torch.Tensor
    """``(N,)`` entropy in nats of the distribution each token was drawn from; no gradient unless
    asked for."""


def token_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: LogitHead,
    *,
    temperature: float = 1.0,
    fp32: bool = True,
    tile_rows: int | None = None,
    entropy: bool = True,
    entropy_gradient: bool = False,
) -> TokenLogProbs:
    """Log-probs of ``targets`` under ``softmax(logits(hidden) / temperature)``.

    Args:
        hidden: ``(N, D)``.
        targets: ``(N,)`` token ids.
        head: The model's head.
        temperature: Divides the logits.
        fp32: Reduce over the vocabulary in float32 (float64 hidden states stay float64); otherwise
            in the dtype of the logits.
        tile_rows: Rows per tile; None picks one that fits ``TILE_BYTES``.
        entropy: Also compute entropies; zeros otherwise.
        entropy_gradient: With their gradient, which takes a second ``(N, D)`` tensor.
    """
    rows = tile_rows or _auto_tile_rows(hidden, head.vocab_size)
    dtype = _reduction_dtype(hidden, fp32)
    settings = _Tiles(rows, dtype, temperature, entropy, entropy_gradient)
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
    dtype: torch.dtype
    temperature: float
    entropy: bool
    entropy_gradient: bool


def _auto_tile_rows(hidden: torch.Tensor, vocab_size: int) -> int:
    budget = TILE_BYTES.get(hidden.device.type, DEFAULT_TILE_BYTES)
    return max(16, budget // (4 * max(vocab_size, 1)))


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
    """Value, entropy and gradient of the hidden states in one pass over the row tiles."""

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
            outputs = (
                entropy[part] if settings.entropy else None,
                *[None if whole is None else whole[part] for whole in gradients],
            )
            logp[part] = _tile_logprobs(hidden[part], targets[part], head, settings, *outputs)
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


def _tile_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: LogitHead,
    settings: _Tiles,
    entropy_out: torch.Tensor | None,
    gradient_out: torch.Tensor | None,
    entropy_gradient_out: torch.Tensor | None,
) -> torch.Tensor:
    """Log-probs of one tile; entropies and gradients are written to the given tensors.

    At most two ``(rows, V)`` buffers are alive, one without entropies; a soft cap keeps one more.
    """
    assert head.weight is not None
    to_hidden = head.scale / settings.temperature
    z = nn.functional.linear(hidden, head.weight, head.bias).to(settings.dtype)
    if head.scale != 1.0:
        z *= head.scale
    slope: Callable[[torch.Tensor], torch.Tensor] | None = None
    if head.softcap is not None:
        tanh = z.div_(head.softcap).tanh_().clone()
        z.mul_(head.softcap)
        slope = lambda p: p * (1.0 - tanh.square())  # noqa: E731 - the tanh tile is only alive where it is needed
    z.div_(settings.temperature)

    z.sub_(z.amax(1, keepdim=True))
    target_z = z.gather(1, targets[:, None]).squeeze(1)
    p = z.exp_() if entropy_out is None else z.exp()
    total = p.sum(1)
    log_total = total.log()
    if entropy_out is not None or gradient_out is not None:
        p.div_(total[:, None])
    if entropy_out is not None:
        # H = log(sum exp z) - sum p z; a batched dot product needs no temporary tile.
        entropy_out.copy_(log_total - torch.bmm(p[:, None, :], z[:, :, None]).view(-1))
        if entropy_gradient_out is not None:
            # dH / dz = -p (log p + H), where log p = z - log_total.
            residual = z.sub_((log_total - entropy_out)[:, None]).mul_(p).neg_()
            entropy_gradient_out.copy_(_through_head(residual, head, slope).mul_(to_hidden))
    if gradient_out is not None:
        # d log p(target) / dz = onehot - p
        residual = p.neg_()
        residual.scatter_add_(1, targets[:, None], torch.ones_like(residual[:, :1]))
        gradient_out.copy_(_through_head(residual, head, slope).mul_(to_hidden))
    return target_z - log_total


def _through_head(
    residual: torch.Tensor,
    head: LogitHead,
    slope: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """Unscaled gradient of the hidden states, ``residual * slope @ W``."""
    assert head.weight is not None
    if slope is not None:
        residual = slope(residual)
    return residual.to(head.weight.dtype) @ head.weight
