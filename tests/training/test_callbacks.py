"""When callbacks are called and with what, how they end a run, and what their failures cost."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forking import on_two_ranks
from resume_helpers import (
    After,
    checkpoints_in,
    differences,
    everything,
    make_agents,
    reseed,
    run_multiturn,
    run_reasoning,
    seed_all,
    state_of,
)
from training_fakes import FakeAgent, FakeGym

from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.distributed import Ranks
from agilerl.training.callbacks import (
    Callback,
    EarlyStopping,
    HyperparameterSchedule,
    PrintMetrics,
    RunProgress,
    StopAtFitness,
    linear,
)
from agilerl.training.callbacks.runner import CallbackRunner
from agilerl.training.train_llm import finetune_llm_reasoning


def train(
    agent: FakeAgent, *callbacks: Callback, env: FakeGym | None = None, **options: Any
) -> FakeAgent:
    settings = {"evaluation_interval": 1, "verbose": False, "checkpoint_path": "c"} | options
    finetune_llm_reasoning([agent], env or FakeGym(rows=200), callbacks=callbacks, **settings)
    return agent


class Record(Callback):
    """Keeps the name of every call and what it was given."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, RunProgress]] = []

    def names(self) -> list[str]:
        return [f"{name} {progress.iteration}" for name, progress in self._calls]

    def on_start(self, progress: RunProgress) -> None:
        self._calls.append(("start", progress))

    def on_iteration_start(self, progress: RunProgress) -> None:
        self._calls.append(("next", progress))

    def on_iteration(self, progress: RunProgress) -> None:
        self._calls.append(("iteration", progress))

    def on_evaluation(self, progress: RunProgress) -> None:
        self._calls.append(("evaluation", progress))

    def on_checkpoint(self, progress: RunProgress) -> None:
        self._calls.append(("checkpoint", progress))

    def on_end(self, progress: RunProgress) -> None:
        self._calls.append(("end", progress))


class At(Callback):
    """Does something in one method after one iteration."""

    def __init__(self, method: str, iteration: int, action: Callable[[RunProgress], None]) -> None:
        def act(progress: RunProgress) -> None:
            if progress.iteration == iteration:
                action(progress)

        setattr(self, method, act)


def stop(progress: RunProgress) -> None:
    progress.stop("enough")


def fail(progress: RunProgress) -> None:
    raise ZeroDivisionError("in my callback")


def test_the_order_of_the_calls() -> None:
    record = Record()
    agent = train(FakeAgent(), record, max_steps=6, evaluation_interval=2, checkpoint_steps=2)
    assert record.names() == [
        *("start 0", "evaluation 0", "next 0", "iteration 1", "next 1", "iteration 2"),
        *("evaluation 2", "checkpoint 2", "next 2", "iteration 3", "evaluation 3"),
        *("checkpoint 3", "end 3"),
    ]
    given = dict(zip(record.names(), (progress for _, progress in record._calls), strict=True))
    (row,) = given["iteration 2"].rows
    assert (row["iteration"], row["steps"], row["reward_mean"]) == (2, 4, 0.5)
    assert "fitness" not in row
    assert given["evaluation 2"].rows[0]["fitness"] == agent.fitness[1]
    assert given["checkpoint 2"].checkpoint == Path("c/iteration_00000002")
    assert given["checkpoint 2"].directory == Path("c")
    assert given["end 3"].agents == [agent]
    assert (given["end 3"].stopped_by, given["end 3"].is_main_process) == (None, True)
    times = [progress.wall_seconds for _, progress in record._calls]
    assert times == sorted(times)


def test_a_callback_cannot_change_the_rows_of_others() -> None:
    class Clear(Callback):
        def on_iteration(self, progress: RunProgress) -> None:
            progress.rows[0].clear()

    record = Record()
    train(FakeAgent(), Clear(), record, max_steps=2)
    assert record._calls[3][1].rows[0]["reward_mean"] == 0.5
    assert "0.5" in Path("c/metrics.csv").read_text()


