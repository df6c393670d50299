"""Rows of an optimizer step dealt to the ranks anew, so that each has about as many tokens to run.

Ranks wait for each other at every step, so the one with the longest completions would decide how
long all of them take. Which rows a step has, over all ranks, stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch

from agilerl.checks import require
from agilerl.distributed import Ranks
from agilerl.llm.batch import TrainBatch
from agilerl.llm.forward.packed_rows import row_tokens

LEAST_GAIN = 0.05
"""Rows are moved if that lowers the largest number of tokens of a rank by more than this share."""

StepRows = tuple[torch.Tensor, torch.Tensor]
"""Long indices of a rank's rows that are run in a step: with a gradient, and without one."""


@dataclass(frozen=True)
class Trajectory:
    """What a rank runs of a trajectory."""

    prompt: int
    """The number of its first row's prompt: the trajectories of a group have the same."""
    rows: list[int] = field(default_factory=list)
    """Their places in the rank's batch."""
    row_tokens: list[tuple[int, int, int]] = field(default_factory=list)
    """As :func:`agilerl.llm.forward.packed_rows.row_tokens` gives them."""


@dataclass(frozen=True)
class _Bundle:
    """Trajectories that stay together."""

    rank: int
    """Where they are."""
    places: list[int]
    """Of the trajectories in that rank's list."""
    rows_of_prompt: dict[tuple[int, int, int], int]
    """Rows with each prompt: of a rank, with a number there, and of so many tokens."""
    other_tokens: int

    @classmethod
    def of(cls, rank: int, places: list[int], held: Sequence[Trajectory]) -> _Bundle:
        rows = [row for place in places for row in held[place].row_tokens]
        prompts = Counter((rank, number, tokens) for number, tokens, _ in rows)
        return cls(rank, places, prompts, sum(others for *_, others in rows))


