"""The token ids of an episode, as the training rows they become."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from agilerl.llm.batch import stack_rows


@dataclass(frozen=True)
class Piece:
    """Ids that come from one hand: the model's answer of a turn, or what surrounds it."""

    ids: list[int]
    text: str
    turn: int = -1
    """The turn that sampled these ids; -1: template and environment wrote them."""


@dataclass
class _Row:
    pieces: list[Piece]
    """First prompt, then answers and feedback in turns."""
    seen: int
    """The first so many pieces are context here: earlier rows train their answers."""


@dataclass
class EpisodeRows:
    """An episode grows by answers and feedback; a window that slides begins another row.

    Two turns, no sliding; P prompt, A answer, F feedback, ids of one row and its action mask::

        P P P A A F F A        positions predict the token to their right:
        . . T T . . T          turn 0: two positions, turn 1: one
    """

    first: Piece
    _rows: list[_Row] = field(init=False)
    _texts: list[str] = field(init=False, default_factory=list)
    length: int = field(init=False)
    """Ids in the present context."""

    def __post_init__(self) -> None:
        self._rows = [_Row([self.first], seen=1)]
        self.length = len(self.first.ids)

    @property
    def transcript(self) -> str:
        """The text of all that came after the first prompt."""
        return "".join(self._texts)

    def context_ids(self) -> list[int]:
        """Ids of the present context."""
        return [token for piece in self._rows[-1].pieces for token in piece.ids]

    def context_text(self) -> str:
        """Text of the present context."""
        return "".join(piece.text for piece in self._rows[-1].pieces)

    def add_action(self, action: Piece) -> None:
        """Append an answer."""
        self._append(action)

    def add_feedback(self, feedback: Piece) -> None:
        """Append what the template and the environment say after an answer."""
        self._append(feedback)

    def drop_oldest_turn(self) -> bool:
        """Take the oldest answer and its feedback out of the context; False: only one is left.

        Must be called after an answer, before its feedback is added.
        """
        pieces = self._rows[-1].pieces
        if len(pieces) <= 2:
            return False
        kept = [pieces[0], *pieces[3:]]
        if self._trains(self._rows[-1]):
            self._rows.append(_Row(kept, seen=len(kept)))
        else:
            # Nothing was sampled since the last turn left: still the same new row.
            self._rows[-1] = _Row(kept, seen=len(kept))
        self.length = sum(len(piece.ids) for piece in kept)
        return True

    def tensors(self, pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids ``(R, T)``, action mask ``(R, T - 1)`` and turn ids ``(R, T - 1)`` of the rows.

        Rows end with their last answer; right padding is ``pad_id``.
        """
        rows = [row for row in self._rows if self._trains(row)] or self._rows[:1]
        ids, turns = zip(*(_row_tensors(row) for row in rows), strict=True)
        turn_ids = stack_rows(turns, -1)
        return stack_rows(ids, pad_id), turn_ids >= 0, turn_ids

    def _append(self, piece: Piece) -> None:
        self._rows[-1].pieces.append(piece)
        self._texts.append(piece.text)
        self.length += len(piece.ids)

    @staticmethod
    def _trains(row: _Row) -> bool:
        return any(piece.turn >= 0 for piece in row.pieces[row.seen :])


def _row_tensors(row: _Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``(T,)`` and turn ids ``(T - 1,)`` of one row."""
    pieces = row.pieces if row.pieces[-1].turn >= 0 or len(row.pieces) == 1 else row.pieces[:-1]
    ids = [token for piece in pieces for token in piece.ids]
    turns = [
        piece.turn if number >= row.seen else -1
        for number, piece in enumerate(pieces)
        for _ in piece.ids
    ]
    # Position s predicts token s + 1, so the first token is predicted nowhere.
    return torch.tensor(ids, dtype=torch.long), torch.tensor(turns[1:], dtype=torch.long)