@pytest.mark.parametrize("method", ["on_iteration", "on_evaluation", "on_checkpoint"])
def test_a_callback_ends_the_run(
    method: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluated and saved as at a bound."""
    record = Record()
    with caplog.at_level(logging.INFO):
        agent = train(
            FakeAgent(),
            At(method, 4, stop),
            record,
            evaluation_interval=4 if method == "on_evaluation" else 100,
            checkpoint_steps=2,
        )
    iterations = 5 if method == "on_checkpoint" else 4
    assert len(agent.learned) == iterations
    assert agent.steps == [0, 2 * iterations]
    assert checkpoints_in(Path("c"))[-1] == f"iteration_{iterations:08d}"
    assert record.names()[-1] == f"end {iterations}"
    assert record._calls[-1][1].stopped_by == "At: enough"
    message = f"Stopped after iteration {iterations}. At: enough"
    assert message in caplog.messages
    assert message in capsys.readouterr().out


def test_what_was_said_first_counts() -> None:
    def stop_twice(progress: RunProgress) -> None:
        progress.stop("first")
        progress.stop("second")

    record = Record()
    train(FakeAgent(), At("on_iteration", 1, stop_twice), At("on_iteration", 1, stop), record)
    assert record._calls[-1][1].stopped_by == "At: first"


def test_a_run_is_ended_before_it_begins() -> None:
    agent = train(FakeAgent(), At("on_start", 0, stop))
    assert (len(agent.learned), len(agent.fitness)) == (0, 1)


def test_a_signal_ends_the_calls_too() -> None:
    record = Record()
    agent = FakeAgent(on_learn=lambda agent: os.kill(os.getpid(), signal.SIGINT))
    train(agent, record)
    assert record.names()[-3:] == ["iteration 1", "checkpoint 1", "end 1"]
    end = record._calls[-1][1]
    assert (end.stopped_by, end.checkpoint) == ("SIGINT", Path("c/iteration_00000001"))


def test_a_signal_while_the_end_is_saved() -> None:
    record = Record()
    agent = FakeAgent(on_save=lambda agent: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        train(agent, record, max_steps=4, checkpoint_steps=99)
    assert caught.value.code == 143
    assert record.names()[-2:] == ["checkpoint 2", "end 2"]
    assert record._calls[-1][1].stopped_by == "SIGTERM"


def sigterm(progress: RunProgress) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("checkpoint_steps", [None, 1])
def test_sigterm_in_the_last_call_ends_the_program(checkpoint_steps: int | None) -> None:
    with pytest.raises(SystemExit) as caught:
        train(FakeAgent(), At("on_end", 2, sigterm), max_steps=4, checkpoint_steps=checkpoint_steps)
    assert caught.value.code == 143
    assert checkpoints_in(Path("c"))[-1] == "iteration_00000002"


@pytest.mark.parametrize("method", ["on_iteration", "on_evaluation", "on_checkpoint"])
def test_a_failing_callback_costs_nothing(method: str, tmp_path: Path) -> None:
    """It is named, the run is saved, and resumed as if nothing had happened."""
    seed_all()
    whole = everything(tmp_path / "whole", run_reasoning(tmp_path / "whole"))
    run = tmp_path / "run"
    seed_all()
    with pytest.raises(ZeroDivisionError) as caught:
        run_reasoning(run, callbacks=[At(method, 2, fail)])
    assert caught.value.__notes__ == [
        f"It was raised by {method} of the callback At().",
        f"The run was saved after iteration 2: resume_from='{run}/iteration_00000002'",
    ]
    reseed()
    pop = run_reasoning(run, resume_from=run)
    assert differences(everything(run, pop), whole) == []


def test_others_are_told_where_a_failing_callback_left_the_run() -> None:
    record, failing = Record(), Record()
    failing.on_iteration = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        train(FakeAgent(), record, failing)
    assert record.names()[-2:] == ["iteration 1", "checkpoint 1"]
    assert record._calls[-1][1].checkpoint == Path("c/iteration_00000001")
    assert failing.names() == ["start 0", "evaluation 0", "next 0"]


@pytest.mark.parametrize("code", [3, None, "no more"])
def test_a_callback_that_exits_the_program(code: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """After the run is saved, as it is for exceptions."""
    with pytest.raises(SystemExit) as caught:
        train(FakeAgent(), At("on_iteration", 2, lambda progress: sys.exit(code)))
    assert caught.value.code == code
    assert checkpoints_in(Path("c"))[-1] == "iteration_00000002"
    printed = capsys.readouterr().out
    assert "saved after iteration 2: resume_from='c/iteration_00000002'" in printed
    with pytest.raises(SystemExit):
        train(FakeAgent(), At("on_start", 0, lambda progress: sys.exit(code)))


def test_a_failure_in_a_resumed_run_before_it_goes_on(tmp_path: Path) -> None:
    """Its checkpoint stays."""
    run_reasoning(tmp_path, max_steps=2)
    before = checkpoints_in(tmp_path)
    for method in ("on_start", "on_iteration_start"):
        with pytest.raises(ZeroDivisionError):
            run_reasoning(tmp_path, resume_from=tmp_path, callbacks=[At(method, 1, fail)])
        assert checkpoints_in(tmp_path) == before


def test_what_a_method_returns_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """As stable-baselines3's callbacks end a run with it."""

    class Returns(Callback):
        def on_iteration(self, progress: RunProgress) -> bool:
            return False

    agent = train(FakeAgent(), Returns(), max_steps=6)
    assert len(agent.learned) == 3
    (said,) = [each for each in caplog.messages if "returned" in each]
    assert said.startswith("on_iteration of the callback Returns() returned False")
    assert "progress.stop(reason)" in said


class BadState(Callback):
    """Its state cannot be saved from its third iteration on; ``then`` is done there."""

    def __init__(self, bad: Callable[[], Any], then: Callable[[RunProgress], None]) -> None:
        self._bad, self._then, self._count = bad, then, 0

    def on_iteration(self, progress: RunProgress) -> None:
        self._count = progress.iteration
        if progress.iteration == 3:
            self._then(progress)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count if self._count < 3 else self._bad()}


