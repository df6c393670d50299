"""One token per row from logits: penalties, filters, and a draw by inverse CDF.

Applied in the order of transformers: repetition penalty, minimum length, temperature, top-k, top-p,
min-p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from agilerl.llm.config import SamplingConfig

# Vocabulary entries summed at a time when drawing from the full distribution.
BLOCK = 128
# Most likely tokens looked at first when only top-p or min-p is set; where the filters keep more,
# this many times as many, or on a CPU all by their weight.
FIRST_CANDIDATES, CANDIDATES_FACTOR = 512, 8
# On a CPU the most likely tokens are looked for in the blocks of this size with the largest maxima,
# up to so many tokens: for more, torch's search of the whole vocabulary is as fast.
SEARCHED_BLOCK, MOST_FROM_BLOCKS = 32, 128
# The float32 number 1 as an integer, and the low bits of such integers that the first of two
# histograms leaves out.
_ONE, _LOW_BITS = 0x3F800000, 15


class Drawn(NamedTuple):
    """A token per row."""

    tokens: torch.Tensor
    """``(N,)`` long."""
    largest: torch.Tensor
    """``(N,)`` each row's largest logit: NaN or inf if one of the row is."""


def next_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor | None, sampling: SamplingConfig
) -> Drawn:
    """Draw (or, greedily, pick) one token per row.

    Args:
        logits: ``(N, V)`` after penalties; may be overwritten.
        uniforms: ``(N,)`` in [0, 1); None where decoding is greedy.
        sampling: Temperature and filters.
    """
    if uniforms is None or sampling.greedy:
        largest, tokens = logits.max(-1)
        return Drawn(tokens, largest)
    logits = logits.float()
    if sampling.top_k > 0:
        values, indices = _most_likely(logits, min(sampling.top_k, logits.shape[1]))
        probs = (values / sampling.temperature).softmax(1)
        tokens = _draw_from_candidates(indices, probs, uniforms, sampling)
        return Drawn(tokens, values[:, 0])
    largest = logits.amax(1)
    weights = _weights(logits, largest, sampling.temperature)
    if sampling.top_p == 1.0 and sampling.min_p == 0.0:
        return Drawn(_draw_full(weights, uniforms), largest)
    total = weights.sum(1, keepdim=True)
    return Drawn(_draw_from_top(weights, total, uniforms, sampling, FIRST_CANDIDATES), largest)


