"""The one training loop: evaluate, collect, learn, log, checkpoint; stop cleanly when asked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from agilerl.distributed import Ranks
from agilerl.training.checkpoint.elite import Elite
from agilerl.training.checkpoint.random_streams import random_streams, set_random_streams
from agilerl.training.checkpoint.run_checkpoint import FORMAT
from agilerl.training.checkpoint.run_directory import RunDirectory
from agilerl.training.checkpoint.saver import Saver
from agilerl.training.interrupts import GracefulStop, strongest
from agilerl.training.logs.row_statistics import (
    accuracy,
    has_reward_variance,
    reward_statistics,
    time_statistics,
    warn_of_flat_rewards,
)
from agilerl.training.logs.run_log import RunLog
from agilerl.training.merging import merged
from agilerl.training.options import LoopOptions
from agilerl.training.population import Best, Member, environments_of
from agilerl.training.protocols import Agent, Collector, Experience, Row

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
        self.options, self.log = options, log
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
        self.saver = Saver(
            agents, directory, elite, log, self.state_dict, options.keep_checkpoints, self.ranks
        )
        self.iteration = 0
        self.best: Best | None = None
        self._resumed = False
        self._learned = False
        self._iterated = self._made_up = False
        self._unevaluated: list[Row] | None = None
        self._started = time.perf_counter()

    def run(self) -> str | None:
        """Train to a bound in the options, or until Ctrl-C or SIGTERM.

        Returns:
            Name of the signal that stopped any of the processes, None if none did.
        """
        with GracefulStop() as stop:
            try:
                self._begin()
                ended = self._at_bound()
                while not ended and self._stop_requested(stop) is None:
                    ended = self._run_iteration(stop)
            except Exception as error:
                self.saver.rescue(error, self.iteration, trained=self._learned)
                raise
            signal_name = self._stop_requested(stop)
            evaluated_later = self._made_up and not self._iterated
            unsaved = self._made_up or self._iterated
            if signal_name is None and unsaved and self.options.checkpoint_steps is not None:
                self.saver.save(self.iteration, evaluated_later)
                signal_name = self._stop_requested(stop)  # it may have come meanwhile
            if signal_name is not None:
                self.saver.save_after_stop(signal_name, self.iteration, evaluated_later)
            # After the save: a run that goes on from there must not find this entry.
            for member in self.members:
                if member.agent.steps[-1:] != [member.steps]:
                    member.agent.steps.append(member.steps)
        return signal_name

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
        self._made_up = self._unevaluated is not None
        rows = self._unevaluated or [self._row(member) for member in self.members]
        self._evaluate(rows)
        self._write_rows(rows)
        self._unevaluated = None

    def _run_iteration(self, stop: GracefulStop) -> bool:
        """Returns whether the run has come to a bound: asked once, because time goes on."""
        self.iteration += 1
        self._iterated = True
        rows: list[Row] = []
        try:
            for member in self.members:
                rows.append(self._train(member))
            ended = self._at_bound()
            due = ended or self.iteration % self.options.evaluation_interval == 0
            # A stop must not wait for an evaluation, which may take longer than the grace period.
            if due and self._stop_requested(stop) is not None:
                self._unevaluated = rows
            elif due:
                self._evaluate(rows)
        finally:
            self._write_rows(rows)
        every = self.options.checkpoint_steps
        if every is not None and self.iteration % every == 0:
            self.saver.save(self.iteration)
        return ended

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
        better = self.best is None or fitness > self.best.fitness
        # One that could not be saved is not noted, so that the next best takes its place on disk.
        if better and self.saver.save_elite(leader, trained=self.iteration > 0):
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

    def _at_bound(self) -> bool:
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
        return strongest(self.ranks.gather(stop.requested))

    def _watch_variance(self, member: Member, experience: Experience) -> None:
        if has_reward_variance(experience.rewards):
            member.flat_iterations = 0
            return
        member.flat_iterations += 1
        if member.flat_iterations % FLAT_WINDOW == 0 and self.ranks.rank == 0:
            mean = float(experience.rewards.mean())
            warn_of_flat_rewards(member.agent, self.iteration, FLAT_WINDOW, mean)
