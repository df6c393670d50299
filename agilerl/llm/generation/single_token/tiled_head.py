"""The logits of one token per row, made a tile of the vocabulary at a time in kept memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from agilerl.llm.causal_lm import LogitHead

# Weights of a tile on a CPU: with their logits they stay in its second-level cache.
TILE_BYTES = 512 * 1024


class TiledHead:
    """A head whose logits take the same memory at every token.

    On a CPU one product over a large vocabulary takes half as long again as the products of its
    tiles, and memory for the result, taken from the system anew at every token, more than the rest
    of sampling. Elsewhere, and where the head is no plain linear layer, this is ``head.logits``.

    Args:
        head: From hidden states to logits.
    """

    def __init__(self, head: LogitHead) -> None:
        self.head, self._tiles, self._buffer = head, list[LogitHead](), torch.empty(0, 0)
        weight = head.weight
        if weight is None or weight.device.type != "cpu":
            return
        self._tile = max(64, TILE_BYTES // (weight.shape[1] * weight.itemsize))
        starts = range(0, len(weight), self._tile)
        if len(starts) == 1:
            return
        columns = [slice(start, start + self._tile) for start in starts]
        self._tiles = [
            replace(head, weight=weight[c], bias=None if head.bias is None else head.bias[c])
            for c in columns
        ]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(N, D)`` hidden states to ``(N, V)`` logits, which hold until the next call."""
        if not self._tiles:
            return self.head.logits(hidden)
        if len(self._buffer) < len(hidden) or self._buffer.dtype != hidden.dtype:
            vocab = sum(len(tile.weight) for tile in self._tiles if tile.weight is not None)
            self._buffer = hidden.new_empty(len(hidden), vocab)
        logits = self._buffer[: len(hidden)]
        for tile, columns in zip(self._tiles, logits.split(self._tile, dim=1), strict=True):
            columns.copy_(tile.logits(hidden))
        return logits
