"""The training loop: evaluate, collect, learn, log, save; end cleanly when asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agilerl.distributed import Ranks
from agilerl.training.bounds import Bounds
from agilerl.training.callbacks.protocol import RunProgress
from agilerl.training.callbacks.runner import CallbackRunner, ExitCalled
from agilerl.training.checkpoint.run_directory import RunDirectory
from agilerl.training.checkpoint.run_state import FORMAT, random_streams, set_random_streams
from agilerl.training.checkpoint.saver import Elite, Progress, Saver
from agilerl.training.collectors.experience import Experience, check_failures, gather_statistics
from agilerl.training.collectors.rollouts import collect
from agilerl.training.evaluation import StopCheck, evaluate_members
from agilerl.training.generation import Evolution
from agilerl.training.interrupts import GracefulStop, strongest
from agilerl.training.learning import Learner
from agilerl.training.logs.run_log import RunLog
from agilerl.training.options import TrainingOptions
from agilerl.training.population import Member, Population
from agilerl.training.protocols import EvaluationPlan, Row

logger = logging.getLogger(__name__)


class TrainingLoop:
    """Trains a population side by side, one ``learn`` per agent and iteration.

    Args:
        population: Who trains; the agents are trained in place.
        options: Checked options.
        directory: Where checkpoints go.
        log: Where rows and samples go.
        elite: Where the best agent goes, if anywhere.
        names: Of the run and its environment, for checkpoints.
        ranks: The processes that train together; each runs this loop on its own share of the data,
            and all take every decision alike.
    """

    def __init__(
        self,
        population: Population,
        options: TrainingOptions,
        directory: RunDirectory,
        log: RunLog,
        elite: Elite | None = None,
        names: Mapping[str, str] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = Ranks() if ranks is None else ranks
        self.population, self.options, self.log = population, options, log
        self.elite, self.names = elite, names or {}
        self.saver = Saver(population, directory, elite, log, options.keep_checkpoints, self.ranks)
        self.iteration = 0
        self.progress = Progress.UNTRAINED
        self._unevaluated: list[Row] | None = None  # rows whose evaluation a stop postponed
        self._before_evaluation: dict[str, Any] | None = None  # the state, if a stop ended one
        self.bounds = Bounds(population, options, self.ranks)
        self.evolution = Evolution(population, options, log)
        self.learner = Learner(options, log, self.ranks)
        self.callbacks = CallbackRunner(options.callbacks or (), self.ranks)
        self._rows: list[Row] = []
        self._saved: Path | None = None

    def run(self) -> str | None:
        """Train to a bound in the options, or until Ctrl-C or SIGTERM.

        Returns:
            Name of the signal that stopped any of the processes, None if none did.
        """
        if self.options.tournament is not None:
            self.log.write_lineage(self.population.generations)
        with GracefulStop() as stop:
            finished = False
            try:
                self._train_to_the_end(stop)
                finished = True
                before = self._stop_requested(stop)
                if before is not None:
                    self._save_after_stop(before)
                stopped_by = before or self.callbacks.stop_reason
                self._call("on_end", stopped_by=stopped_by, checkpoint=self._saved)
                signal_name = self._stop_requested(stop)
                if signal_name is not None and before is None:
                    self._save_after_stop(signal_name)
            except Exception as error:
                trained = self.progress is not Progress.UNTRAINED
                if self.callbacks.failed and trained:
                    self._save_after_callback(error)
                elif not finished:
                    self.saver.rescue(self.state_dict, error, self.iteration, trained)
                if isinstance(error, ExitCalled):
                    self.log.report(logger, "\n".join(error.__notes__))
                    raise SystemExit(error.code) from error
                raise
        return signal_name

    def _train_to_the_end(self, stop: GracefulStop) -> None:
        """Train, and save what no checkpoint has yet, unless a signal came."""
        was_ended = self.callbacks.stop_reason is not None
        self._call("on_start")
        self._evaluate_first(stop)
        ended = self.bounds.reached() or self.callbacks.stop_reason is not None
        while not ended and self._stop_requested(stop) is None:
            ended = self._run_iteration(stop)
        if (reason := self.callbacks.stop_reason) is not None:
            remedy = ". To go on, leave this callback out or change its settings" * was_ended
            self.log.report(logger, f"Stopped after iteration {self.iteration}. {reason}{remedy}")
        unsaved = self.progress in (Progress.EVALUATED, Progress.TRAINED)
        if self.options.checkpoint_steps is None or not unsaved:
            return
        if self._stop_requested(stop) is None:
            self._save(self.progress is Progress.EVALUATED)

    def _save(self, evaluated: bool = False) -> None:
        self._note_saved(self.saver.save(self.state_dict, self.iteration, evaluated))

    def _save_after_stop(self, signal_name: str) -> None:
        evaluated = self.progress is Progress.EVALUATED
        self._note_saved(
            self.saver.save_after_stop(self.state_dict, signal_name, self.iteration, evaluated)
        )

    def _save_after_callback(self, error: Exception) -> None:
        evaluated = self.progress is Progress.EVALUATED
        where = self.saver.save_after_callback(self.state_dict, error, self.iteration, evaluated)
        try:
            self._note_saved(where)
        except Exception as second:  # noqa: BLE001 - it must not hide the first
            if second is not error:
                error.add_note(f"A callback failed after that, too: {second!r}")

    def _note_saved(self, where: Path | None) -> None:
        """Tell the callbacks where the run was saved, if it was; raise what their states raised."""
        if where is not None and where != self._saved:  # the last iteration may be saved already
            self._saved = where
            self._call("on_checkpoint", checkpoint=where)
        self.callbacks.raise_state_error()

    def _call(self, method: str, **also: Any) -> None:
        """Call the callbacks, with the rows of the last iteration."""
        progress = RunProgress(
            *(self.iteration, self.bounds.wall_seconds, self.population.agents, self._rows),
            self.saver.directory.path,
            evaluates=self.population.evaluates,
            _say=self.log.say,
            **also,
        )
        self.callbacks.call(method, progress)

    def state_dict(self, in_iteration: bool = False) -> dict[str, Any]:
        """What a run needs to be resumed, but for the agents; JSON-compatible.

        Args:
            in_iteration: Whether an iteration is under way, so that no run can be resumed from it.
        """
        if self._before_evaluation is not None:
            return {**self._before_evaluation, "in_iteration": in_iteration}
        return {
            "format": FORMAT,
            **self.names,
            "iteration": self.iteration,
            "in_iteration": in_iteration,
            "wall_seconds": self.bounds.wall_seconds,
            **self.population.state_dict(),
            "unevaluated_rows": self._unevaluated,
            "log": self.log.state_dict(),
            **self.callbacks.state_dict(),
            "random": self.ranks.gather(random_streams()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; the agents are restored already."""
        self.population.load_state_dict(state)
        self.iteration = state["iteration"]
        if self.elite is not None:
            self.elite.resume(state["run"])
        self._unevaluated = state["unevaluated_rows"]
        self.callbacks.load_state_dict(state)
        self.progress = Progress.RESUMED
        self.bounds.wall_seconds = state["wall_seconds"]
        streams = state["random"]
        # Of another number of processes: all alike, which only concerns environments.
        set_random_streams(streams[self.ranks.rank % len(streams)])

    def _evaluate_first(self, stop: GracefulStop) -> None:
        """Evaluate a new run before its first iteration; a resumed one if the stop postponed it.

        A resumed one also makes the generation that was postponed with it, or that was not needed
        as the run had reached its bound.
        """
        if not self.population.evaluates:
            return
        resumed, postponed = self.progress is Progress.RESUMED, self._unevaluated is not None
        if postponed or not resumed:
            rows = self._unevaluated or [self._row(member) for member in self.population]
            if not self._evaluate(rows, stop):
                return
            self._write_rows(rows)
            self._rows = rows
            self._call("on_evaluation")
        ended = self.bounds.reached() or self.callbacks.stop_reason is not None
        evolved = resumed and not ended and self.evolution.evolve(self.iteration)
        if evolved or (resumed and postponed):
            self.progress = Progress.EVALUATED

    def _run_iteration(self, stop: GracefulStop) -> bool:
        """Whether a bound is reached afterwards; asked once, as more time may pass until later."""
        self._call("on_iteration_start")
        self.iteration += 1
        rows = self._rows = []
        try:
            for member in self.population:
                member.agent.set_reference_policy(member.collector.num_epochs)
            experiences = collect(self.population.members)
            for member, experience in zip(self.population, experiences, strict=True):
                rows.append(self._train(member, experience))
            ended = self.bounds.reached()
            # If a callback fails, the resumed run is to make the evaluation.
            self._unevaluated = rows if self._evaluation_is_due(ended) else None
            self._call("on_iteration")
            ended = ended or self.callbacks.stop_reason is not None
            evaluated = self._evaluation_is_due(ended) and self._evaluate(rows, stop)
        finally:
            self._write_rows(rows)
        if evaluated:
            self._call("on_evaluation")
            ended = ended or self.callbacks.stop_reason is not None
            if not ended:
                self.evolution.evolve(self.iteration)
        every = self.options.checkpoint_steps
        if every is not None and self.iteration % every == 0:
            self._save()
        return ended

    def _evaluation_is_due(self, ended: bool) -> bool:
        return self.population.evaluates and (
            ended
            or self.iteration % self.options.evaluation_interval == 0
            or self.evolution.is_due(self.iteration)
        )

    def _train(self, member: Member, collected: Experience) -> Row:
        experience = gather_statistics(collected, self.ranks)
        check_failures(experience)
        # Before the call: there may be something to save also when it fails.
        self.progress = Progress.TRAINED
        columns = self.learner.learn(member, experience, self.iteration)
        return {**self._row(member), **columns}

    def _evaluate(self, rows: list[Row], stop: GracefulStop) -> bool:
        """Evaluate every agent, add the results to its row, keep the best agent so far.

        Returns:
            False: A stop was asked for, which must not wait for an evaluation that may take longer
            than the grace period. All is as it was before, for the resumed run to evaluate.
        """
        self._unevaluated = rows
        if self._stop_requested(stop) is not None:
            return False
        before, options = self.state_dict(), self.options
        self.callbacks.raise_state_error()
        check = StopCheck(stop, self.ranks)
        plan = EvaluationPlan(check, options.evaluation_rows, options.evaluation_samples)
        results = evaluate_members(
            self.population.members,
            plan,
            self.ranks,
            options.accuracy_threshold,
            lambda agent, own: self.log.show_evaluation(agent, self.iteration, own),
        )
        if results is None:
            self._before_evaluation = before
            return False
        self._unevaluated = None
        for row, result in zip(rows, results, strict=True):
            row |= {**result, "wall_seconds": self.bounds.wall_seconds}
        self.saver.note_best(self.iteration)
        return True

    def _row(self, member: Member) -> Row:
        return {
            "iteration": self.iteration,
            "agent": member.agent.index,
            "steps": member.steps,
            "wall_seconds": self.bounds.wall_seconds,
        }

    def _write_rows(self, rows: list[Row]) -> None:
        consumed = max(member.consumed for member in self.population)
        self.log.write_rows(rows, consumed, self.population.best)

    def _stop_requested(self, stop: GracefulStop) -> str | None:
        """The signal that asked any of the processes to stop."""
        return strongest(self.ranks.gather(stop.requested))
