"""Fused attention of packed queries over packed keys, with the log-sum-exp of the logits.

torch's own kernels, called where a backward can be given another output and log-sum-exp than the
forward's: those of a softmax over more keys, whose share of the gradient it then computes. On CPUs
they take padded rows, on CUDA devices boundaries of packed ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from agilerl.llm.forward.padded_rows import PaddedRows


class AttendingTokens(NamedTuple):
    """Queries and the keys that they attend to."""

    query: torch.Tensor
    """``(n, heads, head size)``."""
    key: torch.Tensor
    """``(m, key heads, head size)``; consecutive heads share one where there are fewer."""
    value: torch.Tensor
    """As ``key``."""
    scaling: float | None
    """Factor on the logits; None: one over the square root of the head size."""


class AttentionGradients(NamedTuple):
    """Of :class:`AttendingTokens`, in the same shapes."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class AttentionKernel(Protocol):
    """Attention between rows of queries and rows of keys, laid out when it is made."""

    def forward(self, tokens: AttendingTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Output ``(n, heads, head size)`` and log-sum-exp ``(n, heads)``."""
        ...

    def backward(
        self,
        tokens: AttendingTokens,
        gradient: torch.Tensor,
        out: torch.Tensor,
        log_sum: torch.Tensor,
        into: AttentionGradients | None = None,
    ) -> AttentionGradients:
        """Gradients of queries, keys and values.

        Args:
            tokens: As in the forward.
            gradient: ``(n, heads, head size)``, of the output.
            out: ``(n, heads, head size)``, of the softmax over all keys of a query, here or not.
            log_sum: ``(n, heads)`` log-sum-exp over the same keys.
            into: What to add them to, and return; None: new ones, for rows that are all tokens.
        """
        ...


@dataclass(frozen=True)
class PaddedBlock:
    """Some rows that run in one call on a CPU."""

    queries: PaddedRows
    keys: PaddedRows
    causal: bool
    """Whether queries and keys are the same tokens, which see those before them."""
    mask: torch.Tensor | None = None
    """Broadcasts to ``(R, heads, queries, keys)``, added to the logits."""
    sees_nothing: torch.Tensor | None = None
    """``(R, queries)`` bool: which queries have no key here; None: there are none."""


@dataclass(frozen=True)
class PaddedAttention:
    """torch's fused kernel for CPUs, on one block after the other."""

    blocks: list[PaddedBlock]

    def forward(self, tokens: AttendingTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """As :class:`AttentionKernel` has it."""
        out = torch.empty_like(tokens.query)
        # The kernel's, whatever the dtype of its output.
        wide = torch.promote_types(out.dtype, torch.float32)
        log_sum = out.new_empty(out.shape[:2], dtype=wide)
        for block in self.blocks:
            of_block, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_heads_first(block, tokens), 0.0, block.causal,
                attn_mask=block.mask, scale=tokens.scaling,
            )  # fmt: skip
            if block.sees_nothing is not None:
                sums = sums.masked_fill(block.sees_nothing[:, None], -torch.inf)
            block.queries.put(out, of_block.transpose(1, 2))
            block.queries.put(log_sum, sums.transpose(1, 2))
        return out, log_sum

    def backward(
        self,
        tokens: AttendingTokens,
        gradient: torch.Tensor,
        out: torch.Tensor,
        log_sum: torch.Tensor,
        into: AttentionGradients | None = None,
    ) -> AttentionGradients:
        """As :class:`AttentionKernel` has it."""
        found = into or AttentionGradients(*map(torch.empty_like, tokens[:3]))
        for block in self.blocks:
            # Padding must add nothing to the keys: neither a gradient nor a weight.
            operands = (
                block.queries.take(gradient, 0.0), block.queries.take(out),
                block.queries.take(log_sum, torch.inf),
            )  # fmt: skip
            of_out, block_out, sums = (operand.transpose(1, 2) for operand in operands)
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                of_out, *_heads_first(block, tokens), block_out, sums, 0.0, block.causal,
                attn_mask=block.mask, scale=tokens.scaling,
            )  # fmt: skip
            rows = (block.queries, block.keys, block.keys)
            for each, total, grad in zip(rows, found, grads, strict=True):
                own = _of_own_heads(grad.transpose(1, 2), total.shape[1])
                each.put(total, own, add=into is not None)
        return found


def _heads_first(
    block: PaddedBlock, tokens: AttendingTokens
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Padded ``(R, heads, W, head size)``; keys and values repeated for the heads that share."""
    q, k, v = block.queries.take(tokens.query), *map(block.keys.take, (tokens.key, tokens.value))
    sharing = q.shape[2] // k.shape[2]
    if sharing > 1:
        k, v = (tensor.repeat_interleave(sharing, dim=2) for tensor in (k, v))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _of_own_heads(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """Gradient ``(R, W, heads, head size)`` from that of heads that were repeated."""
    rows, width, repeated, size = gradient.shape
    if repeated == heads:
        return gradient
    return gradient.reshape(rows, width, heads, repeated // heads, size).sum(3)


class Boundaries(NamedTuple):
    """Consecutive rows of tokens."""

    starts: torch.Tensor
    """``(R + 1,)`` int32: where each row begins, and the last one ends."""
    longest: int
    """Tokens."""


@dataclass(frozen=True)
class VarlenAttention:
    """torch's FlashAttention for packed rows on a CUDA device."""

    queries: Boundaries
    keys: Boundaries
    causal: bool
    """Whether queries and keys are the same tokens, which see those before them."""
    window: int | None = None
    """Tokens that a token sees, itself included; None: all."""

    def forward(self, tokens: AttendingTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """As :class:`AttentionKernel` has it."""
        out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
            *tokens[:3], self.queries.starts, self.keys.starts, self.queries.longest,
            self.keys.longest, 0.0, self.causal, False, scale=tokens.scaling, **self._window(),
        )  # fmt: skip
        return out, log_sum.transpose(0, 1)

    def backward(
        self,
        tokens: AttendingTokens,
        gradient: torch.Tensor,
        out: torch.Tensor,
        log_sum: torch.Tensor,
        into: AttentionGradients | None = None,
    ) -> AttentionGradients:
        """As :class:`AttentionKernel` has it."""
        # For dropout, which there is none of.
        random_state = torch.zeros(2, dtype=torch.uint64, device=out.device)
        nothing = torch.empty(0, device=out.device)
        found = torch.ops.aten._flash_attention_backward(
            gradient, *tokens[:3], out, log_sum.transpose(0, 1).contiguous(),
            self.queries.starts, self.keys.starts, self.queries.longest, self.keys.longest,
            0.0, self.causal, random_state, nothing, scale=tokens.scaling, **self._window(),
        )  # fmt: skip
        if into is None:
            return AttentionGradients(*found)
        for total, grad in zip(into, found, strict=True):
            total.add_(grad)
        return into

    def _window(self) -> dict[str, int]:
        if self.window is None:
            return {"window_size_left": -1, "window_size_right": -1}
        return {"window_size_left": self.window - 1, "window_size_right": 0}