def raising() -> None:
    raise OSError("no room in my callback")


@pytest.mark.parametrize(
    ("bad", "error"), [(lambda: np.float32(0.5), TypeError), (raising, OSError)]
)
@pytest.mark.parametrize(
    ("then", "options"),
    [
        (sigterm, {"evaluation_interval": 100}),
        (sigterm, {"evaluation_interval": 100, "checkpoint_steps": 1}),
        (lambda progress: None, {"evaluation_interval": 100, "checkpoint_steps": 3}),
        (lambda progress: None, {"evaluation_interval": 3}),
        (lambda progress: None, {"max_steps": 6, "checkpoint_steps": 100}),
        (stop, {"evaluation_interval": 100, "checkpoint_steps": 100}),
    ],
)
def test_a_state_that_cannot_be_saved_costs_nothing(
    then: Callable[[RunProgress], None],
    options: dict[str, Any],
    bad: Callable[[], Any],
    error: type[Exception],
) -> None:
    """It is named, and the run saved with the state before it."""
    with pytest.raises(error) as caught:
        train(FakeAgent(), BadState(bad, then), **({"max_steps": 40} | options))
    assert "raised by state_dict of the callback BadState()" in caught.value.__notes__[0]
    where = "c/iteration_00000003"
    assert f"saved after iteration 3: resume_from='{where}'" in caught.value.__notes__[-1]
    before = 2 if options.get("checkpoint_steps") == 1 else 0
    if "max_steps" in options:  # every iteration is evaluated
        before = 2
    assert state_of(Path(where))["callbacks"] == [{"name": "BadState", "state": {"count": before}}]


def test_a_state_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    class Unloadable(Callback):
        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            raise KeyError("gone")

    def run(**options: Any) -> None:
        run_reasoning(tmp_path, pop=make_agents(1), callbacks=[Unloadable()], **options)

    run(max_steps=2)
    with pytest.raises(KeyError, match="gone") as caught:
        run(resume_from=tmp_path)
    assert "load_state_dict of the callback Unloadable()" in caught.value.__notes__[0]


def test_a_callback_that_fails_before_training() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        train(FakeAgent(), At("on_start", 0, fail))
    assert "Nothing was trained yet" in caught.value.__notes__[1]


