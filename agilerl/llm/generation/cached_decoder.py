"""One forward of a model over new tokens, against the keys and values of those before."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache

from agilerl.llm.generation.mixed_adapters import RowAdapters
from agilerl.llm.generation.single_token.attention import single_query_attention


class CachedDecoder:
    """A model without its head, run on new tokens against a cache.

    Args:
        decoder: The model without its head.
        left_padding: Whether rows may have different lengths; False: no mask and no positions are
            passed, for models that have no use for them.
        single_query: Whether single tokens may attend by :func:`single_query_attention`.
        row_adapters: Where rows run with different adapters: which with which.
    """

    def __init__(
        self,
        decoder: nn.Module,
        *,
        left_padding: bool,
        single_query: bool,
        row_adapters: RowAdapters | None = None,
    ) -> None:
        self.decoder, self.left_padding, self.single_query = decoder, left_padding, single_query
        self.row_adapters = row_adapters

    def assign(self, adapters: torch.Tensor) -> None:
        """Choose the adapter of each row of the next forwards: ``(N,)`` long, where they differ."""
        if self.row_adapters is not None:
            self.row_adapters.assign(adapters)

    def hidden(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Hidden states ``(N, T, D)`` of new tokens.

        Args:
            ids: ``(N, T)``.
            mask: ``(N, L)`` bool over cached and new columns, False on padding.
            positions: ``(N, T)``.
            cache: Keys and values of the ``L - T`` columns before; the new ones are appended.
        """
        kwargs = {}
        if self.left_padding:
            kwargs = {"attention_mask": mask.long(), "position_ids": positions}
        single = self.single_query and ids.shape[1] == 1
        with single_query_attention(self.decoder, cache) if single else contextlib.nullcontext():
            output = self.decoder(input_ids=ids, past_key_values=cache, use_cache=True, **kwargs)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden


class LeftPadded(NamedTuple):
    """Rows of different lengths, right-aligned; each ``(N, T)``."""

    ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(
        cls, rows: Sequence[torch.Tensor], pad_token_id: int, device: torch.device
    ) -> LeftPadded:
        """Pad 1-D ``rows``."""
        width = max(len(row) for row in rows)
        ids = torch.full((len(rows), width), pad_token_id, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = row
            mask[i, width - len(row) :] = True
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return cls(ids.to(device), mask.to(device), positions.to(device))
