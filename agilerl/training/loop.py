"""The training loop: evaluate, collect, learn, log, save; end cleanly when asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agilerl.distributed import Ranks
from agilerl.training.callbacks.protocol import RunProgress
from agilerl.training.callbacks.runner import CallbackRunner
from agilerl.training.checkpoint.run_directory import RunDirectory
from agilerl.training.checkpoint.run_state import FORMAT, random_streams, set_random_streams
from agilerl.training.checkpoint.saver import Elite, Progress, Saver
from agilerl.training.collectors.experience import (
    Experience,
    check_failures,
    gather_statistics,
    named_reward_statistics,
    remedy_for_flat_rewards,
    reward_statistics,
    time_statistics,
)
from agilerl.training.collectors.rollouts import collect
from agilerl.training.evaluation import (
    StopCheck,
    evaluate_members,
)
from agilerl.training.generation import Evolution
from agilerl.training.interrupts import GracefulStop, strongest
from agilerl.training.logs.run_log import RunLog
from agilerl.training.options import TrainingOptions
from agilerl.training.population import Best, Member, Population
from agilerl.training.protocols import EvaluationPlan, Row

logger = logging.getLogger(__name__)

FLAT_WINDOW = 10
"""Consecutive iterations without reward variance after which the log says so."""


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
        self.elite, self.names = elite, dict(names or {})
        self.saver = Saver(
            population, directory, elite, log, self.state_dict, options.keep_checkpoints, self.ranks
        )
        self.iteration = 0
        self.progress = Progress.UNTRAINED
        self._unevaluated: list[Row] | None = None  # rows whose evaluation a stop postponed
        self._before_evaluation: dict[str, Any] | None = None  # the state, if a stop ended one
        self._started = time.perf_counter()
        self.evolution = Evolution(population, options, log)
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
            ended = False
            try:
                self._train_to_the_end(stop)
                ended = True
                signal_name = self._save_at_the_end(stop)
                self._call("on_end", stopped_by=signal_name or self.callbacks.stop_reason)
            except Exception as error:
                trained = self.progress is not Progress.UNTRAINED
                if self.callbacks.failed and trained:
                    evaluated = self.progress is Progress.EVALUATED
                    self.saver.save_after_callback(error, self.iteration, evaluated)
                elif not ended:
                    self.saver.rescue(error, self.iteration, trained)
                raise
        return signal_name

    def _train_to_the_end(self, stop: GracefulStop) -> None:
        self._call("on_start")
        self._evaluate_first(stop)
        ended = self.at_bound() or self.callbacks.stop_reason is not None
        while not ended and self._stop_requested(stop) is None:
            ended = self._run_iteration(stop)
        if (reason := self.callbacks.stop_reason) is not None:
            message = f"Stopped after iteration {self.iteration}. {reason}"
            self.log.report(logger, message)

    def _save_at_the_end(self, stop: GracefulStop) -> str | None:
        """The signal that stopped any of the processes, also while saving."""
        signal_name = self._stop_requested(stop)
        evaluated = self.progress is Progress.EVALUATED
        unsaved = evaluated or self.progress is Progress.TRAINED
        if signal_name is None and unsaved and self.options.checkpoint_steps is not None:
            self._save(evaluated)
            signal_name = self._stop_requested(stop)  # it may have come meanwhile
        if signal_name is not None:
            self.saver.save_after_stop(signal_name, self.iteration, evaluated)
        return signal_name

    def _save(self, evaluated: bool = False) -> None:
        where = self.saver.save(self.iteration, evaluated)
        if where is not None and where != self._saved:  # the last iteration may be saved already
            self._saved = where
            self._call("on_checkpoint", checkpoint=where)

    def _call(self, method: str, **also: Any) -> None:
        """Call the callbacks, with the rows of the last iteration."""
        if self.callbacks:
            progress = RunProgress(
                iteration=self.iteration,
                wall_seconds=time.perf_counter() - self._started,
                agents=self.population.agents,
                rows=self._rows,
                directory=self.saver.directory.path,
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
            "wall_seconds": time.perf_counter() - self._started,
            **self.population.state_dict(),
            "unevaluated_rows": self._unevaluated,
            "log": self.log.state_dict(),
            "callbacks": self.callbacks.state_dict(),
            "random": self.ranks.gather(random_streams()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; the agents are restored already."""
        self.population.load_state_dict(state)
        self.iteration = state["iteration"]
        if self.elite is not None:
            self.elite.resume(state["run"])
        self._unevaluated = state["unevaluated_rows"]
        self.callbacks.load_state_dict(state.get("callbacks", []))
        self.progress = Progress.RESUMED
        self._started = time.perf_counter() - state["wall_seconds"]
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
        ended = self.at_bound() or self.callbacks.stop_reason is not None
        evolved = resumed and not ended and self.evolution.evolve(self.iteration)
        if evolved or (resumed and postponed):
            self.progress = Progress.EVALUATED

    def _run_iteration(self, stop: GracefulStop) -> bool:
        """Whether a bound is reached afterwards; asked once, as more time may pass until later."""
        self.iteration += 1
        rows = self._rows = []
        try:
            for member in self.population:
                member.agent.set_reference_policy(member.collector.num_epochs)
            experiences = collect(self.population.members)
            for member, experience in zip(self.population, experiences, strict=True):
                rows.append(self._train(member, experience))
            ended = self.at_bound()
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
        agent = member.agent
        experience = gather_statistics(collected, self.ranks)
        check_failures(experience)
        started = time.perf_counter()
        # Before the call: there may be something to save also when it fails.
        self.progress = Progress.TRAINED
        metrics = agent.learn(experience.experiences, **experience.learn_arguments)
        learning_seconds = time.perf_counter() - started
        member.consumed += experience.steps
        agent.total_steps = member.steps
        rewards = experience.kept_rewards
        if len(rewards):
            agent.scores.append(float(rewards.mean()))
        self._warn_of_flat_rewards(member, experience)
        self.log.write_samples(self.iteration, agent.index, experience.few_samples)
        self.log.show_training(agent, self.iteration, experience)
        return {
            **self._row(member),
            **reward_statistics(rewards, self.options.accuracy_threshold),
            **named_reward_statistics(experience),
            "failed_completions": float(experience.failed_completions),
            **time_statistics(experience, learning_seconds),
            **experience.metrics,
            **{name: float(value) for name, value in metrics.items()},
        }

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
        for member, row, result in zip(self.population, rows, results, strict=True):
            row |= {**result, "wall_seconds": time.perf_counter() - self._started}
            member.agent.steps.append(member.steps)
        self._note_best()
        return True

    def _note_best(self) -> None:
        leader, best = self.population.leader.agent, self.population.best
        fitness = float(leader.fitness[-1])
        better = best is None or fitness > best.fitness
        # One that could not be saved does not count, so that the next best is saved instead.
        if better and self.saver.save_elite(leader, trained=self.iteration > 0):
            self.population.best = Best(leader.index, fitness, self.iteration)

    def _row(self, member: Member) -> Row:
        return {
            "iteration": self.iteration,
            "agent": member.agent.index,
            "steps": member.steps,
            "wall_seconds": time.perf_counter() - self._started,
        }

    def _write_rows(self, rows: list[Row]) -> None:
        consumed = max(member.consumed for member in self.population)
        self.log.write_rows(rows, consumed, self.population.best)

    def at_bound(self) -> bool:
        """Whether time is up, or an agent at ``max_steps``, or the data at ``num_epochs``."""
        steps, epochs = self.options.max_steps, self.options.num_epochs
        seconds = self.options.max_wall_seconds
        if seconds is not None:
            elapsed = self.ranks.gather(time.perf_counter() - self._started)[0]
            if elapsed >= seconds:
                return True
        return any(
            (steps is not None and member.consumed >= steps)
            or (epochs is not None and self.population.passes(member) >= epochs)
            for member in self.population
        )

    def _stop_requested(self, stop: GracefulStop) -> str | None:
        """The signal that asked any of the processes to stop."""
        return strongest(self.ranks.gather(stop.requested))

    def _warn_of_flat_rewards(self, member: Member, experience: Experience) -> None:
        """Warn about iterations in which no group held two different rewards."""
        if bool(experience.varies.any()):
            member.flat_iterations = 0
            return
        member.flat_iterations += 1
        if member.flat_iterations % FLAT_WINDOW == 0 and self.ranks.rank == 0:
            logger.warning(
                "%s agent %d learns nothing: in the last %d iterations (%d to %d) no group held "
                "two different rewards, so all advantages were zero. The mean reward of the last "
                "one was %.4g. %s",
                member.agent.algo,
                member.agent.index,
                FLAT_WINDOW,
                self.iteration - FLAT_WINDOW + 1,
                self.iteration,
                float(experience.kept_rewards.mean()),
                remedy_for_flat_rewards(experience),
            )
