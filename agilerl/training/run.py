"""One run from its directory to its last row: opens the logs, runs the loop, closes the logs."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agilerl.distributed import Ranks
from agilerl.training.callbacks.runner import CallbackRunner
from agilerl.training.checkpoint.run_checkpoint import (
    RunCheckpoint,
    find_checkpoint,
    read_checkpoint,
)
from agilerl.training.checkpoint.run_directory import RunDirectory, lies_in
from agilerl.training.checkpoint.run_state import check_plain, write_json
from agilerl.training.checkpoint.saver import Elite
from agilerl.training.logs.rank_zero_log import RankZeroLog
from agilerl.training.logs.resumed_files import take_over_logs
from agilerl.training.logs.run_config import run_config
from agilerl.training.logs.run_log import NoLog, RunLog
from agilerl.training.logs.terminal import in_notebook
from agilerl.training.loop import TrainingLoop
from agilerl.training.options import TrainingOptions
from agilerl.training.population import Population
from agilerl.training.protocols import Agent
from agilerl.training.rank_consistency import (
    check_same_data,
    check_same_options,
    check_shared_storage,
)
from agilerl.training.trackers.protocol import RunStatus
from agilerl.utils.llm_utils import collective_run

logger = logging.getLogger(__name__)


def run_training(
    population: Population,
    options: TrainingOptions,
    env_name: str,
    ranks: Ranks | None = None,
) -> None:
    """Train a population in a run directory of its own, or resume a run in its directory.

    Args:
        population: Who trains.
        options: Checked options.
        env_name: Names the run.
        ranks: The processes that train together; rank 0 writes.

    Raises:
        SystemExit: With ``exit_code_on_sigterm``, when SIGTERM stopped any of the processes and all
            is saved. (Ctrl-C returns.)
    """
    ranks = Ranks() if ranks is None else ranks
    agents = population.agents
    check_same_options(population, options, ranks)
    _check_states(population, options, ranks)
    check_same_data(population, ranks)
    resume_from, found = options.resume_from, None
    if resume_from is not None:
        found = ranks.on_rank_zero(lambda: find_checkpoint(resume_from))
    check_shared_storage(population, options, ranks)
    checkpoint: RunCheckpoint | None = None
    if found is not None:
        appended = options.allow_appended_rows
        checkpoint = read_checkpoint(found, population, env_name, ranks, appended)
    name = ranks.on_rank_zero(lambda: _name_of_run(agents, env_name, options, checkpoint))
    with collective_run(), ExitStack() as stack:
        elite = None
        if options.elite_path is not None:  # the options have checked that save_elite is set
            elite = stack.enter_context(Elite(options.elite_path, name, ranks))
        directory = stack.enter_context(
            RunDirectory(name, options.checkpoint_path, checkpoint, ranks)
        )
        log = _opened_log(population, options, env_name, checkpoint, directory, ranks)
        status: RunStatus = "failed"
        try:
            _log_run_directory(log, directory, options, checkpoint, ranks)
            names = {"run": name, "environment": env_name}
            loop = TrainingLoop(population, options, directory, log, elite, names, ranks)
            if checkpoint is not None:
                # Removed one by one: they hold what was read, and engines of agents that selection
                # may replace.
                while checkpoint.agents:
                    checkpoint.agents.pop().restore()
                loop.load_state_dict(checkpoint.state)
                if loop.bounds.reached() and ranks.rank == 0:
                    _say_that_it_was_over(options, log, appended=bool(checkpoint.appended))
            stopped_by = loop.run()
            status = "killed" if stopped_by == "SIGTERM" else "finished"
        finally:
            log.close(status)
    if stopped_by == "SIGTERM":  # the program was asked to end, not only this run
        # A launcher ends the others as soon as one has failed, which is what 143 looks like to it.
        ranks.gather(None)
        raise SystemExit(options.exit_code_on_sigterm)


def _say_that_it_was_over(options: TrainingOptions, log: RunLog, appended: bool) -> None:
    """Of a run that was at its bound already; appended rows are then not trained on."""
    names = ("num_epochs", "max_steps", "max_wall_seconds")
    bounds = [f"{name}={vars(options)[name]}" for name in names if vars(options)[name] is not None]
    given = " or ".join(bounds)
    if appended:
        logger.warning(
            "The run was at its bound before rows were appended, so they are not trained on: "
            "raise %s.",
            given,
        )
        return
    message = f"The run was at its bound already, so nothing is trained. To go on, raise {given}"
    log.report(logger, message)


def _check_states(population: Population, options: TrainingOptions, ranks: Ranks) -> None:
    """Before anything is trained: a state that cannot be saved would cost the first checkpoint."""
    callbacks = CallbackRunner(options.callbacks or (), ranks)
    callbacks.state_dict()
    callbacks.raise_state_error()

    def check_environments() -> None:
        for collector in population.collectors:
            check_plain(collector.state_dict(), "state_dict() of the environment")

    ranks.on_all_ranks(check_environments)


def _name_of_run(
    agents: Sequence[Agent],
    env_name: str,
    options: TrainingOptions,
    checkpoint: RunCheckpoint | None,
) -> str:
    """Name of the run that is resumed in its directory, or a new name, safe as a file name.

    ``<ALGO>-<environment>-<date>-<time>``
    """
    if checkpoint is not None and lies_in(checkpoint.path, options.checkpoint_path):
        name: str = checkpoint.state["run"]
    else:
        algos = "+".join(dict.fromkeys(agent.algo for agent in agents))
        environment = re.sub(r"[^\w.+-]+", "_", env_name).strip("._") or "env"
        name = f"{algos}-{environment}-{time.strftime('%Y%m%d-%H%M%S')}"
    options.check_elite_path(Path(options.checkpoint_path or Path("runs") / name))
    return name


def _opened_log(
    population: Population,
    options: TrainingOptions,
    env_name: str,
    checkpoint: RunCheckpoint | None,
    directory: RunDirectory,
    ranks: Ranks,
) -> RunLog:
    """Write ``config.json`` and open the log, with the rows of a run that is resumed."""
    config = run_config(population.agents, options, directory.name, env_name, checkpoint)
    logged: dict[str, int] = {}
    if checkpoint is not None:
        source, saved = checkpoint.path.parent, checkpoint.state
        logged = ranks.on_rank_zero(lambda: take_over_logs(source, directory.path, saved))
    ranks.on_rank_zero(lambda: write_json(directory.path / "config.json", config))
    state = None if checkpoint is None else checkpoint.state
    total = _total_steps(population, options, state)

    def opened() -> RunLog:
        if ranks.rank > 0:
            return NoLog()
        return RankZeroLog(
            *(population, directory.path, directory.name, options, config, total, state),
            logged=logged,
        )

    return ranks.on_all_ranks(opened)


def _total_steps(
    population: Population, options: TrainingOptions, resumed: Mapping[str, Any] | None
) -> int | None:
    """Steps per agent of the whole run, for the progress bar; None when unknown."""
    passes = options.num_epochs
    of_passes = None if passes is None else population.steps_of_passes(passes, resumed)
    return min((n for n in (options.max_steps, of_passes) if n is not None), default=None)


def _log_run_directory(
    log: RunLog,
    directory: RunDirectory,
    options: TrainingOptions,
    checkpoint: RunCheckpoint | None,
    ranks: Ranks,
) -> None:
    if ranks.rank > 0:
        return
    message = f"Run directory: {directory.path}"
    if checkpoint is not None:
        message += f", resumed from {checkpoint.path} (iteration {checkpoint.state['iteration']})"
        if checkpoint.appended:
            message += f", with appended training rows: {', '.join(map(str, checkpoint.appended))}"
    if not options.verbose:
        logger.info(message)
        return
    log.report(logger, message)
    if in_notebook():
        log.say(
            "Interrupt the kernel (the square button) to end the run after its current iteration, "
            "with a checkpoint; interrupt it twice to end it at once."
        )
