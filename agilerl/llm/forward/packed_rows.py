"""Rows without padding: each distinct prompt once, then all completions, in one row of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agilerl.llm.batch import TrainBatch


@dataclass(frozen=True)
class Segments:
    """Consecutive tokens as rows ``(R, W)`` of different lengths, right-padded.

    Lengths ``[3, 1]``::

        slot_of_token  [0, 1, 2, 3]
        token_of_slot  [0, 1, 2, 3, 0, 0]
        padding        [F, F, F, F, T, T]
        boundaries     [0, 3, 4]

    Where no row needs padding, the first three are None.
    """

    rows: int
    width: int
    boundaries: torch.Tensor
    """``(R + 1,)`` int32: where each row begins, and the last one ends."""
    token_of_slot: torch.Tensor | None = None
    """``(R·W,)`` long."""
    slot_of_token: torch.Tensor | None = None
    """``(n,)`` long."""
    padding: torch.Tensor | None = None
    """``(R·W,)`` bool."""

    @classmethod
    def of_lengths(cls, lengths: torch.Tensor) -> Segments:
        """Rows of these lengths ``(R,)``, one behind the other."""
        rows, width = len(lengths), int(lengths.max())
        boundaries = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        if bool((lengths == width).all()):
            return cls(rows, width, boundaries)
        row, offset = _row_and_offset(lengths)
        slot_of_token = row * width + offset
        token_of_slot = torch.zeros(rows * width, dtype=torch.long, device=lengths.device)
        token_of_slot[slot_of_token] = torch.arange(len(row), device=lengths.device)
        padding = torch.ones(rows * width, dtype=torch.bool, device=lengths.device)
        padding[slot_of_token] = False
        return cls(rows, width, boundaries, token_of_slot, slot_of_token, padding)

    def padded(self, tokens: torch.Tensor, fill: float | None = None) -> torch.Tensor:
        """``(n, ...)`` to ``(R, W, ...)``; padding is ``fill``, or any token where it is None."""
        if self.token_of_slot is not None:
            tokens = tokens.index_select(0, self.token_of_slot)
            if fill is not None:
                assert self.padding is not None
                tokens[self.padding] = fill
        return tokens.reshape(self.rows, self.width, *tokens.shape[1:])

    def unpadded(self, rows: torch.Tensor) -> torch.Tensor:
        """``(R, W, ...)`` to ``(n, ...)``."""
        flat = rows.reshape(self.rows * self.width, *rows.shape[2:])
        return flat if self.slot_of_token is None else flat.index_select(0, self.slot_of_token)


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
    prompts: Segments
    """A row per distinct prompt."""
    completions: Segments | None
    """A row per completion; None: none has a token that predicts another."""
    continuations: Segments | None
    """The same tokens, a row per distinct prompt with those of all its completions."""
    prompt_tokens: int
    """``n_p``."""
    longest_row: int
    """Tokens."""

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

        prompt_tokens = len(prompt)
        starts = torch.empty_like(lengths)
        starts[order] = prompt_tokens + lengths.cumsum(0) - lengths
        packed = cls(
            token_ids=torch.cat(
                [
                    batch.token_ids[first_row[prompt], prompt_positions],
                    batch.token_ids[row, positions],
                ]
            )[None],
            positions=torch.cat([prompt_positions, positions])[None],
            predictors=_predictors(batch, starts, prompt_lengths.cumsum(0)[row_prompt] - 1),
            prompts=Segments.of_lengths(prompt_lengths),
            completions=None,
            continuations=None,
            prompt_tokens=prompt_tokens,
            longest_row=int(batch.lengths.max()) - 1,
        )
        if not len(row):
            return packed
        tokens_of_prompt = torch.zeros_like(prompt_lengths).index_add(0, row_prompt[order], lengths)
        return cls(
            **{
                **vars(packed),
                "completions": Segments.of_lengths(lengths),
                "continuations": Segments.of_lengths(tokens_of_prompt),
            }
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
