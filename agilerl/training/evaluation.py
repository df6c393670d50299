"""Evaluations as training functions make them: they stop between batches when asked."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from agilerl.algorithms.core.evaluation import EvaluationStopped
from agilerl.distributed import Ranks
from agilerl.training.interrupts import GracefulStop
from agilerl.typing import Act, ActionResult, EvaluableEnv, Evaluation, ReasoningPrompts

_evaluations = count()


class StopCheck:
    """Stops one evaluation when a signal has reached any of the processes.

    Each makes one for the same evaluation, and calls it whenever the agent is about to answer.

    Args:
        stop: Knows of the signals of this process.
        ranks: The processes.
    """

    def __init__(self, stop: GracefulStop, ranks: Ranks) -> None:
        self._stop, self._ranks = stop, ranks
        # All processes make the same evaluations, so the number is the same on each.
        self._event = f"stop evaluation {next(_evaluations)}"

    def __call__(self) -> None:
        """Raise ``EvaluationStopped`` if one has.

        Ranks answer at their own pace, so this is no collective.
        """
        if self._stop.requested is not None:
            self._ranks.notify(self._event)
        elif not self._ranks.notified(self._event):
            return
        raise EvaluationStopped


class WatchedEnv:
    """An environment in whose evaluations something is called before each batch of answers.

    Args:
        env: The environment, to which all else is left.
        before_answers: What is called.
    """

    def __init__(self, env: EvaluableEnv, before_answers: Callable[[], None]) -> None:
        self._env, self._before_answers = env, before_answers

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
        """As the environment's."""

        def answer(prompts: list[ReasoningPrompts]) -> ActionResult:
            self._before_answers()
            return act(prompts)

        return self._env.evaluate(answer, loop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)