def test_a_callback_that_fails_at_the_end() -> None:
    agent = FakeAgent()
    with pytest.raises(ZeroDivisionError) as caught:
        train(agent, At("on_end", 2, fail), max_steps=4)
    assert (
        "saved after iteration 2: resume_from='c/iteration_00000002'" in caught.value.__notes__[1]
    )


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "settings", "stopped_at"),
    [
        ((0.1, 0.2, 0.2, 0.1), {"patience": 2}, 3),
        ((0.1, 0.2, 0.2, 0.3, 0.3), {"patience": 2}, None),
        ((0.1, 0.15, 0.2, 0.25), {"patience": 1, "min_delta": 0.1}, 1),
        ((0.1, 0.15, 0.25), {"patience": 2, "min_delta": 0.1}, None),
        ((0.1, NAN, NAN), {"patience": 2}, 2),
        ((-3.0, -2.0, -2.5), {"patience": 1}, 2),
    ],
)
def test_early_stopping(
    values: tuple[float, ...], settings: dict[str, Any], stopped_at: int | None
) -> None:
    """The better of two agents counts."""
    callback = EarlyStopping(**settings)
    asked: list[int] = []
    for number, value in enumerate(values):
        rows = [{"fitness": -9.0}, {"fitness": value}]
        ask = partial(lambda number, reason: asked.append(number), number)
        callback.on_iteration(RunProgress(number, 0.0, [], rows, Path(), _stop=ask))
        callback.on_evaluation(RunProgress(number, 0.0, [], rows, Path(), _stop=ask))
    assert asked[:1] == ([] if stopped_at is None else [stopped_at])


def test_early_stopping_says_why() -> None:
    agent = FakeAgent(skill=[1, 3, 2, 2, 2, 2])
    record = Record()
    train(agent, EarlyStopping(2), record)
    assert agent.fitness == pytest.approx([1 / 3, 1, 2 / 3, 2 / 3])
    reason = "EarlyStopping: fitness has not risen above 1 for 2 evaluations"
    assert record._calls[-1][1].stopped_by == reason


@pytest.mark.parametrize(
    ("values", "settings", "reason"),
    [
        ((0.5, 0.55), {"min_delta": 0.1}, "has not risen by more than 0.1 above 0.5 for 1 "),
        ((0.5, 0.4), {}, "has not risen above 0.5 for 1 "),
        ((NAN, NAN), {}, "has been nan in 2 "),
    ],
)
@pytest.mark.parametrize("metric", ["pass@2/hard", "reward_mean"])
def test_early_stopping_says_what_is_true(
    metric: str, values: tuple[float, ...], settings: dict[str, Any], reason: str
) -> None:
    """Columns of training are judged in every iteration, those of evaluations in evaluations."""
    callback, asked = EarlyStopping(1, metric=metric, **settings), []
    for value in values:
        progress = RunProgress(1, 0.0, [], [{metric: value}], Path(), _stop=asked.append)
        method = "on_evaluation" if "@" in metric else "on_iteration"
        getattr(callback, method)(progress)
    what = "evaluations" if "@" in metric else "iterations"
    assert asked == [f"{metric} {reason}{what}"]


@pytest.mark.parametrize("make", [EarlyStopping, partial(StopAtFitness, 0.4)])
def test_without_evaluations(make: Callable[..., Callback]) -> None:
    """A column of training is judged in every iteration; one of evaluations is refused."""
    env = FakeGym(rows=200)
    env.has_test_rows = False  # type: ignore[attr-defined]
    settings = {"patience": 2} if make is EarlyStopping else {}
    agent = train(FakeAgent(), make(metric="reward_mean", **settings), env=env)
    assert len(agent.learned) == (3 if make is EarlyStopping else 1)
    for metric in ("fitness", "eval_accuracy/hard", "pass@8"):
        with pytest.raises(ValueError, match=f"metric='{metric}' is a column of evaluations, but"):
            train(FakeAgent(), make(metric=metric), env=env)


def test_an_iteration_without_the_column() -> None:
    """Such as one whose completions all failed: no improvement, and no error."""
    callback, asked = EarlyStopping(1, metric="reward_mean"), []
    for row in ({"reward_mean": 0.5}, {"agent": 0}):
        callback.on_iteration(RunProgress(1, 0.0, [], [row], Path(), _stop=asked.append))
    assert len(asked) == 1


def test_early_stopping_goes_on_counting_in_a_resumed_run(tmp_path: Path) -> None:
    """And a run that it ended stays ended, until there is more patience."""

    def run(**options: Any) -> Any:
        pop = make_agents(1)
        callbacks = [EarlyStopping(options.pop("patience", 3), min_delta=10.0)]
        options = {"max_steps": 100, "evaluation_interval": 1} | options
        return run_reasoning(tmp_path, pop=pop, callbacks=callbacks, **options)[0]

    run(max_steps=3)  # two iterations
    assert len(run(resume_from=tmp_path).scores) == 3
    assert len(run(resume_from=tmp_path).scores) == 3
    assert len(run(resume_from=tmp_path, patience=5).scores) == 5


