"""Completions stacked into training rows."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.llm.batch import TrainBatch, make_batch, stack_rows

T, F = True, False


def test_worked_example() -> None:
    batch = make_batch(
        [torch.tensor([[5, 6, 7, 2], [5, 6, 2, 0]])], [torch.tensor([[F, T, T], [F, T, F]])]
    )
    assert batch.token_ids.tolist() == [[5, 6, 7, 2], [5, 6, 2, 0]]
    assert batch.action_mask.tolist() == [[F, T, T], [F, T, F]]
    assert batch.lengths.tolist() == [4, 3]
    assert batch.prompt_lengths.tolist() == [2, 2]
    assert batch.prompt_index.tolist() == [0, 0]
    assert batch.targets.tolist() == [7, 2, 2]
    assert batch.turn_ids is None
    assert len(batch) == 2


def test_groups_of_different_widths_are_padded_on_the_right() -> None:
    batch = make_batch(
        [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6, 7]])],
        [torch.tensor([[F, T]]), torch.tensor([[T, T, T]])],
        [torch.tensor([[-1, 0]]), torch.tensor([[0, 0, 1]])],
    )
    assert batch.token_ids.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert batch.action_mask.tolist() == [[F, T, F], [T, T, T]]
    assert batch.turn_ids is not None
    assert batch.turn_ids.tolist() == [[-1, 0, -1], [0, 0, 1]]
    assert batch.lengths.tolist() == [3, 4]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.prompt_index.tolist() == [0, 1]


def test_rows_may_be_given_as_one_tensor_or_one_by_one() -> None:
    ids, mask = torch.tensor([[1, 2, 3], [1, 2, 4]]), torch.tensor([[F, T], [F, T]])
    whole, single = make_batch(ids, mask), make_batch(list(ids), list(mask))
    assert torch.equal(whole.token_ids, single.token_ids)
    assert torch.equal(whole.action_mask, single.action_mask)


def test_the_end_of_sequence_is_trained_when_it_is_also_the_pad_token() -> None:
    end = 2
    batch = make_batch(
        torch.tensor([[5, 6, 7, end], [5, 6, end, end]]), torch.tensor([[F, T, T], [F, T, F]])
    )
    assert batch.targets.tolist() == [7, end, end]
    assert batch.lengths.tolist() == [4, 3]  # the padding behind the sampled one does not count


def test_what_follows_the_last_action_is_outside_the_row() -> None:
    batch = make_batch(torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[F, T, F, F]]))
    assert batch.lengths.tolist() == [3]


def test_rows_of_one_prompt_are_recognised_wherever_they_stand() -> None:
    ids = torch.tensor([[1, 2, 9], [3, 2, 9], [1, 2, 8]])
    batch = make_batch(ids, torch.tensor([[F, T]] * 3))
    assert batch.prompt_index.tolist() == [0, 1, 0]
    # The same ids, but a longer prompt: nothing is shared that one of them did not generate.
    other = make_batch(torch.tensor([[1, 2, 9, 4]] * 2), torch.tensor([[F, T, T], [F, F, T]]))
    assert other.prompt_index.tolist() == [0, 1]


def test_rows_of_several_batches_are_those_of_each() -> None:
    ids, mask = torch.tensor([[1, 2, 3], [1, 2, 4]]), torch.tensor([[F, T], [F, T]])
    short = replace(make_batch(ids, mask, torch.where(mask, 0, -1)), advantages=mask * 0.5)
    ids, mask = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[F, T, T], [T, T, T]])
    long = replace(make_batch(ids, mask, torch.where(mask, 1, -1)), advantages=mask * 2.0)
    for batches in ((short, long), (long, short), (short, long, short)):
        joined = batches[0].followed_by(batches[1:])
        prompts: set[int] = set()
        for place, original in enumerate(batches):
            found = joined.select(torch.tensor([2 * place, 2 * place + 1]))
            assert not prompts & {*found.prompt_index.tolist()}
            prompts |= {*found.prompt_index.tolist()}
            found = replace(found, prompt_index=found.prompt_index - found.prompt_index.min())
            for field in fields(TrainBatch):
                value, expected = getattr(found, field.name), getattr(original, field.name)
                assert value is expected is None or torch.equal(value, expected), field.name


def test_a_row_without_actions_is_kept() -> None:
    batch = make_batch(torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[F, F], [F, T]]))
    assert batch.lengths.tolist() == [2, 3]
    assert batch.prompt_lengths.tolist() == [1, 2]
    assert batch.targets.tolist() == [3]


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=5),
    data=st.data(),
)
def test_selected_rows_are_the_rows_trimmed(
    rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    ids = [torch.arange(prompt + new) for prompt, new in rows]
    masks = [torch.arange(prompt + new - 1) >= prompt - 1 for prompt, new in rows]
    batch = make_batch(ids, masks, [torch.where(mask, 0, -1) for mask in masks])
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5))
    part = batch.select(torch.tensor(chosen))
    assert part.token_ids.shape[1] == max(sum(rows[i]) for i in chosen)
    for place, i in enumerate(chosen):
        length = sum(rows[i])
        assert part.lengths[place] == length
        assert part.prompt_lengths[place] == rows[i][0]
        assert torch.equal(part.token_ids[place, :length], ids[i])
        assert torch.equal(part.action_mask[place, : length - 1], masks[i])
    assert part.turn_ids is not None
    assert torch.equal(part.turn_ids, torch.where(part.action_mask, 0, -1))
    assert torch.equal(part.targets, torch.cat([ids[i][rows[i][0] :] for i in chosen]))


def test_stack_rows_pads_to_the_widest() -> None:
    assert stack_rows([torch.tensor([1]), torch.tensor([[2, 3]])], 9).tolist() == [[1, 9], [2, 3]]


def test_disagreeing_shapes_are_refused() -> None:
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"action_masks\[0\] has shape"):
        make_batch(ids, torch.tensor([[F, T, T]]))
    with pytest.raises(ValueError, match=r"action_masks\[0\] has shape"):
        make_batch(ids, torch.tensor([[F, T], [F, T]]))
    with pytest.raises(ValueError, match="turn_ids have shape"):
        make_batch(ids, torch.tensor([[F, T]]), torch.tensor([[0]]))


def test_blocks_whose_widths_disagree_are_refused_although_the_stacked_ones_would_agree() -> None:
    ids = [torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 3, 4]])]
    masks = [torch.tensor([[F, T, T]]), torch.tensor([[F, T]])]
    with pytest.raises(ValueError, match=r"action_masks\[0\] has shape \(1, 3\)"):
        make_batch(ids, masks)


def test_every_field_is_selected_and_trimmed() -> None:
    batch = make_batch(
        torch.tensor([[5, 6, 7, 2], [5, 6, 2, 0]]), torch.tensor([[F, T, T], [F, T, F]])
    )
    positions = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    rows = torch.tensor([7, 8])
    known = {"token_ids", "action_mask", "lengths", "prompt_lengths", "prompt_index", "loss_mask"}
    per_row = {"trajectory_ids", "sequence_weights", "has_sampling_logp"}
    names = {field.name for field in fields(batch)}
    filled = replace(
        batch,
        **dict.fromkeys(per_row, rows),
        **dict.fromkeys(names - known - per_row, positions),
    )
    part = filled.select(torch.tensor([1]))
    assert part.token_ids.tolist() == [[5, 6, 2]]
    assert part.loss_mask.tolist() == [[F, T]]
    assert all(getattr(part, name).tolist() == [8] for name in per_row)
    assert all(getattr(part, name).tolist() == [[4.0, 5.0]] for name in names - known - per_row)


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(ValueError, match="False everywhere"):
        make_batch(torch.tensor([[1, 2, 3]]), torch.tensor([[F, F]]))


def test_an_action_without_a_turn_is_refused() -> None:
    with pytest.raises(ValueError, match="turn_ids are negative"):
        make_batch(torch.tensor([[1, 2, 3]]), torch.tensor([[F, T]]), torch.tensor([[0, -1]]))
