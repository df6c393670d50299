"""One token per row from logits: penalties, filters, and a draw by inverse CDF.

Applied in the order of transformers: repetition penalty, minimum length, temperature, top-k, top-p,
min-p.
"""

from __future__ import annotations

import torch

from agilerl.llm.config import SamplingConfig

# Vocabulary entries summed at a time when drawing from the full distribution.
BLOCK = 128
# Most likely tokens looked at first when only top-p or min-p is set; where the filters keep more,
# this many times as many.
FIRST_CANDIDATES, CANDIDATES_FACTOR = 512, 8


def next_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor | None, sampling: SamplingConfig
) -> torch.Tensor:
    """Draw (or, greedily, pick) one token per row.

    Args:
        logits: ``(N, V)`` after penalties; not changed.
        uniforms: ``(N,)`` in [0, 1); None where decoding is greedy.
        sampling: Temperature and filters.

    Returns:
        ``(N,)`` long.
    """
    if uniforms is None or sampling.greedy:
        return logits.argmax(-1)
    logits = logits.float()
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
        return _draw_filtered(logits, uniforms, sampling)
    return _draw_full(logits, uniforms)


def scaled_logps(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs ``(N,)``, float32, of tokens under ``softmax(logits / temperature)``.

    ``logits`` ``(N, V)`` come before penalties and filters: what the trainer computes.
    """
    scaled = logits.float() / temperature
    return scaled.gather(1, tokens[:, None]).squeeze(1) - scaled.logsumexp(1)


def penalise(
    logits: torch.Tensor, seen: torch.Tensor | None, generated: int, sampling: SamplingConfig
) -> torch.Tensor:
    """Penalise ``seen`` ``(N, V)`` tokens and forbid an early end of sequence."""
    if seen is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(
            seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits
        )
    if generated < sampling.min_new_tokens:
        logits = logits.index_fill(
            1, torch.tensor(sampling.eos_token_ids, device=logits.device), -torch.inf
        )
    return logits


def _draw_full(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse CDF in two levels, over blocks and then within one: cheap for a large vocabulary."""
    rows, vocab = logits.shape
    weights = (logits - logits.amax(1, keepdim=True)).exp_()
    if vocab % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, BLOCK - vocab % BLOCK))
    blocks = weights.view(rows, -1, BLOCK)
    block_cdf = blocks.sum(-1).double().cumsum(1)
    point = uniforms.double()[:, None] * block_cdf[:, -1:]
    block = torch.searchsorted(block_cdf, point, right=True).clamp(max=block_cdf.shape[1] - 1)
    before = torch.where(block > 0, block_cdf.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK)).squeeze(1)
    tokens = block.squeeze(1) * BLOCK + _draw_from_cdf(inside, (point - before).squeeze(1))
    # Only NaN weights can lead into the padding; the caller reports those.
    return tokens.clamp(max=vocab - 1)


def _draw_from_cdf(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative weight exceeds the point; never one of weight 0."""
    cdf = weights.double().cumsum(1)
    # Rounding may leave a point at or past the total: pull it just inside, so that a real entry is
    # hit.
    points = torch.minimum(points, cdf[:, -1] * (1 - 1e-12))
    return (
        torch.searchsorted(cdf, points[:, None].clamp(min=0), right=True)
        .squeeze(1)
        .clamp(max=cdf.shape[1] - 1)
    )


def _draw_filtered(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: SamplingConfig
) -> torch.Tensor:
    if sampling.top_k > 0:
        values, indices = logits.topk(min(sampling.top_k, logits.shape[1]), dim=1)
        return _draw_from_candidates(indices, values.softmax(1), uniforms, sampling)
    total = logits.logsumexp(1, keepdim=True)
    return _draw_from_top(logits, total, uniforms, sampling, FIRST_CANDIDATES)


def _draw_from_top(
    logits: torch.Tensor,
    total: torch.Tensor,
    uniforms: torch.Tensor,
    sampling: SamplingConfig,
    count: int,
) -> torch.Tensor:
    """Draw from the ``count`` most likely tokens; from more in rows whose filters keep more.

    ``total`` ``(N, 1)`` is the log of what the row's exponentials add up to.
    """
    vocab = logits.shape[1]
    values, indices = logits.topk(min(count, vocab), dim=1)
    probs = (values - total).exp()
    enough = probs.sum(1) >= sampling.top_p
    if sampling.min_p > 0.0:
        enough |= probs[:, -1] < sampling.min_p * probs[:, 0]
    tokens = _draw_from_candidates(indices, probs, uniforms, sampling)
    if count < vocab and not bool(enough.all()):
        rows = (~enough).nonzero().squeeze(1)
        tokens[rows] = _draw_from_top(
            logits[rows], total[rows], uniforms[rows], sampling, count * CANDIDATES_FACTOR
        )
    return tokens


def _draw_from_candidates(
    indices: torch.Tensor, probs: torch.Tensor, uniforms: torch.Tensor, sampling: SamplingConfig
) -> torch.Tensor:
    """Draw from tokens ``(N, K)``, most likely first, after top-p and min-p."""
    before = probs.cumsum(1) - probs
    keep = before < sampling.top_p
    if sampling.min_p > 0.0:
        keep &= probs >= sampling.min_p * probs[:, :1]
    keep[:, 0] = True
    weights = torch.where(keep, probs, 0.0)
    chosen = _draw_from_cdf(weights, uniforms.double() * weights.double().sum(1))
    return indices.gather(1, chosen[:, None]).squeeze(1)