class _Load:
    """What a rank has to run.

    Args:
        rows_together: A prompt runs once for so many of its completions; None: for all.
    """

    def __init__(self, rows_together: int | None) -> None:
        self.tokens = 0
        self._rows_together = rows_together
        self._rows_of_prompt: Counter[tuple[int, int, int]] = Counter()

    def with_added(self, bundle: _Bundle) -> int:
        """Tokens, had it a bundle more."""
        prompts = 0
        for prompt, rows in bundle.rows_of_prompt.items():
            before = self._rows_of_prompt[prompt]
            prompts += prompt[2] * (self._runs(before + rows) - self._runs(before))
        return self.tokens + bundle.other_tokens + prompts

    def _runs(self, rows: int) -> int:
        return min(rows, 1) if self._rows_together is None else -(-rows // self._rows_together)

    def add(self, bundle: _Bundle) -> None:
        self.tokens = self.with_added(bundle)
        self._rows_of_prompt.update(bundle.rows_of_prompt)


def deal_to_ranks(
    held: Sequence[Sequence[Trajectory]], rows_together: int | None
) -> list[list[int]]:
    """The rank that each trajectory of an optimizer step is trained on.

    Groups, the one with most tokens first, each go to the rank that then has fewest; a group with
    more than an even share goes trajectory by trajectory. Everything stays where it is unless that
    lowers the largest number of tokens of a rank by more than ``LEAST_GAIN``.

    Args:
        held: The trajectories of each rank.
        rows_together: How many completions of a prompt run together; None: all.

    Returns:
        As ``held``, a rank for each trajectory; a function of ``held``, so the same on all ranks.
    """

    def tokens(bundle: _Bundle) -> int:
        return _Load(rows_together).with_added(bundle)

    stay = [[rank] * len(own) for rank, own in enumerate(held)]
    now = [tokens(_Bundle.of(rank, [*range(len(own))], own)) for rank, own in enumerate(held)]
    even, most = sum(now) / len(held), (1 - LEAST_GAIN) * max(now)
    if even >= most:
        return stay
    bundles: list[_Bundle] = []
    for rank, own in enumerate(held):
        for places in _groups(own):
            group = _Bundle.of(rank, places, own)
            apart = [_Bundle.of(rank, [place], own) for place in places]
            bundles += [group] if tokens(group) <= even else apart
    loads, dealt = [_Load(rows_together) for _ in held], [list(ranks) for ranks in stay]
    for bundle in sorted(bundles, key=lambda each: -tokens(each)):
        after = [
            (load.with_added(bundle), rank != bundle.rank, rank) for rank, load in enumerate(loads)
        ]
        *_, chosen = min(after)
        loads[chosen].add(bundle)
        for place in bundle.places:
            dealt[bundle.rank][place] = chosen
    return dealt if max(load.tokens for load in loads) < most else stay


def _groups(own: Sequence[Trajectory]) -> list[list[int]]:
    """The places of each group's trajectories."""
    groups: dict[int, list[int]] = {}
    for place, trajectory in enumerate(own):
        groups.setdefault(trajectory.prompt, []).append(place)
    return list(groups.values())


def balance_over_ranks(
    batch: TrainBatch,
    steps: Sequence[StepRows],
    ranks: Ranks,
    rows_together: int | None,
) -> tuple[TrainBatch, list[StepRows]]:
    """Exchange rows among ranks, so that all have about equal numbers of tokens in each step.

    Args:
        batch: This rank's rows.
        steps: Those of them that are run in each optimizer step; a trajectory is in one step.
        ranks: The processes that step together, which must all call this, with packed rows.
        rows_together: How many rows run together, on each rank; None: as many as there are.

    Returns:
        The batch, with rows of other ranks behind its own, and the rows that this rank runs in each
        step. Rows that it gave away are in the batch still.

    Raises:
        ValueError: If ranks know different things of their rows; on all of them.
    """
    # Rows without a gradient run once, the others several times: each kind is dealt by itself.
    parts = [part for step in steps for part in step]
    prompts = batch.prompt_of_trajectory
    own = [_trajectories(batch, prompts, part) for part in parts]
    fields, held = zip(*ranks.gather(([*_with_origin(batch, ranks.rank).filled], own)), strict=True)
    _check_fields(fields)
    dealt = [deal_to_ranks(of_ranks, rows_together) for of_ranks in zip(*held, strict=True)]
    moves = any({*chosen} - {rank} for part in dealt for rank, chosen in enumerate(part))
    if not moves:
        return batch, list(steps)
    target = torch.full((len(batch),), ranks.rank)
    for trajectories, of_ranks in zip(own, dealt, strict=True):
        for trajectory, rank in zip(trajectories, of_ranks[ranks.rank], strict=True):
            target[trajectory.rows] = rank
    batch, parts = _exchanged(batch, parts, target.to(batch.device), ranks)
    return batch, list(zip(parts[::2], parts[1::2], strict=True))


def _check_fields(of_ranks: Sequence[Collection[str]]) -> None:
    """Rows of ranks that know different things of them cannot be in one batch."""
    for rank, names in enumerate(of_ranks):
        differing = {*names} ^ {*of_ranks[0]}
        require(
            not differing,
            f"use_sequence_packing deals rows to other ranks, but of {sorted(differing)} learn was "
            f"given or computed some on one of ranks 0 and {rank} only; call it alike on all ranks",
        )


def _trajectories(
    batch: TrainBatch, prompt_of_trajectory: torch.Tensor, rows: torch.Tensor
) -> list[Trajectory]:
    """What is run of each trajectory, where the given rows are run."""
    found: dict[int, Trajectory] = {}
    numbers = batch.trajectory_of_row[rows]
    prompts = prompt_of_trajectory[numbers]
    columns = (rows.tolist(), numbers.tolist(), prompts.tolist(), row_tokens(batch, rows))
    for row, number, prompt, tokens in zip(*columns, strict=True):
        trajectory = found.setdefault(number, Trajectory(prompt))
        trajectory.rows.append(row)
        trajectory.row_tokens.append(tokens)
    return list(found.values())


def _exchanged(
    batch: TrainBatch, parts: Sequence[torch.Tensor], target: torch.Tensor, ranks: Ranks
) -> tuple[TrainBatch, list[torch.Tensor]]:
    """Send each row to its rank; see :func:`balance_over_ranks`.

    Args:
        batch: This rank's rows.
        parts: Those that are run, in parts that the ranks have alike.
        target: ``(B,)`` long, the rank where each is run.
        ranks: The processes.
    """
    batch = _with_origin(batch, ranks.rank)
    sent: list[tuple[TrainBatch, list[int]] | None] = [None] * ranks.world_size
    for rank in range(ranks.world_size):
        leaving = [part[target[part] == rank] for part in parts]
        rows = torch.cat(leaving)
        if rank != ranks.rank and len(rows):
            sent[rank] = batch.select(rows).to("cpu"), [len(each) for each in leaving]
    parts = [part[target[part] == ranks.rank] for part in parts]
    parcels = [parcel for parcel in ranks.exchange(sent) if parcel is not None]
    place = len(batch)
    for received, sizes in parcels:
        places = torch.arange(place, place + len(received), device=batch.device)
        parts = [torch.cat(both) for both in zip(parts, places.split(sizes), strict=True)]
        place += len(received)
    return batch.followed_by([rows.to(batch.device) for rows, _ in parcels]), parts


def _with_origin(batch: TrainBatch, rank: int) -> TrainBatch:
    """The batch with where its rows come from, and with fields that only some ranks may have."""
    weights = batch.sequence_weights
    return replace(
        batch,
        denominator_mask=batch.counted,
        trajectory_ids=batch.trajectory_of_row,
        sequence_weights=batch.counted.any(1).double() if weights is None else weights,
        origin_rank=torch.full((len(batch),), rank, device=batch.device),
        origin_row=batch.row_as_given,
    )
