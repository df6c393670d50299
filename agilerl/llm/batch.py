"""The training batch: completions stacked into rows that know which prompt they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """Rows of prompt and completion, right-padded.

    Two completions of the prompt ``[5, 6]``, of two tokens and one token::

        token_ids       [[5, 6, 7, 2], [5, 6, 2, 0]]
        action_mask     [[F, T, T], [F, T, F]]      position s predicts token s + 1
        lengths         [4, 3]
        prompt_lengths  [2, 2]
        prompt_index    [0, 0]

    A row ends with its last action: what follows (padding, an environment's last words) is never
    trained and never attended to, so nothing here depends on which id is used for padding.
    """

    token_ids: torch.Tensor
    """``(B, T)`` long."""
    action_mask: torch.Tensor
    """``(B, S)`` bool."""
    lengths: torch.Tensor
    """``(B,)`` long: tokens up to and including the last action."""
    prompt_lengths: torch.Tensor
    """``(B,)`` long: tokens before the first action."""
    prompt_index: torch.Tensor
    """``(B,)`` long: rows with equal values have the same prompt."""
    turn_ids: torch.Tensor | None = None
    """``(B, S)`` long, -1 where no action; None in single-turn batches."""

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.token_ids.device

    @property
    def targets(self) -> torch.Tensor:
        """``(N,)`` token ids at the action positions, row by row."""
        return self.token_ids[:, 1:][self.action_mask]

    def select(self, rows: torch.Tensor) -> Batch:
        """The given rows (a long index), trimmed to the longest of them."""
        length = int(self.lengths[rows].max())
        return Batch(
            token_ids=self.token_ids[rows, :length],
            action_mask=self.action_mask[rows, : length - 1],
            lengths=self.lengths[rows],
            prompt_lengths=self.prompt_lengths[rows],
            prompt_index=self.prompt_index[rows],
            turn_ids=None if self.turn_ids is None else self.turn_ids[rows, : length - 1],
        )

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return Batch(
            token_ids=self.token_ids.to(device),
            action_mask=self.action_mask.to(device),
            lengths=self.lengths.to(device),
            prompt_lengths=self.prompt_lengths.to(device),
            prompt_index=self.prompt_index.to(device),
            turn_ids=None if self.turn_ids is None else self.turn_ids.to(device),
        )


def stack_rows(
    tensors: Sequence[torch.Tensor] | torch.Tensor, pad_value: int | bool, width: int = 0
) -> torch.Tensor:
    """Stack ``(G, T_i)`` or ``(T_i,)`` tensors of different widths into ``(B, T)``, right-padded.

    Args:
        tensors: The tensors; a single 2-D tensor is taken as rows.
        pad_value: Fills the right.
        width: Least width of the result.
    """
    blocks = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    blocks = [block if block.dim() == 2 else block[None] for block in blocks]
    width = max([width, *(block.shape[1] for block in blocks)])
    return torch.cat(
        [torch.nn.functional.pad(b, (0, width - b.shape[1]), value=pad_value) for b in blocks]
    )


def make_batch(
    completion_ids: Sequence[torch.Tensor] | torch.Tensor,
    action_masks: Sequence[torch.Tensor] | torch.Tensor,
    turn_ids: Sequence[torch.Tensor] | torch.Tensor | None = None,
    *,
    may_lack_actions: bool = False,
) -> Batch:
    """Build a batch from what ``get_action`` or an environment returned.

    Args:
        completion_ids: ``(G, T_i)`` long tensors, prompt included, or one ``(B, T)`` tensor.
        action_masks: ``(G, T_i - 1)`` bool tensors, or one ``(B, T - 1)``.
        turn_ids: ``(B, T - 1)`` or a list; -1 outside actions.
        may_lack_actions: Take rows without any action: other ranks have some.

    Raises:
        ValueError: If shapes disagree, or no row has any action although one must.
    """
    token_ids = stack_rows(completion_ids, 0).long()
    action_mask = stack_rows(action_masks, False).bool()
    expected = (token_ids.shape[0], token_ids.shape[1] - 1)
    if tuple(action_mask.shape) != expected:
        raise ValueError(
            f"action_masks stack to shape {tuple(action_mask.shape)}, but completion_ids of shape "
            f"{tuple(token_ids.shape)} need {expected}: one position less than tokens, one row per "
            "completion"
        )
    if not (may_lack_actions or action_mask.any()):
        raise ValueError(
            "action_masks are False everywhere: there is no generated token to learn from"
        )
    turns = None if turn_ids is None else _stack_turns(turn_ids, action_mask)
    positions = torch.arange(action_mask.shape[1], device=action_mask.device)
    last = torch.where(action_mask, positions, -1).amax(1)
    first = torch.where(action_mask, positions, action_mask.shape[1]).amin(1)
    # A row without actions keeps one position to go through the model with; its weight is zero.
    lengths = (last + 2).clamp(min=2)
    prompt_lengths = torch.minimum(first + 1, lengths - 1)
    return Batch(
        token_ids,
        action_mask,
        lengths,
        prompt_lengths,
        _index_prompts(token_ids, prompt_lengths),
        turns,
    )


def _stack_turns(
    turn_ids: Sequence[torch.Tensor] | torch.Tensor, action_mask: torch.Tensor
) -> torch.Tensor:
    """``(B, S)`` long, -1 where no action."""
    turns = stack_rows(turn_ids, -1).long()
    if turns.shape != action_mask.shape:
        raise ValueError(
            f"turn_ids have shape {tuple(turns.shape)}, expected {tuple(action_mask.shape)} like "
            "action_masks"
        )
    if (turns[action_mask] < 0).any():
        raise ValueError(
            "turn_ids are negative at action positions; every generated token needs its turn's "
            "index"
        )
    return turns


def _index_prompts(token_ids: torch.Tensor, prompt_lengths: torch.Tensor) -> torch.Tensor:
    """Number the distinct prompts in order of appearance, ``(B,)``."""
    seen: dict[bytes, int] = {}
    rows = token_ids.cpu().numpy()
    index = [
        seen.setdefault(rows[i, :n].tobytes(), len(seen))
        for i, n in enumerate(prompt_lengths.tolist())
    ]
    return torch.tensor(index, device=token_ids.device)