@pytest.mark.parametrize(
    "callback", [EarlyStopping(2), StopAtFitness(0.6)], ids=["EarlyStopping", "StopAtFitness"]
)
def test_a_callback_that_an_earlier_run_used(callback: Callback) -> None:
    """Also one that resumed a run, whose state does not count for the next."""
    skill = [0, 1, 2, 2, 2, 2]
    iterations = []
    for _ in range(2):
        iterations.append(len(train(FakeAgent(skill=skill), callback, max_steps=40).learned))
        loaded = callback.state_dict()
    assert iterations == ([4, 4] if isinstance(callback, EarlyStopping) else [2, 2])
    callback.load_state_dict(loaded)
    for stopped in (True, False):
        asked: list[str] = []
        callback.on_start(RunProgress(0, 0.0, [], [], Path(), _stop=asked.append))
        assert bool(asked) == stopped


class CountPrompts(Callback):
    """Asks in ``on_iteration`` alone; its count is public, though no setting."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0

    def on_iteration(self, progress: RunProgress) -> None:
        self.count = int(progress.rows[0]["steps"])
        if self.count >= self.most:
            progress.stop(f"{self.count} prompts")


def test_a_run_that_any_callback_ended_stays_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With others beside it, too; it goes on without it, or with other settings."""
    caplog.set_level(logging.INFO)

    def iterations(*callbacks: Callback, **options: Any) -> int:
        options = {"max_steps": 8} | options
        pop = run_reasoning(tmp_path, pop=make_agents(1), callbacks=callbacks, **options)
        return len(pop[0].scores)

    assert iterations(CountPrompts(3)) == 2
    assert iterations(CountPrompts(3), resume_from=tmp_path) == 2
    assert iterations(Record(), CountPrompts(3), resume_from=tmp_path) == 2
    said = "Stopped after iteration 2. CountPrompts: 4 prompts. To go on, leave this callback out"
    assert said in caplog.text
    assert iterations(CountPrompts(5), resume_from=tmp_path) == 3
    assert iterations(resume_from=tmp_path) == 5


def test_a_postponed_evaluation_of_a_run_that_was_ended(tmp_path: Path) -> None:
    """The resumed run makes it, and ends."""

    def run(*callbacks: Callback, **options: Any) -> Any:
        pop = make_agents(1)
        options = {"max_steps": 100, "evaluation_interval": 100} | options
        return run_reasoning(tmp_path, pop=pop, callbacks=callbacks, **options)[0]

    interrupt = At("on_iteration", 2, lambda progress: os.kill(os.getpid(), signal.SIGINT))
    run(CountPrompts(3), interrupt)
    resumed = run(CountPrompts(3), resume_from=tmp_path)
    assert (resumed.steps, len(resumed.scores)) == ([0, 4], 2)


def test_stop_at_fitness(tmp_path: Path) -> None:
    agent = train(FakeAgent(skill=[0, 1, 2, 3]), StopAtFitness(0.6))
    assert agent.fitness == pytest.approx([0, 1 / 3, 2 / 3])

    def run(**options: Any) -> Any:
        callbacks = [StopAtFitness(-1.0)]
        return run_reasoning(tmp_path, pop=make_agents(1), callbacks=callbacks, **options)[0]

    assert len(run(checkpoint_steps=1).scores) == 0


def test_stop_at_fitness_after_resuming() -> None:
    callback, asked = StopAtFitness(0.5), []
    callback.load_state_dict({"reached": 0.75})
    callback.on_start(RunProgress(3, 0.0, [], [], Path(), _stop=asked.append))
    assert asked == ["fitness has reached 0.75"]


def test_a_metric_that_is_no_column() -> None:
    with pytest.raises(ValueError, match=r"metric='pass@8' is no column .*eval_accuracy") as caught:
        train(FakeAgent(), StopAtFitness(1.0, metric="pass@8"))
    assert "on_evaluation of the callback StopAtFitness(" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match=r"'reward' is no column of an iteration") as caught:
        train(FakeAgent(), EarlyStopping(metric="reward"))
    assert "'reward_mean'" in str(caught.value)
    assert "'agent'" not in str(caught.value) and "'iteration'" not in str(caught.value)


