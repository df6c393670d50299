"""What a decoding loop has sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agilerl.llm.config import SamplingConfig
from agilerl.llm.generation.random_numbers import BLOCK
from agilerl.llm.generation.sampling import scaled_logps


class SampledTokens:
    """Sampled tokens and, if asked for, their log-probs, in blocks of columns.

    Args:
        rows: Of the batch at its start.
        limit: Most tokens of a row.
        sampling: How they are drawn.
        device: The model's.
    """

    def __init__(
        self, rows: int, limit: int, sampling: SamplingConfig, device: torch.device
    ) -> None:
        self.limit, self.sampling = limit, sampling
        self.tokens: list[torch.Tensor] = []
        self.logps: list[torch.Tensor] = []
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.broken = torch.zeros((), dtype=torch.bool, device=device)

    def add(
        self,
        rows: torch.Tensor,
        unfinished: torch.Tensor,
        step: int,
        token: torch.Tensor,
        logits: torch.Tensor,
        largest: torch.Tensor,
    ) -> None:
        """Store a step.

        Args:
            rows: ``(N,)`` the rows that it is of, by their number at the start.
            unfinished: ``(N,)`` bool; the tokens of the others are dropped.
            step: Its number.
            token: ``(N,)``.
            logits: ``(N, V)`` of the model; they may be overwritten.
            largest: ``(N,)`` of the logits that were drawn from.
        """
        column = step % BLOCK
        if column == 0:
            shape = len(self.lengths), min(BLOCK, self.limit - step)
            self.tokens.append(self.lengths.new_full(shape, self.sampling.pad_token_id))
            if self.sampling.return_logps:
                self.logps.append(torch.zeros(shape, device=token.device))
        self.broken |= ~(largest < torch.inf).all()
        self.tokens[-1][rows, column] = token
        if self.sampling.return_logps:
            logps = scaled_logps(logits, token, self.sampling.temperature)
            self.logps[-1][rows, column] = logps
        self.lengths[rows] += unfinished

    def rows(self) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """Per row tokens and log-probs.

        Raises:
            RuntimeError: If any logits were not finite.
        """
        if self.broken:
            raise RuntimeError(
                "the model's logits held NaN or inf during generation: its weights have diverged "
                "(was the learning rate too high?) or its dtype overflows"
            )
        tokens = self._without_padding(self.tokens)
        return tokens, self._without_padding(self.logps) if self.sampling.return_logps else None

    def _without_padding(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        columns = torch.cat([block.cpu() for block in blocks], dim=1)
        return [row[:n].clone() for row, n in zip(columns, self.lengths.tolist(), strict=True)]
