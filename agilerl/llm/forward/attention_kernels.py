"""Fused attention of packed queries over packed keys, with the log-sum-exp of the logits.

torch's own kernels, called where a backward can be given another output and log-sum-exp than the
forward's: those of a softmax over more keys, whose share of the gradient it then computes. On CPUs
they take padded rows, on CUDA devices boundaries of packed ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from agilerl.llm.forward.packed_rows import Segments


class AttentionPart(NamedTuple):
    """Queries and the keys that they attend to."""

    queries: Segments
    keys: Segments
    query_tokens: slice
    """Of the packed row."""
    key_tokens: slice
    causal: bool
    """Whether queries and keys are the same tokens, which see those before them."""
    window: int | None = None
    """Tokens that a token sees, itself included, where there is no mask; None: all."""
    mask: torch.Tensor | None = None
    """Broadcasts to ``(R, heads, queries, keys)``, added to the logits; on CPUs."""
    sees_nothing: torch.Tensor | None = None
    """``(n,)`` bool: tokens with no key in this part; None: there are none."""


class AttendingTokens(NamedTuple):
    """What the tokens of a packed row attend with."""

    query: torch.Tensor
    """``(N, heads, head size)``."""
    key: torch.Tensor
    """``(N, key heads, head size)``; consecutive heads share one where there are fewer."""
    value: torch.Tensor
    """As ``key``."""
    scaling: float | None
    """Factor on the logits; None: one over the square root of the head size."""


def part_forward(part: AttentionPart, tokens: AttendingTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``(n, heads, head size)`` and log-sum-exp ``(n, heads)`` of the part's queries.

    Args:
        part: Which of the tokens attend to which.
        tokens: All of the packed row.
    """
    forward = _cuda_forward if tokens.query.is_cuda else _cpu_forward
    return forward(part, tokens)


def part_backward(
    part: AttentionPart,
    gradient: torch.Tensor,
    tokens: AttendingTokens,
    out: torch.Tensor,
    log_sum: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the part's queries, keys and values.

    Args:
        part: As in the forward.
        gradient: ``(N, heads, head size)``, of the output.
        tokens: As in the forward.
        out: ``(N, heads, head size)``, of the softmax over all keys of a query.
        log_sum: ``(n, heads)`` log-sum-exp over all keys of the part's queries.
    """
    backward = _cuda_backward if tokens.query.is_cuda else _cpu_backward
    return backward(part, gradient, tokens, out, log_sum)


def _cpu_forward(part: AttentionPart, tokens: AttendingTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Of padded rows."""
    q, k, v = _heads_first(part, tokens)
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, part.causal, attn_mask=part.mask, scale=tokens.scaling
    )
    out = part.queries.unpadded(out.transpose(1, 2))
    log_sum = part.queries.unpadded(log_sum.transpose(1, 2))
    if part.sees_nothing is not None:
        log_sum = log_sum.masked_fill(part.sees_nothing[:, None], -torch.inf)
    return out, log_sum


def _cpu_backward(
    part: AttentionPart,
    gradient: torch.Tensor,
    tokens: AttendingTokens,
    out: torch.Tensor,
    log_sum: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of padded rows."""
    q, k, v = _heads_first(part, tokens)
    # Padding must add nothing to the keys: neither a gradient nor a weight.
    padded_gradient = part.queries.padded(gradient[part.query_tokens], 0.0).transpose(1, 2)
    padded_out = part.queries.padded(out[part.query_tokens]).transpose(1, 2)
    padded_sum = part.queries.padded(log_sum, torch.inf).transpose(1, 2)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        padded_gradient, q, k, v, padded_out, padded_sum, 0.0, part.causal,
        attn_mask=part.mask, scale=tokens.scaling,
    )  # fmt: skip
    of_query, of_key, of_value = (grad.transpose(1, 2) for grad in grads)
    return (
        part.queries.unpadded(of_query),
        part.keys.unpadded(_of_own_heads(of_key, tokens.key.shape[1])),
        part.keys.unpadded(_of_own_heads(of_value, tokens.value.shape[1])),
    )


def _heads_first(
    part: AttentionPart, tokens: AttendingTokens
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Padded ``(R, heads, W, head size)``; keys and values repeated for the heads that share."""
    q = part.queries.padded(tokens.query[part.query_tokens])
    k, v = (part.keys.padded(tensor[part.key_tokens]) for tensor in (tokens.key, tokens.value))
    sharing = q.shape[2] // k.shape[2]
    if sharing > 1:
        k, v = (tensor.repeat_interleave(sharing, dim=2) for tensor in (k, v))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _of_own_heads(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """Gradient ``(R, W, heads, head size)`` of keys from that of repeated ones."""
    rows, width, repeated, size = gradient.shape
    if repeated == heads:
        return gradient
    return gradient.reshape(rows, width, heads, repeated // heads, size).sum(3)


def _cuda_forward(
    part: AttentionPart, tokens: AttendingTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        tokens.query[part.query_tokens], tokens.key[part.key_tokens],
        tokens.value[part.key_tokens],
        part.queries.boundaries, part.keys.boundaries, part.queries.width, part.keys.width,
        0.0, part.causal, False, scale=tokens.scaling, **_window(part),
    )  # fmt: skip
    return out, log_sum.transpose(0, 1)


def _cuda_backward(
    part: AttentionPart,
    gradient: torch.Tensor,
    tokens: AttendingTokens,
    out: torch.Tensor,
    log_sum: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # For dropout, which there is none of.
    random_state = torch.zeros(2, dtype=torch.uint64, device=tokens.query.device)
    nothing = torch.empty(0, device=tokens.query.device)
    of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
        gradient[part.query_tokens], tokens.query[part.query_tokens],
        tokens.key[part.key_tokens], tokens.value[part.key_tokens],
        out[part.query_tokens], log_sum.transpose(0, 1).contiguous(),
        part.queries.boundaries, part.keys.boundaries, part.queries.width, part.keys.width,
        0.0, part.causal, random_state, nothing, scale=tokens.scaling, **_window(part),
    )  # fmt: skip
    return of_query, of_key, of_value


def _window(part: AttentionPart) -> dict[str, int]:
    if part.window is None:
        return {"window_size_left": -1, "window_size_right": -1}
    return {"window_size_left": part.window - 1, "window_size_right": 0}
