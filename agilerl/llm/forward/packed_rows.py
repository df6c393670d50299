"""Rows without padding: each distinct prompt once, then all completions, in one row of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agilerl.llm.batch import TrainBatch


@dataclass(frozen=True)
class PackedRows:
    """The tokens of a batch in one row: ``n_p`` of the distinct prompts, then ``n_c`` others.

    The last token of a row predicts nothing that is trained, and is left out.
    """

    token_ids: torch.Tensor
    """``(1, N)`` long."""
    positions: torch.Tensor
    """``(1, N)`` long: of each token in its row."""
    predictors: torch.Tensor
    """``(actions,)`` long: the token whose hidden state predicts each of ``batch.targets``."""
    prompts: list[int]
    """Tokens of each distinct prompt."""
    completions: list[int]
    """Of each completion, in the order of their prompts, the tokens that predict another."""
    continuations: list[int]
    """Of each distinct prompt, the tokens of all its completions together."""
    longest_row: int
    """Tokens."""

    @property
    def prompt_tokens(self) -> int:
        """``n_p``."""
        return sum(self.prompts)

    @classmethod
    def of(cls, batch: TrainBatch) -> PackedRows:
        """Pack a batch."""
        first_row, row_prompt = distinct_prompts(batch)
        prompt_lengths = batch.prompt_lengths[first_row]
        prompt, prompt_positions = _row_and_offset(prompt_lengths)

        # Completions of one prompt side by side.
        order = row_prompt.argsort(stable=True)
        lengths = (batch.lengths - batch.prompt_lengths - 1)[order]
        completion, offset = _row_and_offset(lengths)
        row = order[completion]
        positions = batch.prompt_lengths[row] + offset

        starts = torch.empty_like(lengths)
        starts[order] = len(prompt) + lengths.cumsum(0) - lengths
        of_prompts = torch.zeros_like(prompt_lengths).index_add(0, row_prompt[order], lengths)
        return cls(
            token_ids=torch.cat(
                [
                    batch.token_ids[first_row[prompt], prompt_positions],
                    batch.token_ids[row, positions],
                ]
            )[None],
            positions=torch.cat([prompt_positions, positions])[None],
            predictors=_predictors(batch, starts, prompt_lengths.cumsum(0)[row_prompt] - 1),
            prompts=prompt_lengths.tolist(),
            completions=lengths.tolist(),
            continuations=of_prompts.tolist(),
            longest_row=int(batch.lengths.max()) - 1,
        )


def packed_tokens(batch: TrainBatch, rows: torch.Tensor) -> int:
    """Tokens of :class:`PackedRows` of some rows of a batch."""
    tokens = row_tokens(batch, rows)
    prompts = {number: prompt for number, prompt, _ in tokens}
    return sum(prompts.values()) + sum(others for *_, others in tokens)


def row_tokens(batch: TrainBatch, rows: torch.Tensor) -> list[tuple[int, int, int]]:
    """Of each row its prompt's number, the prompt's tokens, and its other tokens but the last."""
    prompts = batch.prompt_lengths[rows]
    others = batch.lengths[rows] - prompts - 1
    columns = (batch.prompt_index[rows], prompts, others)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def distinct_prompts(batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """First row of each distinct prompt, ``(p,)``, and each row's place among them, ``(B,)``."""
    _, place = batch.prompt_index.unique(return_inverse=True)
    rows = torch.arange(len(batch), device=place.device)
    first = torch.full((int(place.max()) + 1,), len(batch), device=place.device)
    return first.scatter_reduce(0, place, rows, reduce="amin"), place


def _row_and_offset(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of tokens in rows of these lengths: the row of each, ``(n,)``, and its place in the row."""
    rows = torch.arange(len(lengths), device=lengths.device)
    row = rows.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return row, torch.arange(len(row), device=lengths.device) - starts[row]


def _predictors(batch: TrainBatch, starts: torch.Tensor, prompt_ends: torch.Tensor) -> torch.Tensor:
    """The first action is predicted by the prompt's last token, each other by the one before it.

    Args:
        batch: The rows.
        starts: ``(B,)`` packed place of each row's first token behind its prompt.
        prompt_ends: ``(B,)`` packed place of each row's last prompt token.
    """
    behind = torch.arange(batch.action_mask.shape[1], device=batch.device)
    behind = behind - batch.prompt_lengths[:, None]
    return torch.where(behind < 0, prompt_ends[:, None], starts[:, None] + behind)[
        batch.action_mask
    ]
