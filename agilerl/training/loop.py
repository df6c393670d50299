"""The one training loop: evaluate, collect, learn, log, checkpoint; stop cleanly when asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agilerl.training.arguments import LoopOptions
from agilerl.training.elite import Elite
from agilerl.training.interrupts import GracefulStop
from agilerl.training.protocols import Agent, Collector, Experience, Row
from agilerl.training.run_directory import RunDirectory
from agilerl.training.run_logging import RunLog

logger = logging.getLogger(__name__)

FLAT_WINDOW = 10
"""Consecutive iterations without reward variance after which the log says so."""


@dataclass
class Member:
    """One agent of the population and what the loop counts for it."""

    agent: Agent
    collector: Collector
    start_steps: int
    """Steps the agent had behind it before this run."""
    start_epochs: int
    """Passes its collector had behind it before this run."""
    consumed: int = 0
    """Steps of this run."""
    flat_iterations: int = 0
    """Iterations in a row in which no group had two different rewards."""

    @property
    def steps(self) -> int:
        """Steps in the agent's life."""
        return self.start_steps + self.consumed

    @property
    def epochs(self) -> int:
        """Passes over the data in this run."""
        return self.collector.num_epochs - self.start_epochs


@dataclass(frozen=True)
class Best:
    """The highest fitness seen in the run."""

    agent_index: int
    fitness: float
    iteration: int


