"""What the loss of a mini-batch is averaged over: the weight of every token.

Source of ``"constant"`` (Dr. GRPO): https://arxiv.org/abs/2503.20783, of ``"prompt"`` (ScaleRL):
https://arxiv.org/abs/2510.13786.
"""

from __future__ import annotations

import torch

from agilerl.llm.config import Reduction


def reduction_counts(
    mask: torch.Tensor, sequence_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Tokens and sequences of a mini-batch, ``(2,)`` float64: what its means divide by.

    Args:
        mask: ``(B, S)`` bool, the tokens that count; masked out of the loss or not.
        sequence_weights: As in :func:`reduction_weights`.
    """
    return torch.stack([mask.sum().double(), _row_weights(mask, sequence_weights).sum()])


def _row_weights(mask: torch.Tensor, sequence_weights: torch.Tensor | None) -> torch.Tensor:
    """``(B,)`` float64: by how much each row counts as a sequence."""
    return mask.any(1).double() if sequence_weights is None else sequence_weights.double()


def reduction_weights(
    mask: torch.Tensor,
    reduction: Reduction,
    max_output_tokens: int | None = None,
    sequence_weights: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weight of every token in the loss of a mini-batch, so that ``loss = sum(weights * terms)``.

    Computed once over the whole mini-batch and then sliced, so that a gradient depends neither on
    the micro-batch size nor on padding.

    Args:
        mask: ``(B, S)`` bool over the mini-batch, the tokens that are trained.
        reduction: ``"sequence"`` mean over sequences of token means; ``"prompt"`` the same with the
            completions of a prompt as one sequence; ``"token"`` mean over tokens; ``"constant"``
            sum / (sequences × ``max_output_tokens``); ``"sum"``.
        max_output_tokens: Tokens; needed for ``"constant"``.
        sequence_weights: ``(B,)`` by which a row counts as a sequence: its share of the trained
            tokens of a trajectory that gave several rows, or for ``"prompt"`` of its prompt. None:
            1.
        counts: ``(2,)`` :func:`reduction_counts` of the whole mini-batch, where these rows are only
            a rank's part of it, or others count without being trained; None: they are all of it.

    Returns:
        ``(B, S)`` float64, 0 outside ``mask``.
    """
    weights = mask.to(torch.float64)
    all_tokens, sequences = reduction_counts(mask, sequence_weights) if counts is None else counts
    sequences = torch.where(sequences > 0, sequences, 1.0)
    if reduction == "prompt" and sequence_weights is None:
        raise ValueError('loss_reduction "prompt" needs the share of its prompt in each row')
    if reduction in ("sequence", "prompt"):
        shares = _row_weights(mask, sequence_weights)[:, None]
        return weights * shares / weights.sum(1, keepdim=True).clamp(min=1) / sequences
    if reduction == "token":
        return weights / all_tokens.clamp(min=1)
    if reduction == "constant":
        if max_output_tokens is None:
            raise ValueError('loss_reduction "constant" needs max_output_tokens')
        return weights / (sequences * max_output_tokens)
    return weights
