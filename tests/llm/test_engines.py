"""What engines do with parameters, gradients and states; several ranks: tests/distributed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from agilerl.distributed import Ranks, mean_and_std
from agilerl.llm.config import LRSchedule
from agilerl.llm.engine.all_reduce import AllReduceEngine
from agilerl.llm.engine.local import LocalEngine, set_learning_rate

SCHEDULE = LRSchedule("cosine", 10, warmup=2)


def trained_engine(value: float = 1.0) -> tuple[nn.Parameter, LocalEngine]:
    """One parameter, one step."""
    parameter = nn.Parameter(torch.tensor([value, 2.0]))
    engine = LocalEngine([parameter], 0.1)
    engine.backward((parameter * torch.tensor([1.0, -2.0])).sum())
    engine.step(1e9)
    return parameter, engine


def test_a_loaded_state_is_a_copy() -> None:
    _, source = trained_engine()
    saved = source.state_dict()
    before = copy.deepcopy(saved["optimizer"]["state"][0])
    parameter, engine = trained_engine(3.0)
    engine.load_state_dict(saved)
    engine.backward(parameter.sum())
    engine.step(1e9)
    for name, value in before.items():
        assert torch.equal(saved["optimizer"]["state"][0][name], value)


def test_summed_gradients_are_clipped_and_unused_parameters_are_left_alone() -> None:
    used, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))
    engine = AllReduceEngine([used, unused], 0.1, None, Ranks())
    engine.backward(3.0 * used.sum())
    assert engine.step(1e9) == pytest.approx(6.0)
    assert list(engine.optimizer.state) == [used]
    assert torch.equal(unused, torch.ones(3))
    assert used.grad is None


@pytest.mark.parametrize("cls", [LocalEngine, AllReduceEngine])
def test_a_loss_scale_is_undone_at_the_step_and_lasts_until_then(cls: type[LocalEngine]) -> None:
    found = []
    for scale in (1.0, 2.0**10):
        parameter = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float16).float())
        engine = cls([parameter], 0.1, None, *[Ranks()] * (cls is AllReduceEngine))
        engine.loss_scale = scale
        for _ in range(2):  # accumulated
            engine.backward((parameter.half() * 2.0**-30).float().sum())
        found.append((engine.step(1e9), parameter.detach()))
        assert engine.loss_scale == 1.0
    assert found[0][0] == 0.0, "float16 has no such small numbers"
    assert found[1][0] == pytest.approx(2 * 2**0.5 * 2.0**-30)


@pytest.mark.parametrize("values", [[], [2.0], [1.0, 2.0, 4.0]])
def test_mean_and_std_are_unbiased(values: list[float]) -> None:
    tensor = torch.tensor(values)
    count, mean, std = mean_and_std(tensor, Ranks())
    assert count == len(values)
    assert mean == pytest.approx(float(tensor.mean()) if values else 0.0)
    assert std == pytest.approx(float(tensor.std()) if len(values) > 1 else 0.0)


@pytest.mark.parametrize("saved_schedule", [None, SCHEDULE])
@pytest.mark.parametrize("live_schedule", [None, SCHEDULE])
def test_the_live_learning_rate_is_kept_whatever_was_saved(
    saved_schedule: LRSchedule | None, live_schedule: LRSchedule | None
) -> None:
    source = LocalEngine([nn.Parameter(torch.ones(2))], 0.1, saved_schedule)
    for _ in range(3):
        source.advance_schedule()
    engine = LocalEngine([nn.Parameter(torch.ones(2))], 0.02, live_schedule)
    start = engine.optimizer.param_groups[0]["lr"]
    engine.load_state_dict(source.state_dict(), keep_lr=True)
    (group,) = engine.optimizer.param_groups
    if live_schedule is None:
        assert group["lr"] == 0.02 and "initial_lr" not in group
        return
    # A saved place in the schedule is taken over; else the engine stays where it is: warming up.
    reached = source.optimizer.param_groups[0]["lr"] / 0.1 * 0.02
    assert group["lr"] == (start if saved_schedule is None else pytest.approx(reached))
    assert group["initial_lr"] == 0.02 and start == pytest.approx(0.01)
    engine.advance_schedule()
    (group,) = engine.optimizer.param_groups
    position = 1 if saved_schedule is None else 4
    other = LocalEngine([nn.Parameter(torch.ones(2))], 0.02, live_schedule)
    for _ in range(position):
        other.advance_schedule()
    assert group["lr"] == pytest.approx(other.optimizer.param_groups[0]["lr"])


def rates(engine: LocalEngine) -> tuple[float, float | None]:
    (group,) = engine.optimizer.param_groups
    return group["lr"], group.get("initial_lr")


@pytest.mark.parametrize("schedule", [None, SCHEDULE])
def test_restored_rates_go_on_as_those_of_the_state(
    schedule: LRSchedule | None,
) -> None:
    """The optimizer's own rate, and which rate is still to be taken over."""
    source = LocalEngine([nn.Parameter(torch.ones(2))], 0.1, schedule)
    for _ in range(3):
        source.advance_schedule()
    set_learning_rate(source.optimizer, 0.03)
    engine = LocalEngine([nn.Parameter(torch.ones(2))], 0.07, schedule)
    engine.load_state_dict(source.state_dict())
    assert rates(engine) == rates(source)
    for lr in (0.1, 0.1, 0.07):  # it is the rate in force already; then another
        for each in (source, engine):
            each.set_lr(lr)
            each.advance_schedule()
        assert rates(engine) == rates(source)
    assert engine.lrs == [0.07]


def test_rates_of_a_state_that_does_not_say_which_was_taken_over() -> None:
    source = LocalEngine([nn.Parameter(torch.ones(2))], 0.1, SCHEDULE)
    source.advance_schedule()
    state = source.state_dict()
    del state["lr"]
    engine = LocalEngine([nn.Parameter(torch.ones(2))], 0.02, SCHEDULE)
    engine.load_state_dict(state)
    assert (rates(engine), engine.lrs) == (rates(source), [0.1])


@pytest.mark.parametrize(("live", "saved"), [(None, SCHEDULE), (SCHEDULE, None)])
def test_rates_under_another_kind_of_schedule_are_not_restored(
    live: LRSchedule | None, saved: LRSchedule | None
) -> None:
    engine = LocalEngine([nn.Parameter(torch.ones(2))], 0.02, live)
    before = rates(engine)
    state = LocalEngine([nn.Parameter(torch.ones(2))], 0.1, saved).state_dict()
    engine.load_state_dict(state)
    assert (rates(engine), engine.lrs) == (before, [0.02])


def test_a_rate_set_on_the_optimizer_is_the_peak_of_the_schedule_from_then_on() -> None:
    engine = LocalEngine([nn.Parameter(torch.ones(2))], 0.1, SCHEDULE)
    other = LocalEngine([nn.Parameter(torch.ones(2))], 0.03, SCHEDULE)
    set_learning_rate(engine.optimizer, 0.03)
    assert engine.optimizer.param_groups[0]["lr"] == 0.03
    for _ in range(5):
        for each in (engine, other):
            each.set_lr(each.lrs)
            each.advance_schedule()
        assert rates(engine) == rates(other)