def scaled_logps(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs ``(N,)``, float32, of tokens under ``softmax(logits / temperature)``.

    ``logits`` ``(N, V)`` come before penalties and filters, as what the trainer computes; they may
    be overwritten.
    """
    logits = logits.float()
    largest = logits.amax(1)
    drawn = (logits.gather(1, tokens[:, None]).squeeze(1) - largest) / temperature
    return drawn - _weights(logits, largest, temperature).sum(1).log()


def _weights(logits: torch.Tensor, largest: torch.Tensor, temperature: float) -> torch.Tensor:
    """``exp((logits - largest) / temperature)``, in the memory of the logits."""
    logits.sub_(largest[:, None])
    if temperature != 1.0:
        logits.div_(temperature)
    return logits.exp_()


def penalise(
    logits: torch.Tensor, seen: torch.Tensor | None, generated: int, sampling: SamplingConfig
) -> torch.Tensor:
    """Penalise seen tokens and forbid an early end of sequence.

    Args:
        logits: ``(N, V)``; overwritten.
        seen: ``(N, L)`` ids of the tokens in each row, repetitions allowed; None: no penalty.
        generated: Tokens that the rows have generated.
        sampling: Penalty and least length.
    """
    if seen is not None:
        penalty, values = sampling.repetition_penalty, logits.gather(1, seen)
        values = torch.where(values > 0, values / penalty, values * penalty)
        logits.scatter_(1, seen, values)
    if generated < sampling.min_new_tokens:
        eos = torch.tensor(sampling.eos_token_ids, device=logits.device)
        logits.index_fill_(1, eos, -torch.inf)
    return logits


def _most_likely(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest logits of each row and their tokens, largest first."""
    rows, vocab = logits.shape
    whole = vocab // SEARCHED_BLOCK * SEARCHED_BLOCK
    few = count <= MOST_FROM_BLOCKS and count * SEARCHED_BLOCK < whole // 2
    if logits.device.type != "cpu" or not few:
        values, tokens = logits.topk(count, dim=1)
        return values, tokens
    # They are in the ``count`` blocks with the largest maxima, or in the rest of the row.
    blocks = logits[:, :whole].unflatten(1, (-1, SEARCHED_BLOCK))
    chosen = blocks.amax(-1).topk(count, dim=1).indices[:, :, None]
    tokens = chosen * SEARCHED_BLOCK + torch.arange(SEARCHED_BLOCK)
    rest = torch.arange(whole, vocab).expand(rows, -1)
    tokens = torch.cat([tokens.flatten(1), rest], dim=1)
    values, places = logits.gather(1, tokens).topk(count, dim=1)
    return values, tokens.gather(1, places)


def _draw_full(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse CDF in two levels, over blocks and then within one: cheap for a large vocabulary."""
    vocab = weights.shape[1]
    whole = vocab // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(1, (vocab // BLOCK, BLOCK)).sum(-1)
    if whole < vocab:
        sums = torch.cat([sums, weights[:, whole:].sum(1, keepdim=True)], dim=1)
    block_cdf = sums.double().cumsum(1)
    point = uniforms.double()[:, None] * block_cdf[:, -1:]
    block = torch.searchsorted(block_cdf, point, right=True).clamp(max=block_cdf.shape[1] - 1)
    before = torch.where(block > 0, block_cdf.gather(1, (block - 1).clamp(min=0)), 0.0)
    places = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, places.clamp(max=vocab - 1)).masked_fill(places >= vocab, 0.0)
    tokens = block.squeeze(1) * BLOCK + _draw_from_cdf(inside, (point - before).squeeze(1))
    # Only NaN weights can lead past the last token; the caller reports those.
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


def _draw_from_top(
    weights: torch.Tensor,
    total: torch.Tensor,
    uniforms: torch.Tensor,
    sampling: SamplingConfig,
    count: int,
) -> torch.Tensor:
    """Draw from the ``count`` most likely tokens; from more in rows whose filters keep more.

    ``total`` ``(N, 1)`` is what the row's weights add up to.
    """
    vocab = weights.shape[1]
    values, indices = weights.topk(min(count, vocab), dim=1)
    probs = values / total
    enough = probs.sum(1) >= sampling.top_p
    if sampling.min_p > 0.0:
        enough |= probs[:, -1] < sampling.min_p * probs[:, 0]
    tokens = _draw_from_candidates(indices, probs, uniforms, sampling)
    if count < vocab and not bool(enough.all()):
        rows = (~enough).nonzero().squeeze(1)
        if weights.device.type == "cpu":
            for row in rows.tolist():
                tokens[row] = _draw_by_weight(weights[row], uniforms[row], sampling)
            return tokens
        tokens[rows] = _draw_from_top(
            weights[rows], total[rows], uniforms[rows], sampling, count * CANDIDATES_FACTOR
        )
    return tokens


def _draw_by_weight(
    weights: torch.Tensor, uniform: torch.Tensor, sampling: SamplingConfig
) -> torch.Tensor:
    """One row's draw after top-p and min-p, in a few passes over its ``(V,)`` weights.

    The token is that of the inverse CDF over the tokens in the order of their weights. Nothing is
    sorted: of positive floats the order is that of their bits, so that two histograms, of the high
    bits and of the low ones, give the weight at which the CDF reaches a value.
    """
    order = _WeightOrder(weights.nan_to_num(0.0))  # such rows are reported by the caller
    _, kept = order.reach(sampling.top_p * order.cdf[-1], met=True)
    if sampling.min_p > 0.0:
        likely = weights[weights >= sampling.min_p * weights.max()]
        kept = torch.minimum(kept, likely.sum(dtype=torch.float64))
    token, _ = order.reach(uniform.double() * kept)
    return token


class _WeightOrder:
    """The tokens of ``(V,)`` float32 weights in [0, 1], largest first, without sorting them."""

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights
        self._keys = _ONE - weights.view(torch.int32)  # ascend as weights descend
        self._high = self._keys >> _LOW_BITS
        self._sums = torch.bincount(self._high, weights=weights.double())
        self.cdf = self._sums.cumsum(0)

    def reach(self, mass: torch.Tensor, *, met: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The token with which the sum exceeds ``mass``, or meets it, and that sum; float64."""
        found, before = _reach(self.cdf, self._sums, mass, met)
        tokens = (self._high == found).nonzero().squeeze(1)
        low = self._keys[tokens] & ((1 << _LOW_BITS) - 1)
        sums = torch.bincount(low, weights=self._weights[tokens].double())
        found, inside = _reach(sums.cumsum(0), sums, (mass - before).clamp(min=0), met)
        # All of one weight.
        tokens, before = tokens[low == found], before + inside
        weight = self._weights[tokens[0]].double()
        number = ((mass - before) / weight).nan_to_num(0.0)
        number = (number.ceil() - 1 if met else number).long().clamp(0, len(tokens) - 1)
        return tokens[number], before + (number + 1) * weight


def _reach(
    cdf: torch.Tensor, sums: torch.Tensor, mass: torch.Tensor, met: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bin with which a CDF exceeds ``mass``, or meets it, and the CDF before it."""
    found = torch.searchsorted(cdf, mass, right=not met).clamp(max=len(cdf) - 1)
    return found, cdf[found] - sums[found]


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
