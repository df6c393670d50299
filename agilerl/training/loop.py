"""The one training loop: evaluate, collect, learn, log, checkpoint; stop cleanly when asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from agilerl.llm.engine.ranks import Ranks
from agilerl.training.elite import Elite
from agilerl.training.interrupts import GracefulStop
from agilerl.training.members import Best, Member, environments_of
from agilerl.training.merging import merged
from agilerl.training.options import LoopOptions
from agilerl.training.protocols import Agent, Collector, Experience, Row
from agilerl.training.random_streams import random_streams, set_random_streams
from agilerl.training.row_statistics import (
    accuracy,
    has_reward_variance,
    reward_statistics,
    time_statistics,
    warn_of_flat_rewards,
)
from agilerl.training.run_checkpoint import FORMAT, WRITE_ERRORS, checkpoint_name
from agilerl.training.run_directory import RunDirectory
from agilerl.training.run_logging import RunLog

logger = logging.getLogger(__name__)

FLAT_WINDOW = 10
"""Consecutive iterations without reward variance after which the log says so."""


class TrainingLoop:
    """Trains a population side by side, one ``learn`` per agent and iteration.

    Args:
        agents: The population; trained in place.
        collectors: One per agent; the same object may serve several, each then consumes its own
            batches in turn.
        options: Checked options.
        directory: Where checkpoints go.
        log: Where rows and samples go.
        elite: Where the best agent goes, if anywhere.
        facts: Names of the run and its environment, for checkpoints.
        ranks: The processes that train together; each runs this loop on its own part of the data,
            and all take every decision alike.
    """

    def __init__(
        self,
        agents: Sequence[Agent],
        collectors: Sequence[Collector],
        options: LoopOptions,
        directory: RunDirectory,
        log: RunLog,
        elite: Elite | None = None,
        facts: Mapping[str, str] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = Ranks() if ranks is None else ranks
        self.options, self.directory, self.log = options, directory, log
        self.elite, self.facts = elite, dict(facts or {})
        self.members = [
            Member(
                agent=agent,
                collector=collector,
                start_steps=agent.steps[-1] if agent.steps else 0,
                start_epochs=collector.num_epochs,
            )
            for agent, collector in zip(agents, collectors, strict=True)
        ]
        self.iteration = 0
        self.best: Best | None = None
        self._resumed = False
        self._learned = False
        self._unevaluated: list[Row] | None = None
        self._started = time.perf_counter()

    def run(self) -> None:
        """Train to a bound in the options, or until Ctrl-C or SIGTERM."""
        with GracefulStop() as stop:
            try:
                self._begin()
                while not self._finished() and self._stop_requested(stop) is None:
                    self._run_iteration(stop)
            except Exception as error:
                self._rescue(error)
                raise
            signal_name = self._stop_requested(stop)
            if signal_name is not None:
                self._save_after_stop(signal_name)
            # After the save: a run that goes on from there must not find this entry.
            for member in self.members:
                if member.agent.steps[-1:] != [member.steps]:
                    member.agent.steps.append(member.steps)

    def state_dict(self, in_iteration: bool = False) -> dict[str, Any]:
        """What a run needs to go on, but for the agents; JSON-compatible.

        Args:
            in_iteration: Whether an iteration is under way, so that no run can go on from here.
        """
        environments = environments_of(self.members)
        fitness = [member.agent.fitness[-1] for member in self.members if member.agent.fitness]
        streams = self.ranks.gather(random_streams())
        return {
            "format": FORMAT,
            **self.facts,
            "iteration": self.iteration,
            "in_iteration": in_iteration,
            "wall_seconds": time.perf_counter() - self._started,
            "fitness": float(max(fitness)) if fitness else None,
            "best": None if self.best is None else vars(self.best),
            "elite": None if self.elite is None else self.elite.state_dict(),
            "agents": [
                {
                    **member.state_dict(),
                    "environment": [c is member.collector for c in environments].index(True),
                }
                for member in self.members
            ],
            "environments": [collector.state_dict() for collector in environments],
            "unevaluated_rows": self._unevaluated,
            "log": self.log.state_dict(),
            "random": streams[0],
            "random_of_other_ranks": streams[1:],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; agents and collectors are there already."""
        for member, saved in zip(self.members, state["agents"], strict=True):
            member.load_state_dict(saved)
        self.iteration = state["iteration"]
        self.best = None if state["best"] is None else Best(**state["best"])
        if self.elite is not None:
            self.elite.load_state_dict(state["elite"])
        self._unevaluated = state["unevaluated_rows"]
        self._resumed = self._learned = True
        self._started = time.perf_counter() - state["wall_seconds"]
        streams = [state["random"], *state.get("random_of_other_ranks", [])]
        # Of another number of processes: all alike, which only concerns environments.
        set_random_streams(streams[self.ranks.rank % len(streams)])

    def _begin(self) -> None:
        """Evaluate before the first iteration; or what a stop kept the interrupted run from."""
        if self._resumed and self._unevaluated is None:
            return
        rows = self._unevaluated or [self._row(member) for member in self.members]
        self._evaluate(rows)
        self._write_rows(rows)
        self._unevaluated = None

    def _run_iteration(self, stop: GracefulStop) -> None:
        self.iteration += 1
        rows: list[Row] = []
        try:
            for member in self.members:
                rows.append(self._train(member))
            due = self.iteration % self.options.evaluation_interval == 0 or self._finished()
            # A stop must not wait for an evaluation, which may take longer than the grace period.
            if due and self._stop_requested(stop) is not None:
                self._unevaluated = rows
            elif due:
                self._evaluate(rows)
        finally:
            self._write_rows(rows)
        every = self.options.checkpoint_steps
        if every is not None and self.iteration % every == 0:
            self._save_and_carry_on()

    def _train(self, member: Member) -> Row:
        agent = member.agent
        agent.set_reference_policy(member.collector.num_epochs)
        experience = merged(member.collector.collect(agent), self.ranks)
        started = time.perf_counter()
        # From here on there may be something to save, also when this very call fails.
        self._learned = True
        metrics = agent.learn(experience.experiences, **experience.learn_arguments)
        learning_seconds = time.perf_counter() - started
        member.consumed += experience.steps
        agent.scores.append(float(experience.rewards.mean()))
        self._watch_variance(member, experience)
        self.log.write_samples(self.iteration, agent.index, experience.samples)
        return {
            **self._row(member),
            **reward_statistics(experience.rewards, self.options.accuracy_threshold),
            **time_statistics(experience, learning_seconds),
            **experience.facts,
            **{name: float(value) for name, value in metrics.items()},
        }

    def _evaluate(self, rows: list[Row]) -> None:
        """Evaluate every agent, add the results to its row, keep the best agent so far."""
        for member, row in zip(self.members, rows, strict=True):
            started = time.perf_counter()
            rewards = torch.as_tensor(member.collector.evaluate(member.agent), dtype=torch.float32)
            row["evaluation_seconds"] = time.perf_counter() - started
            row["wall_seconds"] = time.perf_counter() - self._started
            row["fitness"] = float(member.agent.fitness[-1])
            row["eval_accuracy"] = accuracy(rewards, self.options.accuracy_threshold)
            member.agent.steps.append(member.steps)
        leader = max(self.members, key=lambda member: member.agent.fitness[-1]).agent
        fitness = float(leader.fitness[-1])
        if self.best is None or fitness > self.best.fitness:
            if self.elite is not None:
                try:
                    self.elite.save(leader, trained=self.iteration > 0)
                except WRITE_ERRORS as error:
                    # Not noted as the best, so that the next best takes its place on disk.
                    self._say_not_saved(f"best agent so far ({leader.index})", error)
                    return
            self.best = Best(leader.index, fitness, self.iteration)

    def _row(self, member: Member) -> Row:
        return {
            "iteration": self.iteration,
            "agent": member.agent.index,
            "steps": member.steps,
            "wall_seconds": time.perf_counter() - self._started,
        }

    def _write_rows(self, rows: list[Row]) -> None:
        self.log.write_rows(rows, max(member.consumed for member in self.members))

    def _finished(self) -> bool:
        """Whether time is up, or an agent at ``max_steps``, or a collector at ``num_epochs``."""
        steps, epochs = self.options.max_steps, self.options.num_epochs
        seconds = self.options.max_wall_seconds
        if seconds is not None:
            elapsed = self.ranks.gather(time.perf_counter() - self._started)[0]
            if elapsed >= seconds:
                return True
        return any(
            (steps is not None and member.consumed >= steps)
            or (epochs is not None and member.epochs >= epochs)
            for member in self.members
        )

    def _stop_requested(self, stop: GracefulStop) -> str | None:
        """The signal that asked any of the processes to stop."""
        return next(filter(None, self.ranks.gather(stop.requested)), None)

    def _watch_variance(self, member: Member, experience: Experience) -> None:
        if has_reward_variance(experience.rewards):
            member.flat_iterations = 0
            return
        member.flat_iterations += 1
        if member.flat_iterations % FLAT_WINDOW == 0 and self.ranks.rank == 0:
            mean = float(experience.rewards.mean())
            warn_of_flat_rewards(member.agent, self.iteration, FLAT_WINDOW, mean)

    def _save(self, name: str, in_iteration: bool = False) -> str:
        self.log.sync()
        agents = [member.agent for member in self.members]
        return str(self.directory.write_checkpoint(name, agents, self.state_dict(in_iteration)))

    def _save_and_carry_on(self) -> None:
        """Save; a full disk, say, is no reason to lose the run."""
        try:
            self._save(checkpoint_name(self.iteration))
        except WRITE_ERRORS as error:
            self._say_not_saved(f"checkpoint of iteration {self.iteration}", error)
        else:
            self.directory.prune(self.options.keep_checkpoints)

    def _say_not_saved(self, what: str, error: Exception) -> None:
        message = (
            f"The {what} could NOT be saved in {self.directory.path}: {error!r}. Training goes on, "
            f"and what was saved before is kept ({self.directory.newest_checkpoint() or 'none'}). "
            "Free disk space: the next save is tried as planned."
        )
        if self.ranks.rank == 0:  # all know of it, one says it
            logger.error(message, exc_info=error)
            self.log.say(message)

    def _save_after_stop(self, signal_name: str) -> None:
        try:
            where = self._save(checkpoint_name(self.iteration))
        except Exception as error:
            newest = self.directory.newest_checkpoint() or "none"
            error.add_note(
                f"Stopped by {signal_name} after iteration {self.iteration}, which could not be "
                f"saved. The newest checkpoint: {newest}"
            )
            raise
        message = f"Stopped by {signal_name} after iteration {self.iteration}. Saved to {where}"
        if self.elite is not None and self.elite.saved:
            message += f"; the best agent so far is in {self.elite.path}"
        if self.ranks.rank == 0:
            logger.info(message)
            self.log.say(message)

    def _rescue(self, error: Exception) -> None:
        """Save what was trained before ``error`` goes on, and tell it where."""
        if not self._learned:
            error.add_note(f"Nothing was trained yet. Logs are in {self.directory.path}")
            return
        if self.ranks.count > 1:
            # The others may be anywhere, and saving takes all of them.
            error.add_note(
                f"Process {self.ranks.rank} of {self.ranks.count} failed in iteration "
                f"{self.iteration}. The newest checkpoint: "
                f"{self.directory.newest_checkpoint() or 'none'}"
            )
            return
        name = f"crashed_in_{checkpoint_name(self.iteration)}"
        try:
            where = self._save(name, in_iteration=True)
        except Exception as second:
            logger.exception("Could not save the agents after %r", error)
            error.add_note(
                f"The agents could not be saved ({second!r}). Logs are in {self.directory.path}"
            )
        else:
            logger.error("Iteration %d failed; the agents were saved to %s", self.iteration, where)
            error.add_note(f"Iteration {self.iteration} failed. The agents were saved to {where}")
        newest = self.directory.newest_checkpoint()
        if newest is not None:
            error.add_note(f"To go on from before that: resume_from={str(newest)!r}")
