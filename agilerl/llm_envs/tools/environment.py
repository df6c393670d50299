"""Questions that are answered with tools: the model calls Python functions and reads the results.

A reply with a call is answered with its result; a reply without one is the final answer::

    What is 17 * 23 + 4?
    <tool_call>{"name": "calculator", "arguments": {"expression": "17*23 + 4"}}</tool_call>
        <tool_response>
        395
        </tool_response>
    395
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agilerl.checks import (
    COUNT,
    FLAG,
    InstanceOf,
    Number,
    finite_number,
    require,
    shorten,
    warn_once,
)
from agilerl.llm_envs.event_loop import awaited
from agilerl.llm_envs.failures import WrongRewardError
from agilerl.llm_envs.rewards import RewardFunction, RewardPool
from agilerl.llm_envs.timeouts import CallOutcome, TimeoutExecutor
from agilerl.llm_envs.tools.calls import CALL_FORMAT, ParseCalls, calls_in, tagged_calls
from agilerl.llm_envs.tools.functions import checked_tools, describe_tools, tool_schemas
from agilerl.llm_envs.tools.tasks import Task, TaskChoice, Tasks
from agilerl.typing import Observation

logger = logging.getLogger(__name__)


class ToolEnv:
    """A text environment in which a question is answered with the help of tools.

    Wrap it in ``TokenObservationWrapper`` to train on it. Several calls in one reply are made in
    order and answered together. If a call fails (unknown tool, broken JSON, exception, timeout),
    its result is an ``error: ...`` that the model can react to.

    Its observations are text, and the tools are described in the first one. With ``native_tools``
    the chat template shows the tools instead, and results are messages of the role ``tool`` (of the
    user, in a template without that role).

    Reasoning is skipped: calls in it are not made, and the reward function does not see it. A reply
    whose reasoning does not end is an answer without text.

    The vector environment ends a step after its ``step_timeout``, 60 s by default. A step here
    takes ``tool_timeout``, or ``reward_timeout`` (and that again for every retry) at most, never
    both: keep them below it, so that a slow tool is reported to the model instead of ending the
    episode.

    Args:
        tasks: Dicts with ``question`` and ``answer``; a seed stands for task ``seed % len(tasks)``.
            Or a function from the seed (None: any) to such a dict.
        tools: Functions by name, plain or async, called with keyword arguments. Their signatures
            and the first paragraphs of their docstrings are shown to the model. They run in
            threads, those of different episodes at the same time, and async ones on an event loop
            of this environment: clients that belong to a loop must not be shared between several.
        reward_fn: ``reward_fn(completion, answer, question)`` scores the reply without a call.
        max_calls: Largest number of calls per episode; None: no limit but the turns.
        call_cost: Subtracted from the reward for every call in a reply, made or not.
        tool_timeout: Seconds that all calls of one reply may take together.
        max_result_characters: Longer results are cut off, with a note.
        instructions: Text before the question; None: how to call, and the list of tools; nothing
            with ``native_tools``.
        reward_timeout: Seconds that ``reward_fn`` may take.
        failure_retries: Further calls of a ``reward_fn`` that raised or ran out of time. If it
            fails again, so does the episode: see ``on_failure`` of the vector environment.
        test_tasks: As ``tasks``, for evaluation: the seeds from ``EVALUATION_SEED_START`` on. None:
            evaluation is on ``tasks`` too; a function can tell the two apart by the seed.
        reasoning_end: Tag that ends the reasoning; only text after the last one counts. None:
            replies have no reasoning.
        reasoning_start: Tag that begins it; a reply with neither tag has no reasoning. None: the
            prompt ends with the tag, as in some chat templates, so that a reply without
            ``reasoning_end`` is all reasoning.
        native_tools: The chat template shows the tools to the model, which needs type hints and
            docstrings in Google's style.
        parse_calls: Finds the calls in a reply: a list of dicts with ``name`` and ``arguments``,
            empty for a final answer. What it raises is told to the model. None: calls as in the
            example above, as the templates of Hermes and Qwen teach them.

    Raises:
        TypeError: An argument of the wrong type; a tool that keyword arguments cannot call.
        ValueError: A number out of range; no tasks or no tools; a task without question or answer;
            a native tool without type hints or docstring.
    """

    def __init__(  # noqa: PLR0913 - options that belong together
        self,
        tasks: Tasks,
        tools: Mapping[str, Callable[..., Any]],
        reward_fn: RewardFunction,
        *,
        max_calls: int | None = None,
        call_cost: float = 0.0,
        tool_timeout: float = 30.0,
        max_result_characters: int = 2000,
        instructions: str | None = None,
        reward_timeout: float = 30.0,
        failure_retries: int = 0,
        test_tasks: Tasks | None = None,
        reasoning_end: str | None = "</think>",
        reasoning_start: str | None = "<think>",
        native_tools: bool = False,
        parse_calls: ParseCalls | None = None,
    ) -> None:
        self._tasks = TaskChoice(tasks, test_tasks)
        _check_tag("reasoning_end", reasoning_end)
        _check_tag("reasoning_start", reasoning_start)
        Number(0, integer=True, optional=True)("max_calls", max_calls)
        COUNT("max_result_characters", max_result_characters)
        self.reasoning_end = reasoning_end
        self.reasoning_start = reasoning_start
        FLAG("native_tools", native_tools)
        require(
            parse_calls is None or callable(parse_calls),
            f"parse_calls is {shorten(parse_calls)}; it must be a function from a reply to its "
            "calls, or None",
            TypeError,
        )
        self.tools = checked_tools(tools)
        self.native_tools = native_tools
        self.tool_schemas = tool_schemas(self.tools) if native_tools else []
        """What the chat template shows; empty without ``native_tools``."""
        self._parse_calls = parse_calls or tagged_calls
        self.max_calls = max_calls
        self.call_cost = finite_number("call_cost is", call_cost, "pass a number such as 0.01")
        self.max_result_characters = max_result_characters
        if instructions is None:
            instructions = "" if native_tools else describe_tools(tools)
        self.instructions = instructions
        self._executor = TimeoutExecutor(tool_timeout, name="tool", timeout_name="tool_timeout")
        self._rewards = RewardPool(
            reward_fn, reward_timeout, reward_workers=1, failure_retries=failure_retries
        )
        self._task: Task | None = None
        self.calls_made = 0
        """Calls in this episode."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode.

        Returns:
            Instructions and question, and an info that is empty or, with ``native_tools``, has
            ``"tool_schemas"``.

        Raises:
            TypeError: ``tasks`` returned no task.
            ValueError: The task has no question or no answer.
        """
        self._task, self.calls_made = self._tasks.of_seed(seed), 0
        question: str = self._task["question"]
        info = {"tool_schemas": self.tool_schemas} if self.native_tools else {}
        return f"{self.instructions}\n\n{question}" if self.instructions else question, info

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Make the calls in a reply, or score it.

        Returns:
            The results, ``-call_cost`` per call, False, False, and an empty info; for a reply
            without a call: no text, its reward, True, False, and an empty info.

        Raises:
            RewardError: The reward function raised or ran out of time.
            RuntimeError: No episode is running.
            TypeError: ``parse_calls`` returned no list.
            WrongRewardError: The reward function returned no finite number. In a batch this is no
                failure of the episode, but ends the call.
        """
        if self._task is None:
            raise RuntimeError("no episode is running; call reset() first")
        reply = self._without_reasoning(action)
        calls = calls_in(reply, self._parse_calls)
        if calls:
            return self._answer(calls), 0.0 - self.call_cost * len(calls), False, False, {}
        task, self._task = self._task, None
        try:
            (reward,) = self._rewards.score([reply], [task["answer"]], [task["question"]])
        except (TypeError, ValueError) as error:
            raise WrongRewardError(str(error)) from error
        return "", reward, True, False, {}

    def close(self) -> None:
        """Stop the threads that async tools and reward functions run on."""
        self._executor.close()
        self._rewards.close()

    def _without_reasoning(self, action: str) -> str:
        if self.reasoning_end is None:
            return action
        _, end, reply = action.rpartition(self.reasoning_end)
        unended = not end if self.reasoning_start is None else self.reasoning_start in reply
        return "" if unended else reply

    def _answer(self, calls: list[dict[str, Any]]) -> Observation:
        """The responses to all calls of a reply."""
        deadline = time.monotonic() + self._executor.timeout
        outcomes = [self._make(call, deadline - time.monotonic()) for call in calls]
        texts = [self._cut(_as_result(outcome)) for outcome in outcomes]
        if not self.native_tools:
            return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)
        return [
            {"role": "tool", "name": str(call.get("name", "unknown")), "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]

    def _make(self, call: dict[str, Any], seconds: float) -> CallOutcome:
        """Make one call, or say why it cannot be made."""
        if self.max_calls is not None and self.calls_made >= self.max_calls:
            return _refused(f"all {self.max_calls} calls are used; answer now")
        name, arguments = call.get("name"), call.get("arguments", {})
        if "error" in call or not isinstance(arguments, dict):
            return _refused(str(call.get("error", CALL_FORMAT)))
        if not isinstance(name, str) or name not in self.tools:
            return _refused(f"no tool {name!r}; the tools are {', '.join(self.tools)}")
        if seconds <= 0:
            return _refused("not made, the calls before it took all the time there is")
        self.calls_made += 1
        made = partial(_call, self.tools[name], arguments)
        (outcome,) = self._executor.run([made], seconds=seconds)
        if outcome.timed_out:
            return _refused(
                f"no result, the calls of a reply have {self._executor.timeout:g} s in all"
            )
        if outcome.error is not None:
            warn_once(
                logger,
                "The tool %s raised %s, which the model is told as its result: wrong arguments of "
                "the model, or a mistake in the tool.",
                *(name, type(outcome.error).__name__),
            )
        return outcome

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_result_characters:
            return text
        return f"{text[: self.max_result_characters]}... (cut, {len(text)} characters in all)"


def _call(tool: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a tool and convert its result to text, both within the time limit."""
    return str(awaited(tool(**arguments)))


def _refused(reason: str) -> CallOutcome:
    return CallOutcome(0, value=f"error: {reason}")


def _as_result(outcome: CallOutcome) -> str:
    if outcome.error is None:
        return str(outcome.value)
    return f"error: {type(outcome.error).__name__}: {outcome.error}"


def _check_tag(name: str, tag: Any) -> None:
    InstanceOf(str, "text")(name, tag)
    require(tag != "", f"{name} is empty; pass a tag such as '</think>', or None")


def shown_tools(env: Any, tools: Any) -> list[dict[str, Any]]:
    """The schemas of the tools that a chat template has to show.

    Args:
        env: Its ``tool_schemas``, if it has any, are taken where no tools are given.
        tools: Functions or schemas, or None.

    Raises:
        TypeError: As :func:`tool_schemas`.
        ValueError: As :func:`tool_schemas`.
    """
    if tools is None:
        return list(getattr(env, "tool_schemas", []))
    return tool_schemas(tools)