def test_printed_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    columns = ["reward_mean", "unknown", "eval_accuracy", "pass@4"]
    train(FakeAgent(7), PrintMetrics(columns, every=2), max_steps=8)
    lines = capsys.readouterr().out.splitlines()
    says = "PrintMetrics: there is no column '{}' in iteration {}. There are: "
    unknown, sampled = (
        next(line for line in lines if line.startswith(says.format(*each)))
        for each in (("unknown", 2), ("pass@4", 0))
    )
    assert "reward_mean" in unknown and "eval_accuracy" in sampled and "agent" not in sampled
    assert [line for line in lines if "PrintMetrics" not in line] == [
        "iteration 0, agent 7: fitness 0.3333, eval_accuracy 0.3333",
        "iteration 1, agent 7: fitness 0.3333, eval_accuracy 0.3333",
        "iteration 2, agent 7: reward_mean 0.5",
        "iteration 2, agent 7: fitness 0.3333, eval_accuracy 0.3333",
        "iteration 3, agent 7: fitness 0.3333, eval_accuracy 0.3333",
        "iteration 4, agent 7: reward_mean 0.5",
        "iteration 4, agent 7: fitness 0.3333, eval_accuracy 0.3333",
    ]
    assert sum("PrintMetrics" in line for line in lines) == 2


def test_a_linear_schedule() -> None:
    value = linear(1.0, 0.0, 4)
    assert [value(i) for i in (1, 2, 3, 5, 9)] == pytest.approx([1.0, 0.75, 0.5, 0.0, 0.0])


