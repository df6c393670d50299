"""A resumed run is bit for bit the run that was never interrupted."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_helpers import (
    RUNS,
    After,
    Hook,
    checkpoints_in,
    differences,
    everything,
    make_agents,
    make_gym,
    nothing,
    reseed,
    rows_of,
    run_multiturn,
    run_reasoning,
    seed_all,
    state_of,
)

from agilerl.algorithms import GRPO
from agilerl.testing import tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The uninterrupted runs."""
    runs = {}
    for kind, run in RUNS.items():
        path = tmp_path_factory.mktemp(kind)
        seed_all()
        runs[kind] = (path, everything(path, run(path)))
    return runs


def hook_for(kind: str, iteration: int) -> After:
    """A Ctrl-C in the middle of an iteration, when the first agent's answers are scored."""
    if kind == "reasoning":  # one batch per agent and iteration
        return After(2 * (iteration - 1) + 1)
    # First turns: three per agent and iteration, two per agent and evaluation.
    return After(4 + 6 * (iteration - 1) + 4 * ((iteration - 1) // 2) + 1)


@pytest.mark.parametrize(
    ("kind", "iteration"),
    [("reasoning", 1), ("reasoning", 2), ("reasoning", 3), ("multiturn", 2), ("multiturn", 3)],
)
def test_stopped_and_resumed(
    kind: str, iteration: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    """Iteration 2 ends with an evaluation, which the stop leaves to the resumed run."""
    run, path = RUNS[kind], tmp_path / "run"
    seed_all()
    run(path, hook=hook_for(kind, iteration))
    saved = path / f"iteration_{iteration:08d}"
    assert checkpoints_in(path)[-1] == saved.name
    assert (state_of(saved)["unevaluated_rows"] is not None) == (iteration == 2)
    reseed()
    pop = run(path, resume_from=path)
    assert differences(everything(path, pop), whole[kind][1]) == []
    (resumed,) = json.loads((path / "config.json").read_text())["resumed"]
    assert (resumed["iteration"], resumed["from"]) == (iteration, str(saved))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("batch", "iteration"), [(2, 0), (5, 0), (8, 2), (10, 2), (17, 4)])
def test_stopped_in_the_middle_of_an_evaluation(
    batch: int, iteration: int, number: signal.Signals, whole_by_rows: Any, tmp_path: Path
) -> None:
    """Two agents take three batches each, before training and after iterations 2 and 4."""
    seed_all()
    hook = After(batch, number)
    pop = make_agents()
    try:
        evaluated_by_rows(tmp_path, pop=pop, hook=hook)
        assert number == signal.SIGINT
    except SystemExit:
        assert number == signal.SIGTERM
    assert hook.left == 0  # the batch after it was not begun
    assert checkpoints_in(tmp_path)[-1] == f"iteration_{iteration:08d}"
    state = state_of(tmp_path / f"iteration_{iteration:08d}")
    assert [row["iteration"] for row in state["unevaluated_rows"]] == [iteration] * 2
    entries = (batch - 1) // 6
    assert [(len(agent.fitness), len(agent.steps)) for agent in pop] == [(entries, entries)] * 2
    reseed()
    pop = evaluated_by_rows(tmp_path, resume_from=tmp_path)
    assert differences(everything(tmp_path, pop), whole_by_rows) == []


def evaluated_by_rows(path: Path, *, hook: Hook = nothing, **options: Any) -> list[GRPO]:
    env = make_gym(evaluation_hook=hook, eval_batch_size=1)
    return run_reasoning(path, env=env, **options)


@pytest.fixture(scope="module")
def whole_by_rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("by_rows")
    seed_all()
    return everything(path, evaluated_by_rows(path))


def test_a_stop_in_the_last_batch_of_an_evaluation_comes_after_it(
    whole_by_rows: Any, tmp_path: Path
) -> None:
    seed_all()
    evaluated_by_rows(tmp_path, hook=After(12))
    state = state_of(tmp_path / "iteration_00000002")
    assert (state["unevaluated_rows"], len(state["agents"][1]["fitness_history"])) == (None, 2)
    reseed()
    pop = evaluated_by_rows(tmp_path, resume_from=tmp_path)
    assert differences(everything(tmp_path, pop), whole_by_rows) == []


def test_an_evaluation_that_is_stopped_twice(whole_by_rows: Any, tmp_path: Path) -> None:
    seed_all()
    evaluated_by_rows(tmp_path, hook=After(10))
    evaluated_by_rows(tmp_path, hook=After(2), resume_from=tmp_path)
    reseed()
    pop = evaluated_by_rows(tmp_path, resume_from=tmp_path)
    assert differences(everything(tmp_path, pop), whole_by_rows) == []


@pytest.mark.parametrize(("turn", "iteration"), [(1, 0), (3, 0), (17, 2)])
def test_stopped_in_the_middle_of_evaluation_episodes(
    turn: int, iteration: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    """First turns: two for each of two agents in an evaluation, six in an iteration."""
    seed_all()
    run_multiturn(tmp_path, hook=After(turn))
    assert state_of(tmp_path / f"iteration_{iteration:08d}")["unevaluated_rows"] is not None
    reseed()
    pop = run_multiturn(tmp_path, resume_from=tmp_path)
    assert differences(everything(tmp_path, pop), whole["multiturn"][1]) == []


def test_what_failed_is_the_same_in_a_resumed_run(tmp_path: Path) -> None:
    def run(name: str, hook: Hook = nothing, **options: Any) -> Any:
        path = tmp_path / name
        pop = run_reasoning(path, env=make_gym(hook, failing=0.12), **options)
        return everything(path, pop)

    seed_all()
    whole = run("whole")
    failed = [float(row["failed_completions"]) for row in whole["rows"] if row["reward_mean"]]
    assert len(failed) == 8
    assert 0.0 < sum(failed) < 8 * 6 / 2
    assert 0.0 in failed
    seed_all()
    run("stopped", hook_for("reasoning", 2))
    reseed()
    assert differences(run("stopped", resume_from=tmp_path / "stopped"), whole) == []


OPTIONS: dict[str, Any] = {
    "importance_anchor": "sampler",
    "loss_reduction": "prompt",
    "advantage_baseline": "leave_one_out",
    "adv_norm": "batch_std",
    "entropy_coef": 0.01,
    "top_entropy_quantile": 0.5,
    "dual_clip": 2.0,
}


@pytest.mark.parametrize("kind", list(RUNS))
def test_options_of_the_loss_are_the_checkpoints(kind: str, tmp_path: Path) -> None:
    """Resumed by agents that were made without them."""
    run, whole, path = RUNS[kind], tmp_path / "whole", tmp_path / "run"
    seed_all()
    expected = everything(whole, run(whole, pop=make_agents(**OPTIONS)))
    seed_all()
    run(path, pop=make_agents(**OPTIONS), hook=hook_for(kind, 3))
    reseed()
    pop = run(path, pop=make_agents(), resume_from=path)
    assert {name: getattr(pop[0], name) for name in OPTIONS} == OPTIONS
    assert differences(everything(path, pop), expected) == []
    shares = [row["top_entropy_share"] for row in rows_of(path)]
    assert all(0.5 <= float(share) < 1.0 for share in filter(None, shares)) and any(shares)


@pytest.mark.parametrize("kind", list(RUNS))
def test_resumed_from_a_checkpoint_that_the_run_went_past(
    kind: str, whole: dict[str, Any], tmp_path: Path
) -> None:
    """As after a kill: rows and checkpoints that are repeated give way, or stay where they were."""
    run, path, other = RUNS[kind], tmp_path / "run", tmp_path / "other"
    seed_all()
    run(path, hook=hook_for(kind, 3), keep_checkpoints=9)
    before = rows_of(path), checkpoints_in(path)
    reseed()
    elsewhere = run(other, resume_from=path / "iteration_00000002", elite_path=other / "elite")
    assert (rows_of(path), checkpoints_in(path)) == before
    # An elite from before the checkpoint stays where it was saved.
    assert set(differences(everything(other, elsewhere), whole[kind][1])) <= {"elite"}
    assert checkpoints_in(other)[-1] == "iteration_00000004"

    reseed()
    pop = run(path, resume_from=path / "iteration_00000002", keep_checkpoints=9)
    assert differences(everything(path, pop), whole[kind][1]) == []
    assert checkpoints_in(path / "earlier_run_1") == ["iteration_00000003"]
    assert checkpoints_in(path)[-2:] == ["iteration_00000003", "iteration_00000004"]


def test_resumed_again_and_again(whole: dict[str, Any], tmp_path: Path) -> None:
    seed_all()
    run_reasoning(tmp_path, hook=hook_for("reasoning", 1))
    reseed()
    run_reasoning(tmp_path, hook=After(2, signal.SIGINT), resume_from=tmp_path)
    reseed()
    with pytest.raises(SystemExit):
        run_reasoning(tmp_path, hook=After(2, signal.SIGTERM), resume_from=tmp_path)
    reseed()
    pop = run_reasoning(tmp_path, resume_from=tmp_path)
    assert differences(everything(tmp_path, pop), whole["reasoning"][1]) == []
    resumed = json.loads((tmp_path / "config.json").read_text())["resumed"]
    assert [entry["iteration"] for entry in resumed] == [1, 2, 3]
    assert not list(tmp_path.glob("earlier_run*"))


def test_a_finished_run_has_nothing_left_to_do(whole: dict[str, Any], tmp_path: Path) -> None:
    source, facts = whole["reasoning"]
    pop = run_reasoning(tmp_path, resume_from=source)
    assert rows_of(tmp_path) == facts["rows"]
    assert [agent.scores for agent in pop] == [facts[f"{i} history"][1] for i in (0, 1)]


def test_a_run_that_ended_off_the_interval_is_done_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_reasoning(tmp_path, pop=make_agents(1), checkpoint_steps=3)
    rows = rows_of(tmp_path)
    trained: list[None] = []
    run_reasoning(
        tmp_path,
        pop=make_agents(1),
        checkpoint_steps=3,
        resume_from=tmp_path,
        hook=lambda: trained.append(None),
    )
    assert (trained, rows_of(tmp_path)) == ([], rows)
    printed = capsys.readouterr().out
    assert printed.count("The run was at its bound already, so nothing is trained") == 1
    assert "raise max_steps=" in printed
    assert checkpoints_in(tmp_path)[-2:] == ["iteration_00000003", "iteration_00000004"]


def test_resumed_after_a_crash(whole: dict[str, Any], tmp_path: Path) -> None:
    class Crash:
        left = 7

        def __call__(self) -> None:
            self.left -= 1
            if self.left == 0:
                raise OSError("the grader is gone")

    seed_all()
    with pytest.raises(OSError, match="grader") as caught:
        run_reasoning(tmp_path, hook=Crash())
    crashed = tmp_path / "crashed_in_iteration_00000004"
    assert crashed.is_dir()
    assert f"resume_from='{tmp_path}/iteration_00000003'" in caught.value.__notes__[-1]
    with pytest.raises(ValueError, match=r"middle of iteration 4.*iteration_00000003'"):
        run_reasoning(tmp_path / "x", resume_from=crashed)
    reseed()
    pop = run_reasoning(tmp_path, resume_from=tmp_path)
    assert differences(everything(tmp_path, pop), whole["reasoning"][1]) == []
    assert (tmp_path / "earlier_run_1" / crashed.name).is_dir()


def test_the_clock_goes_on(tmp_path: Path) -> None:
    """A run that had used its time up before it was interrupted does not start again."""
    run_multiturn(tmp_path, hook=hook_for("multiturn", 1))
    spent = state_of(tmp_path / "iteration_00000001")["wall_seconds"]
    pop = run_multiturn(tmp_path, resume_from=tmp_path, max_wall_seconds=spent)
    assert [len(agent.scores) for agent in pop] == [1, 1]


def test_hyperparameters_are_the_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may have been mutated, and the script's may have been edited."""
    pop = make_agents(1)

    def mutate() -> None:
        pop[0].lr, pop[0].batch_size, pop[0].temperature = 3e-3, 6, 0.7
        stop()

    stop = After(2)
    run_reasoning(tmp_path, pop=pop, hook=mutate)
    edited = make_agents(1, lr=5.0, batch_size=2, clip_coef=0.3)
    run_reasoning(tmp_path, pop=edited, resume_from=tmp_path, hook=After(1))
    agent = edited[0]
    assert (agent.lr, agent.batch_size, agent.temperature, agent.clip_coef) == (3e-3, 6, 0.7, 0.2)
    for said in ("batch_size=6 (not 2)", "clip_coef=0.2 (not 0.3)", "lr=0.003 (not 5.0)"):
        assert said in caplog.text


def test_a_run_stopped_before_its_last_evaluation_is_done_once_that_is_made(
    whole: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    last = int(checkpoints_in(whole["reasoning"][0])[-1].removeprefix("iteration_"))
    seed_all()
    run_reasoning(tmp_path, hook=hook_for("reasoning", last))
    assert state_of(tmp_path / checkpoints_in(tmp_path)[-1])["unevaluated_rows"]
    reseed()
    pop = run_reasoning(tmp_path, resume_from=tmp_path)
    assert differences(everything(tmp_path, pop), whole["reasoning"][1]) == []
    names = [f"iteration_{last:08d}{after}" for after in ("", "_evaluated")]
    assert checkpoints_in(tmp_path)[-2:] == names
    assert not state_of(tmp_path / names[-1])["unevaluated_rows"]
    again = run_reasoning(tmp_path, resume_from=tmp_path)
    assert [agent.fitness for agent in again] == [agent.fitness for agent in pop]
    assert checkpoints_in(tmp_path)[-2:] == names


def test_another_base_is_refused(tmp_path: Path) -> None:
    run_reasoning(tmp_path, hook=After(2))
    other = tiny_model(hidden_size=16, layers=1, heads=2, key_value_heads=1, seed=1)
    with pytest.raises(ValueError, match=r"its base weights are '\w+', this agent's '\w+'; build"):
        run_reasoning(tmp_path, pop=make_agents(actor_network=other), resume_from=tmp_path)


def test_a_rate_changed_after_the_last_step_is_taken_up_by_the_next(tmp_path: Path) -> None:
    from agilerl.algorithms.checkpoint.load import read_saved_agent

    (agent,) = make_agents(1)
    env = make_gym()

    def step(agent: Any) -> None:
        prompts = env.reset()
        ids, masks = agent.get_action(prompts)
        rewards = torch.tensor([[0.0, 0.5, 1.0]] * len(prompts))
        agent.learn((ids, masks, rewards))

    step(agent)
    step(agent)
    agent.lr = 0.007
    agent.skipped_steps.in_a_row = 2
    agent.save_checkpoint(tmp_path / "agent")
    (other,) = make_agents(1, lr=0.1, use_separate_reference_adapter=True)
    read_saved_agent(other, tmp_path / "agent").restore()
    assert other.skipped_steps.in_a_row == 2
    assert other.engine.optimizer.param_groups[0]["lr"] == agent.optimizer.param_groups[0]["lr"]
    for each in (agent, other):
        step(each)
        step(each)
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(
            agent.policy.parameters().values(), other.policy.parameters().values(), strict=True
        )
    )
    assert agent.lr_scheduler.get_last_lr() == other.lr_scheduler.get_last_lr()


def test_an_evaluation_is_cut_the_same_whatever_was_trained_before_it(tmp_path: Path) -> None:
    """Two groups, of three episodes and of two, and then one; the stop leaves the evaluation."""

    def run(name: str, hook: Hook = nothing, **options: Any) -> dict[str, Any]:
        pop = make_agents(2)
        pop[1].group_size = pop[1].batch_size = 2
        settings = {
            "train_seeds": 3,
            "groups_per_iteration": 2,
            "evaluation_episodes": 6,
            "max_steps": None,
            "num_epochs": 2,
        }
        path = tmp_path / name
        return everything(path, run_multiturn(path, pop=pop, hook=hook, **settings, **options))

    seed_all()
    whole = run("whole")
    seed_all()
    run("run", After(12 + 10 + 1))  # first turns: evaluation, iteration 1, iteration 2
    assert state_of(tmp_path / "run" / "iteration_00000002")["unevaluated_rows"] is not None
    reseed()
    assert differences(run("run", resume_from=tmp_path / "run"), whole) == []


def test_a_rate_set_on_the_optimizer_goes_on(tmp_path: Path) -> None:
    def run(name: str, hook: Hook = nothing, **options: Any) -> dict[str, Any]:
        pop = make_agents(1)

        def update() -> None:
            if not pop[0].scores:
                GRPO.update_lr(pop[0].optimizer, 5e-3)
            hook()

        path = tmp_path / name
        return everything(path, run_reasoning(path, pop=pop, hook=update, **options))

    seed_all()
    whole = run("whole")
    seed_all()
    run("run", After(3))
    reseed()
    resumed = run("run", resume_from=tmp_path / "run")
    assert differences(resumed, whole) == []
    assert resumed["0 groups"][0]["initial_lr"] == 5e-3


def test_environments_are_made_for_the_checkpoints_group_size(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    """Making them draws from the streams, so it has to be done before these are restored."""
    seed_all()
    run_multiturn(tmp_path, hook=hook_for("multiturn", 3))
    reseed()
    pop = run_multiturn(tmp_path, pop=make_agents(group_size=2), resume_from=tmp_path)
    assert differences(everything(tmp_path, pop), whole["multiturn"][1]) == []


def test_an_environment_that_failed_is_replaced_by_the_resumed_run(tmp_path: Path) -> None:
    class FailsOnce(After):
        """In iteration 1, at the last episode of the second agent."""

        def __call__(self) -> None:
            super().__call__()
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 10:
                raise OSError("the game broke")

    seed_all()
    whole = everything(tmp_path / "whole", run_multiturn(tmp_path / "whole", hook=FailsOnce(99)))
    path = tmp_path / "run"
    seed_all()
    run_multiturn(path, hook=FailsOnce(5))
    assert checkpoints_in(path) == ["iteration_00000001"]
    reseed()
    assert differences(everything(path, run_multiturn(path, resume_from=path)), whole) == []
