"""Which tokens have the most entropy, over the mini-batch of all ranks.

Source: https://arxiv.org/abs/2506.01939, which trains the fifth of the tokens with most entropy.
"""

from __future__ import annotations

import math

import torch

from agilerl.distributed import Ranks

_BITS = (11, 10, 10)  # of a float32 without its sign


def top_entropy_mask(
    entropy: torch.Tensor, mask: torch.Tensor, quantile: float, ranks: Ranks
) -> torch.Tensor:
    """``(B, S)`` bool: the tokens of a mini-batch of all ranks whose entropy reaches a quantile.

    Args:
        entropy: ``(B, S)`` in nats.
        mask: ``(B, S)`` bool, the tokens that count.
        quantile: Within (0, 1): 0.8 keeps a fifth.
        ranks: The processes that train together; a collective.
    """
    entropy = entropy.clamp(min=0)  # of certain tokens it is 0, up to rounding
    return mask & (entropy >= quantile_over_ranks(entropy[mask], quantile, ranks))


def quantile_over_ranks(values: torch.Tensor, quantile: float, ranks: Ranks) -> float:
    """The least of all ranks' values that is not below their quantile.

    With n values it is number ``ceil(quantile * (n - 1))`` in ascending order, counted from 0; not
    interpolated, but the values that reach ``torch.quantile`` are the same.

    Found exactly by three histograms over the bits of float32, which are ordered as the numbers
    are; so ranks exchange a few thousand counts, however many values they have.

    Args:
        values: ``(N,)`` of this rank, at least 0.
        quantile: Within [0, 1].
        ranks: The processes whose values count; a collective.

    Returns:
        The value; 0 if there are none.
    """
    # Adding 0 turns -0.0, whose bits are those of the largest negative number, into 0.0.
    bits = (values.detach().float() + 0.0).view(torch.int32)
    count = int(ranks.sum(torch.tensor(bits.numel())))
    if not count:
        return 0.0
    # 0.8 * 5 is a little more than 4.
    number, found, shift = math.ceil(quantile * (count - 1) - 1e-9), 0, sum(_BITS)
    for width in _BITS:
        candidates = bits[(bits >> shift) == found]
        shift -= width
        bins = torch.bincount((candidates >> shift) & (2**width - 1), minlength=2**width)
        up_to = ranks.sum(bins).cumsum(0)
        chosen = int((up_to <= number).sum())
        number -= int(up_to[chosen - 1]) if chosen else 0
        found = found << width | chosen
    return float(torch.tensor(found, dtype=torch.int32).view(torch.float32))
