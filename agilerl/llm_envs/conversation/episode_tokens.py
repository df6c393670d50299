"""The token ids of one episode: the context as it grows, and the training rows it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from agilerl.llm.batch import stack_rows


@dataclass(frozen=True)
class Segment:
    """Consecutive ids of one origin: an answer of the model, or the text between two answers."""

    ids: list[int]
    text: str
    turn: int = -1
    """The turn in which these ids were sampled; -1: from the template and the environment."""


@dataclass
class _Row:
    segments: list[Segment]
    """First prompt, then answers and feedback alternating."""
    seen: int
    """Leading segments that are only context here: earlier rows train their answers."""


@dataclass
class EpisodeTokens:
    """The ids of an episode, which grows by answers and feedback.

    When the window slides, the oldest turns leave the context and a new training row begins.

    Two turns, no sliding; P prompt, A answer, F feedback, ids of one row and its action mask::

        P P P A A F F A        positions predict the token to their right:
        . . T T . . T          turn 0: two positions, turn 1: one
    """

    first: Segment
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
        return [token for segment in self._rows[-1].segments for token in segment.ids]

    def context_text(self) -> str:
        """Text of the present context."""
        return "".join(segment.text for segment in self._rows[-1].segments)

    def append(self, segment: Segment) -> None:
        """Append an answer, or the text of template and environment that follows one."""
        self._rows[-1].segments.append(segment)
        self._texts.append(segment.text)
        self.length += len(segment.ids)

    def drop_oldest_turn(self) -> bool:
        """Drop the oldest answer and its feedback from the context; False if only one is left.

        Must be called after an answer, before its feedback is added.
        """
        segments = self._rows[-1].segments
        if len(segments) <= 2:
            return False
        kept = [segments[0], *segments[3:]]
        if self._trains(self._rows[-1]):
            self._rows.append(_Row(kept, seen=len(kept)))
        else:
            # Nothing was sampled since the last turn was dropped: still the same new row.
            self._rows[-1] = _Row(kept, seen=len(kept))
        self.length = sum(len(segment.ids) for segment in kept)
        return True

    def tensors(self, pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids ``(R, T)``, action mask ``(R, T - 1)`` and turn ids ``(R, T - 1)`` of the rows.

        Rows end with their last answer; right padding is ``pad_id``.
        """
        rows = [row for row in self._rows if self._trains(row)] or self._rows[:1]
        ids, turns = zip(*(_row_tensors(row) for row in rows), strict=True)
        turn_ids = stack_rows(turns, -1)
        return stack_rows(ids, pad_id), turn_ids >= 0, turn_ids

    @staticmethod
    def _trains(row: _Row) -> bool:
        return any(segment.turn >= 0 for segment in row.segments[row.seen :])


def _row_tensors(row: _Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``(T,)`` and turn ids ``(T - 1,)`` of one row."""
    ends_with_feedback = row.segments[-1].turn < 0 and len(row.segments) > 1
    segments = row.segments[:-1] if ends_with_feedback else row.segments
    ids = [token for segment in segments for token in segment.ids]
    turns = [
        segment.turn if number >= row.seen else -1
        for number, segment in enumerate(segments)
        for _ in segment.ids
    ]
    # Position s predicts token s + 1, so the first token is predicted nowhere.
    return torch.tensor(ids, dtype=torch.long), torch.tensor(turns[1:], dtype=torch.long)
