"""The training batch: padded rows of prompt and completion with all that is known of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from agilerl.checks import require


@dataclass(frozen=True)
class TrainBatch:
    """Rows of prompt and completion, right-padded, and all that is known of them.

    Two completions of the prompt ``[5, 6]``, of two tokens and one token, with rewards 1 and 0::

        token_ids       [[5, 6, 7, 2], [5, 6, 2, 0]]
        action_mask     [[F, T, T], [F, T, F]]      position s predicts token s + 1
        lengths         [4, 3]
        prompt_lengths  [2, 2]
        prompt_index    [0, 0]
        loss_mask       [[F, T, T], [F, T, F]]
        advantages      [[0, .5, .5], [0, -.5, 0]]

    A row ends with its last action: what follows (padding, a final observation) is never
    trained and never attended to, so nothing depends on which id is used for padding. Each stage of
    an update adds its fields with ``dataclasses.replace``; they are None before, or if not needed.
    """

    token_ids: torch.Tensor
    """``(B, T)`` long."""
    action_mask: torch.Tensor
    """``(B, S)`` bool: positions that predict a generated token; in an update only the trained
    ones, those of ``loss_mask``."""
    lengths: torch.Tensor
    """``(B,)`` long: tokens up to and including the last action."""
    prompt_lengths: torch.Tensor
    """``(B,)`` long: tokens before the first action."""
    prompt_index: torch.Tensor
    """``(B,)`` long: rows with equal values have the same prompt."""
    loss_mask: torch.Tensor
    """``(B, S)`` bool: actions that are trained; all of them, until some are filtered."""
    denominator_mask: torch.Tensor | None = None
    """``(B, S)`` bool: actions that the means over tokens and sequences divide by, those of
    ``loss_mask`` and of trajectories that are masked out of the loss; None: ``loss_mask``."""
    turn_ids: torch.Tensor | None = None
    """``(B, S)`` long, -1 where no action; None in single-turn batches."""
    trajectory_ids: torch.Tensor | None = None
    """``(B,)`` long: the trajectory of each row, counted from 0; None: one row each."""
    group_ids: torch.Tensor | None = None
    """``(B,)`` long: the group of each row, counted from 0; only for the ``"prompt"`` reduction."""
    advantages: torch.Tensor | None = None
    """``(B, S)``, 0 outside ``loss_mask``."""
    sequence_weights: torch.Tensor | None = None
    """``(B,)`` float64: by how much a row counts as a sequence, its share of the tokens of its
    trajectory, or for the ``"prompt"`` reduction of its group; None: 1."""
    sampling_logp: torch.Tensor | None = None
    """``(B, S)`` log-probs as the sampler reported them."""
    has_sampling_logp: torch.Tensor | None = None
    """``(B,)`` bool: rows for which it reported some; the others are not corrected."""
    ref_logp: torch.Tensor | None = None
    """``(B, S)`` log-probs under the reference policy."""
    old_logp: torch.Tensor | None = None
    """``(B, S)`` log-probs under the policy that the update starts from."""
    top_entropy_mask: torch.Tensor | None = None
    """``(B, S)`` bool: tokens whose policy term counts, those with most entropy; None: all."""
    entropy: torch.Tensor | None = None
    """``(B, S)`` entropies under the policy being trained, with gradient; of a micro-batch."""
    origin_rank: torch.Tensor | None = None
    """``(B,)`` long: the rank whose batch each row was given in; None: this one's."""
    origin_row: torch.Tensor | None = None
    """``(B,)`` long: its place in the batch as it was given; None: where it is."""

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

    @property
    def trajectory_of_row(self) -> torch.Tensor:
        """``(B,)`` long: ``trajectory_ids``, or a number per row where there are none."""
        if self.trajectory_ids is None:
            return torch.arange(len(self), device=self.device)
        return self.trajectory_ids

    @property
    def row_as_given(self) -> torch.Tensor:
        """``(B,)`` long: ``origin_row``, or the row's own number where there is none."""
        if self.origin_row is None:
            return torch.arange(len(self), device=self.device)
        return self.origin_row

    @property
    def prompt_of_trajectory(self) -> torch.Tensor:
        """``(N,)`` long: the ``prompt_index`` of each trajectory's first row."""
        rows = torch.arange(len(self), device=self.device)
        count = int(self.trajectory_of_row.max()) + 1
        first_row = torch.full((count,), len(self), device=self.device)
        first_row = first_row.scatter_reduce(0, self.trajectory_of_row, rows, reduce="amin")
        return self.prompt_index[first_row]

    @property
    def counted(self) -> torch.Tensor:
        """``(B, S)`` bool: ``denominator_mask``, or ``loss_mask`` where there is none."""
        return self.loss_mask if self.denominator_mask is None else self.denominator_mask

    @property
    def shortest_row(self) -> torch.Tensor:
        """``(1,)`` long index of it: what dummy forwards run."""
        return self.lengths.argmin()[None]

    def select(self, rows: torch.Tensor) -> TrainBatch:
        """The given rows (a long index), every field trimmed to the longest of them."""
        removed = self.token_ids.shape[1] - int(self.lengths[rows].max())

        def trimmed(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 1:
                return tensor[rows]
            return tensor[rows, : tensor.shape[1] - removed]

        return self._map(trimmed)

    def of_trajectories(self, kept: torch.Tensor) -> TrainBatch:
        """The rows of some trajectories, which are numbered anew.

        Args:
            kept: ``(N,)`` bool, one of each trajectory. If none is kept, the batch is one row
                without actions, as every rank needs a row.
        """
        if bool(kept.all()):
            return self
        rows = kept[self.trajectory_of_row].nonzero().squeeze(1)
        nothing_left = not len(rows)
        if nothing_left:
            rows = self.shortest_row
        batch = self.select(rows)
        if nothing_left:
            nothing = torch.zeros_like(batch.action_mask)
            batch = replace(batch, action_mask=nothing, loss_mask=nothing, denominator_mask=None)
        trajectories, groups = batch.trajectory_ids, batch.group_ids
        return replace(
            batch,
            prompt_index=_counted(batch.prompt_index),
            trajectory_ids=None if trajectories is None else _counted(trajectories),
            group_ids=None if groups is None else _counted(groups),
            origin_row=self.row_as_given[rows],
        )

    def to(self, device: torch.device | str) -> TrainBatch:
        """The same batch on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> TrainBatch:
        return replace(self, **{name: function(value) for name, value in self.filled.items()})

    @property
    def filled(self) -> dict[str, torch.Tensor]:
        """The fields that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def followed_by(self, others: Sequence[TrainBatch]) -> TrainBatch:
        """The rows of this batch, then those of others, which have the same fields filled.

        Prompts, trajectories and groups of one batch are none of another's.
        """
        batches = (self, *others)

        def joined(name: str) -> torch.Tensor:
            parts = [batch.filled[name] for batch in batches]
            if name in ("prompt_index", "trajectory_ids", "group_ids"):
                parts = _counted_apart(parts)
            if parts[0].dim() == 1:
                return torch.cat(parts)
            return stack_rows(parts, -1 if name == "turn_ids" else 0)

        names = self.filled.keys()
        assert all(batch.filled.keys() == names for batch in others)
        return TrainBatch(**{name: joined(name) for name in names})


def _counted(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers without gaps: 0 for the smallest, and so on."""
    return numbers.unique(return_inverse=True)[1]


def _counted_apart(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Numbers without gaps, of which no two parts have the same."""
    counted = [_counted(numbers) for numbers in parts]
    firsts = itertools.accumulate((int(part.max()) + 1 for part in counted[:-1]), initial=0)
    return [numbers + first for numbers, first in zip(counted, firsts, strict=True)]


def stack_rows(
    tensors: Sequence[torch.Tensor] | torch.Tensor, pad_value: int | bool
) -> torch.Tensor:
    """Stack ``(G, T_i)`` or ``(T_i,)`` tensors of different widths into ``(B, T)``, right-padded.

    Args:
        tensors: The tensors; a single 2-D tensor is taken as rows.
        pad_value: Fills the right.
    """
    blocks = _blocks(tensors)
    width = max(block.shape[1] for block in blocks)
    return torch.cat(
        [torch.nn.functional.pad(b, (0, width - b.shape[1]), value=pad_value) for b in blocks]
    )


def _blocks(tensors: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    """One 2-D tensor per block of rows."""
    blocks = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return [block if block.dim() == 2 else block[None] for block in blocks]


def make_batch(
    completion_ids: Sequence[torch.Tensor] | torch.Tensor,
    action_masks: Sequence[torch.Tensor] | torch.Tensor,
    turn_ids: Sequence[torch.Tensor] | torch.Tensor | None = None,
    *,
    may_lack_actions: bool = False,
) -> TrainBatch:
    """Build a batch from what ``get_action`` or an environment returned.

    Args:
        completion_ids: ``(G, T_i)`` long tensors, prompt included, or one ``(B, T)`` tensor.
        action_masks: ``(G, T_i - 1)`` bool tensors, or one ``(B, T - 1)``.
        turn_ids: ``(B, T - 1)`` or a list; -1 outside actions.
        may_lack_actions: Take rows without any action: other ranks have some.

    Raises:
        ValueError: If shapes disagree, or no row has any action although one must.
    """
    ids, masks = _blocks(completion_ids), _blocks(action_masks)
    if len(ids) != len(masks):  # one of them is given as a single tensor
        ids, masks = [stack_rows(ids, 0)], [stack_rows(masks, False)]
    for i, (block, mask) in enumerate(zip(ids, masks, strict=True)):
        expected = (block.shape[0], block.shape[1] - 1)
        require(
            tuple(mask.shape) == expected,
            f"action_masks[{i}] has shape {tuple(mask.shape)}, but completion_ids[{i}] of shape "
            f"{tuple(block.shape)} needs {expected}: one position less than tokens, one row per "
            "completion",
        )
    token_ids, action_mask = stack_rows(ids, 0).long(), stack_rows(masks, False).bool()
    require(
        may_lack_actions or bool(action_mask.any()),
        "action_masks are False everywhere: there is no generated token to learn from",
    )
    positions = torch.arange(action_mask.shape[1], device=action_mask.device)
    last = torch.where(action_mask, positions, -1).amax(1)
    first = torch.where(action_mask, positions, action_mask.shape[1]).amin(1)
    # A row without actions keeps one position, so that its length is valid; its weight is zero.
    lengths = (last + 2).clamp(min=2)
    prompt_lengths = torch.minimum(first + 1, lengths - 1)
    return TrainBatch(
        token_ids=token_ids,
        action_mask=action_mask,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        prompt_index=_index_prompts(token_ids, prompt_lengths),
        loss_mask=action_mask,
        turn_ids=None if turn_ids is None else _stack_turns(turn_ids, action_mask),
    )


def _stack_turns(
    turn_ids: Sequence[torch.Tensor] | torch.Tensor, action_mask: torch.Tensor
) -> torch.Tensor:
    """``(B, S)`` long, -1 where no action."""
    turns = stack_rows(turn_ids, -1).long()
    require(
        turns.shape == action_mask.shape,
        f"turn_ids have shape {tuple(turns.shape)}; it must be {tuple(action_mask.shape)}, like "
        "that of action_masks",
    )
    require(
        not (turns[action_mask] < 0).any(),
        "turn_ids are negative at action positions; every generated token needs its turn's index",
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