class TrainingLoop:
    """Trains a population side by side, one ``learn`` per agent and iteration.

    Args:
        agents: The population; trained in place.
        collectors: One per agent; the same object may serve several, each then consumes its own
            batches in turn.
        options: Checked options.
        directory: Where checkpoints go.
        log: Where rows and samples go.
    """

    def __init__(
        self,
        agents: Sequence[Agent],
        collectors: Sequence[Collector],
        options: LoopOptions,
        directory: RunDirectory,
        log: RunLog,
    ) -> None:
        self.options, self.directory, self.log = options, directory, log
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
        # The options have checked that it is given exactly if save_elite is.
        self.elite = None if options.elite_path is None else Elite(options.elite_path)
        self._learned = False
        self._started = time.perf_counter()

    def run(self) -> None:
        """Train to a bound in the options, or until Ctrl-C or SIGTERM."""
        with GracefulStop() as stop:
            try:
                self._evaluate_before_training()
                while not self._finished() and stop.requested is None:
                    self._run_iteration(stop)
            except Exception as error:
                self._rescue(error)
                raise
            for member in self.members:
                if member.agent.steps[-1:] != [member.steps]:
                    member.agent.steps.append(member.steps)
            if stop.requested is not None:
                self._save_after_stop(stop.requested)

    def _evaluate_before_training(self) -> None:
        rows = [self._row(member) for member in self.members]
        self._evaluate(rows)
        self._write_rows(rows)

    def _run_iteration(self, stop: GracefulStop) -> None:
        self.iteration += 1
        rows: list[Row] = []
        try:
            for member in self.members:
                rows.append(self._train(member))
            interval = self.options.evaluation_interval
            # A stop must not wait for an evaluation, which may take longer than the grace period.
            if stop.requested is None and (self.iteration % interval == 0 or self._finished()):
                self._evaluate(rows)
        finally:
            self._write_rows(rows)
        every = self.options.checkpoint_steps
        if every is not None and self.iteration % every == 0:
            self._save(f"iteration_{self.iteration:08d}")

    def _train(self, member: Member) -> Row:
        agent = member.agent
        agent.set_reference_policy(member.collector.num_epochs)
        experience = member.collector.collect(agent)
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
            self.best = Best(leader.index, fitness, self.iteration)
            if self.elite is not None:
                self.elite.save(leader, trained=self.iteration > 0)

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
        if seconds is not None and time.perf_counter() - self._started >= seconds:
            return True
        return any(
            (steps is not None and member.consumed >= steps)
            or (epochs is not None and member.epochs >= epochs)
            for member in self.members
        )

    def _watch_variance(self, member: Member, experience: Experience) -> None:
        if has_reward_variance(experience.rewards):
            member.flat_iterations = 0
            return
        member.flat_iterations += 1
        if member.flat_iterations % FLAT_WINDOW == 0:
            logger.warning(
                "%s agent %d learns nothing: in the last %d iterations (%d to %d) all rewards of a "
                "group were equal in every group, so all advantages were zero. The mean reward of "
                "the last one was %.4g. Look at completions.jsonl, and make the task easier or "
                "harder, the reward finer, the temperature higher or the group larger.",
                member.agent.algo,
                member.agent.index,
                FLAT_WINDOW,
                self.iteration - FLAT_WINDOW + 1,
                self.iteration,
                float(experience.rewards.mean()),
            )

    def _save(self, name: str) -> str:
        agents = [member.agent for member in self.members]
        return str(self.directory.write_checkpoint(name, agents, self._run_state()))

    def _run_state(self) -> dict[str, Any]:
        collectors = list(
            {id(member.collector): member.collector for member in self.members}.values()
        )
        return {
            "iteration": self.iteration,
            "wall_seconds": time.perf_counter() - self._started,
            "agents": [
                {
                    "index": member.agent.index,
                    "algo": member.agent.algo,
                    "folder": f"agent_{member.agent.index}",
                    "steps": member.steps,
                    "steps_of_run": member.consumed,
                    "epochs_of_run": member.epochs,
                    "flat_iterations": member.flat_iterations,
                    "environment": [c is member.collector for c in collectors].index(True),
                    "fitness_history": [float(value) for value in member.agent.fitness],
                    "score_history": [float(value) for value in member.agent.scores],
                    "step_history": [int(value) for value in member.agent.steps],
                }
                for member in self.members
            ],
            "best": None if self.best is None else vars(self.best),
            "environments": [collector.state_dict() for collector in collectors],
        }

    def _save_after_stop(self, signal_name: str) -> None:
        where = self._save(f"iteration_{self.iteration:08d}")
        message = f"Stopped by {signal_name} after iteration {self.iteration}. Saved to {where}"
        if self.elite is not None and self.elite.saved:
            message += f"; the best agent so far is in {self.elite.path}"
        logger.info(message)
        self.log.say(message)

    def _rescue(self, error: Exception) -> None:
        """Save what was trained before ``error`` goes on, and tell it where."""
        if not self._learned:
            error.add_note(f"Nothing was trained yet. Logs are in {self.directory.path}")
            return
        try:
            where = self._save(f"crashed_in_iteration_{self.iteration:08d}")
        except Exception as second:
            logger.exception("Could not save the agents after %r", error)
            error.add_note(
                f"The agents could not be saved ({second!r}). Logs are in {self.directory.path}"
            )
        else:
            logger.error("Iteration %d failed; the agents were saved to %s", self.iteration, where)
            error.add_note(f"Iteration {self.iteration} failed. The agents were saved to {where}")


def accuracy(rewards: torch.Tensor, threshold: float) -> float:
    """Share of rewards (any shape) at or above the threshold."""
    # Compared in the rewards' own precision: a float32 reward of 1.3 has to reach 1.3.
    return float((rewards >= torch.tensor(threshold, dtype=rewards.dtype)).float().mean())


def reward_statistics(rewards: torch.Tensor, accuracy_threshold: float) -> dict[str, float]:
    """Mean, population standard deviation and accuracy of ``(P, G)`` rewards."""
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "accuracy": accuracy(rewards, accuracy_threshold),
    }


def time_statistics(experience: Experience, learning_seconds: float) -> dict[str, float]:
    """Seconds of each stage, and tokens generated per second of all three together."""
    seconds = experience.generation_seconds + experience.environment_seconds + learning_seconds
    return {
        "tokens_per_second": experience.generated_tokens / seconds,
        "generation_seconds": experience.generation_seconds,
        "environment_seconds": experience.environment_seconds,
        "learning_seconds": learning_seconds,
    }


def has_reward_variance(rewards: torch.Tensor) -> bool:
    """Whether some group (row of ``(P, G)``) holds two different rewards."""
    return bool((rewards != rewards[:, :1]).any())