def test_a_schedule_of_a_hyperparameter(tmp_path: Path) -> None:
    """Each iteration has its value, also the first and those of a resumed run."""
    seen: list[float] = []

    class Watch(Callback):
        def on_iteration(self, progress: RunProgress) -> None:
            seen.append(progress.agents[0].temperature)

    def run(**options: Any) -> None:
        callbacks = [Watch(), HyperparameterSchedule("temperature", linear(1.0, 0.4, 3))]
        run_multiturn(tmp_path, pop=make_agents(1), callbacks=callbacks, **options)

    run(max_steps=18)
    run(max_steps=36, resume_from=tmp_path)
    assert seen == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_a_schedule_sets_no_value_of_an_iteration_that_never_comes(tmp_path: Path) -> None:
    """Of a run that ends, or is resumed at its end; 0 is no learning rate."""

    def run(**options: Any) -> Any:
        callbacks = [HyperparameterSchedule("lr", linear(1e-4, 0, 2))]
        pop = make_agents(1, cosine_lr_schedule_config=None)
        return run_reasoning(tmp_path, pop=pop, max_steps=4, callbacks=callbacks, **options)[0]

    assert run().lr == pytest.approx(5e-5)
    assert run(resume_from=tmp_path).lr == pytest.approx(5e-5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_model_len", 5, "name='max_model_len' cannot change while GRPO trains: choose one of"),
        ("temperature", -1.0, "temperature is -1.0"),
        ("lr", 0.1, "name='lr' is in the hp_config of agent 0"),
    ],
)
def test_a_schedule_that_is_refused(name: str, value: Any, message: str, tmp_path: Path) -> None:
    callback = HyperparameterSchedule(name, lambda iteration: value)
    evolving = HyperparameterConfig(lr=RLParameter(1e-6, 1e-2))
    with pytest.raises(ValueError, match=message):
        run_reasoning(tmp_path, pop=make_agents(1, hp_config=evolving), callbacks=[callback])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: EarlyStopping(0), ValueError, "patience is 0"),
        (lambda: EarlyStopping(min_delta=-0.1), ValueError, "min_delta is -0.1"),
        (lambda: EarlyStopping(metric=None), TypeError, "metric is None"),
        (lambda: StopAtFitness("0.9"), TypeError, "value is '0.9'"),
        (lambda: PrintMetrics("fitness"), TypeError, "columns is 'fitness'"),
        (lambda: PrintMetrics(every=0), ValueError, "every is 0"),
        (lambda: HyperparameterSchedule("lr", 0.1), TypeError, "schedule is 0.1; pass a function"),
        (lambda: linear(1, 0, 0), ValueError, "iterations is 0"),
    ],
)
def test_bad_arguments(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


class Misspelt(Callback):
    def on_iterations(self, progress: RunProgress) -> None: ...


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (Record(), "callbacks is Record()"),
        ([print], r"callbacks\[0\] is <built-in function print>"),
        ([Misspelt()], r"callbacks\[0\] is a Misspelt with on_iterations, .* on_iteration,"),
    ],
)
def test_bad_callbacks(callbacks: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        finetune_llm_reasoning([FakeAgent()], FakeGym(), callbacks=callbacks, verbose=False)
    assert not Path("runs").exists()


@pytest.mark.parametrize(("bad", "error"), [(lambda: Path("x"), TypeError), (raising, OSError)])
def test_a_state_that_cannot_be_saved_is_refused_before_training(
    bad: Callable[[], Any], error: type[Exception]
) -> None:
    callback, agent = BadState(bad, stop), FakeAgent()
    callback._count = 3
    with pytest.raises(error) as caught:
        train(agent, callback)
    assert caught.value.__notes__[0] == "It was raised by state_dict of the callback BadState()."
    assert not (agent.learned or agent.fitness)
    if error is TypeError:
        assert "state_dict() of BadState.count is PosixPath" in str(caught.value)


class Count(Callback):
    def __init__(self, count: int = 0) -> None:
        self._count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = state["count"]


@pytest.mark.process
def test_a_state_that_fails_on_one_process(tmp_path: Path) -> None:
    def action(ranks: Ranks) -> Any:
        runner = CallbackRunner([BadState(raising if ranks.rank else lambda: 3, stop)], ranks)
        good = runner.state_dict()
        runner.call("on_iteration", RunProgress(3, 0.0, [], [], Path()))
        assert runner.state_dict() == {
            **good,
            "ended_by": {"callback": "BadState()", "reason": "BadState: enough"},
        }
        with pytest.raises(OSError, match="no room in my callback"):
            runner.raise_state_error()
        return good

    assert (
        on_two_ranks(tmp_path, action)
        == [{"callbacks": [{"name": "BadState", "state": {"count": 0}}]}] * 2
    )


def test_states_go_to_callbacks_of_the_same_class_in_their_order() -> None:
    saved = CallbackRunner([Count(1), EarlyStopping(), Count(2)], Ranks()).state_dict()
    new = [Count(), StopAtFitness(1.0), Count(), Count()]
    CallbackRunner(new, Ranks()).load_state_dict(json.loads(json.dumps(saved)))
    assert [each._count for each in new if isinstance(each, Count)] == [1, 2, 0]


@pytest.mark.process
def test_processes_are_told_the_same_and_stop_together(tmp_path: Path) -> None:
    def action(ranks: Ranks) -> Any:
        record, asked = Record(), At("on_iteration", 1, stop if ranks.rank else lambda _: None)
        runner = CallbackRunner([asked, record], ranks)
        rows = [{"reward_mean": float(ranks.rank)}]
        progress = RunProgress(1, float(ranks.rank), [], rows, Path())
        runner.call("on_iteration", progress)
        ((_, given),) = record._calls
        return given.rows, given.wall_seconds, given.is_main_process, runner.stop_reason

    first, second = on_two_ranks(tmp_path, action)
    assert first == ([{"reward_mean": 0.0}], 0.0, True, "At: enough")
    assert second == ([{"reward_mean": 0.0}], 0.0, False, "At: enough")


@pytest.mark.process
def test_a_failure_on_one_process_is_raised_on_all(tmp_path: Path) -> None:
    def action(ranks: Ranks) -> Any:
        callback = At("on_iteration", 1, fail if ranks.rank else lambda _: None)
        runner = CallbackRunner([callback], ranks)
        with pytest.raises(ZeroDivisionError) as caught:
            runner.call("on_iteration", RunProgress(1, 0.0, [], [], Path()))
        return runner.failed, caught.value.__notes__

    results = on_two_ranks(tmp_path, action)
    assert results == [(True, ["It was raised by on_iteration of the callback At()."])] * 2


def test_a_postponed_evaluation_is_counted_once(tmp_path: Path) -> None:
    """By the resumed run, which makes it."""
    whole, stopped, resumed = (EarlyStopping(100, min_delta=9.0) for _ in range(3))
    run_reasoning(tmp_path / "whole", callbacks=[whole])
    run = tmp_path / "run"
    run_reasoning(run, callbacks=[stopped], hook=After(3))  # in iteration 2, which is evaluated
    assert state_of(run / "iteration_00000002")["unevaluated_rows"] is not None
    run_reasoning(run, callbacks=[Record(), resumed], resume_from=run)
    assert [each.state_dict()["waited"] for each in (whole, stopped, resumed)] == [2, 0, 2]
