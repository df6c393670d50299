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

import inspect
import json
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from agilerl.checks import COUNT, InstanceOf, Number, finite_number, require, shorten, warn_once
from agilerl.llm_envs.rewards import RewardFunction, RewardPool
from agilerl.llm_envs.seeds import EVALUATION_SEED_START
from agilerl.llm_envs.timeouts import CallOutcome, TimeoutExecutor

logger = logging.getLogger(__name__)

Task: TypeAlias = Mapping[str, Any]
"""A ``question`` (text) and its ``answer``, which only the reward function sees."""
TaskFunction: TypeAlias = Callable[[int | None], Task]
"""From a seed (None: any) to a task."""
Tasks: TypeAlias = Sequence[Task] | TaskFunction

# The closing tag may be missing: generation stops there, or the model was cut off.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

_HOW_TO_CALL = """\
You can use tools. To call one, write
<tool_call>{"name": "the tool", "arguments": {"argument": "value"}}</tool_call>
and wait for its result, which comes as <tool_response>. A reply without a call is your answer."""


class ToolEnv:
    """A text environment in which a question is answered with the help of tools.

    Its observations are text; wrap it in ``TokenObservationWrapper`` to train on it. Several calls
    in one reply are made in order and answered together. If a call fails (unknown tool, broken
    JSON, exception, timeout), its result is an ``error: ...`` that the model can react to.

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
        instructions: Text before the question; None: how to call, and the list of tools.
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

    Raises:
        TypeError: An argument of the wrong type; a tool that keyword arguments cannot call.
        ValueError: A number out of range; no tasks or no tools; a task without question or answer.
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
    ) -> None:
        self._tasks = _checked_tasks("tasks", tasks)
        self._test_tasks = None if test_tasks is None else _checked_tasks("test_tasks", test_tasks)
        _check_tag("reasoning_end", reasoning_end)
        _check_tag("reasoning_start", reasoning_start)
        Number(0, integer=True, optional=True)("max_calls", max_calls)
        COUNT("max_result_characters", max_result_characters)
        self.reasoning_end = reasoning_end
        self.reasoning_start = reasoning_start
        self.tools = _checked_tools(tools)
        self.max_calls = max_calls
        self.call_cost = finite_number("call_cost is", call_cost, "pass a number such as 0.01")
        self.max_result_characters = max_result_characters
        self.instructions = describe_tools(tools) if instructions is None else instructions
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
            Instructions and question, and an empty info.

        Raises:
            TypeError: ``tasks`` returned no task.
            ValueError: The task has no question or no answer.
        """
        self._task, self.calls_made = self._task_for(seed), 0
        question: str = self._task["question"]
        return f"{self.instructions}\n\n{question}" if self.instructions else question, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make the calls in a reply, or score it.

        Returns:
            The results, ``-call_cost`` per call, False, False, and an empty info; for a reply
            without a call: no text, its reward, True, False, and an empty info.

        Raises:
            RewardError: The reward function raised or ran out of time.
            RuntimeError: No episode is running.
            TypeError: The reward function returned no number.
            ValueError: It returned one that is not finite.
        """
        if self._task is None:
            raise RuntimeError("no episode is running; call reset() first")
        reply = self._without_reasoning(action)
        requests = _CALL.findall(reply)
        if requests:
            return self._answer(requests), 0.0 - self.call_cost * len(requests), False, False, {}
        task, self._task = self._task, None
        (reward,) = self._rewards.score([reply], [task["answer"]], [task["question"]])
        return "", reward, True, False, {}

    def close(self) -> None:
        """Stop the threads that async tools and reward functions run on."""
        self._executor.close()
        self._rewards.close()

    def _task_for(self, seed: int | None) -> Task:
        tasks, index = self._tasks, seed
        if seed is not None and seed >= EVALUATION_SEED_START:
            if self._test_tasks is not None:
                tasks, index = self._test_tasks, seed - EVALUATION_SEED_START
            elif not callable(tasks):
                warn_once(
                    logger,
                    "Evaluation is on the tasks that are trained on; pass test_tasks=[...] to keep "
                    "them apart.",
                )
        if callable(tasks):
            return _checked_task(tasks(seed))
        return random.choice(tasks) if index is None else tasks[index % len(tasks)]

    def _without_reasoning(self, action: str) -> str:
        if self.reasoning_end is None:
            return action
        _, end, reply = action.rpartition(self.reasoning_end)
        unended = not end if self.reasoning_start is None else self.reasoning_start in reply
        return "" if unended else reply

    def _answer(self, requests: list[str]) -> str:
        """The responses to all calls of a reply."""
        deadline = time.monotonic() + self._executor.timeout
        outcomes = [self._make(request, deadline - time.monotonic()) for request in requests]
        texts = [_as_result(outcome) for outcome in outcomes]
        return "\n".join(f"<tool_response>\n{self._cut(t)}\n</tool_response>" for t in texts)

    def _make(self, request: str, seconds: float) -> CallOutcome:
        """Make one call, or say why it cannot be made."""
        if self.max_calls is not None and self.calls_made >= self.max_calls:
            return _refused(f"all {self.max_calls} calls are used; answer now")
        call = self._read(request)
        if isinstance(call, str):
            return _refused(call)
        if seconds <= 0:
            return _refused("not made, the calls before it took all the time there is")
        self.calls_made += 1
        (outcome,) = self._executor.run([call], seconds=seconds)
        if outcome.timed_out:
            return _refused(
                f"no result, the calls of a reply have {self._executor.timeout:g} s in all"
            )
        return outcome

    def _read(self, request: str) -> Callable[[], Any] | str:
        """The function call that a request describes, or what is wrong with the request."""
        try:
            call = json.loads(request)
        except (ValueError, RecursionError) as error:
            return f"not valid JSON: {error}"
        if not isinstance(call, dict) or not isinstance(call.get("arguments", {}), dict):
            return 'a call is {"name": ..., "arguments": {...}}'
        name = call.get("name")
        if not isinstance(name, str) or name not in self.tools:
            return f"no tool {name!r}; the tools are {', '.join(self.tools)}"
        return partial(_as_text, self.tools[name], call.get("arguments", {}))

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_result_characters:
            return text
        return f"{text[: self.max_result_characters]}... (cut, {len(text)} characters in all)"


def describe_tools(tools: Mapping[str, Callable[..., Any]]) -> str:
    """Instructions: how to call, and each tool's signature and first docstring paragraph."""
    lines = [_HOW_TO_CALL, "", "Tools:"]
    for name, tool in tools.items():
        signature = _signature(tool)
        shown = "(...)" if signature is None else str(signature)
        paragraph = (inspect.getdoc(tool) or "").split("\n\n")[0]
        lines.append(f"- {name}{shown}: {' '.join(paragraph.split())}".rstrip(": "))
    return "\n".join(lines)


def _as_text(tool: Callable[..., Any], arguments: dict[str, Any]) -> str | Awaitable[str]:
    """Call a tool and convert its result, both within the time limit."""
    result = tool(**arguments)
    return _awaited_text(result) if inspect.isawaitable(result) else str(result)


async def _awaited_text(result: Awaitable[Any]) -> str:
    return str(await result)


def _refused(reason: str) -> CallOutcome:
    return CallOutcome(0, value=f"error: {reason}")


def _as_result(outcome: CallOutcome) -> str:
    if outcome.error is None:
        return str(outcome.value)
    return f"error: {type(outcome.error).__name__}: {outcome.error}"


def _signature(tool: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(tool, eval_str=True)
    except NameError:  # An annotation that only type checkers can see.
        return inspect.signature(tool)
    except (TypeError, ValueError):  # Some builtins have none.
        return None


def _check_tag(name: str, tag: Any) -> None:
    InstanceOf(str, "text")(name, tag)
    require(tag != "", f"{name} is empty; pass a tag such as '</think>', or None")


def _checked_tools(tools: Any) -> dict[str, Callable[..., Any]]:
    InstanceOf(Mapping, "a dict of functions by name", optional=False)("tools", tools)
    require(len(tools) > 0, "tools is empty; pass at least one, such as {'search': search}")
    for name, tool in tools.items():
        require(
            isinstance(name, str) and callable(tool),
            f"tools has {name!r}: {shorten(tool)}; pass functions by name",
            TypeError,
        )
        signature = _signature(tool)
        for parameter in signature.parameters.values() if signature else ():
            require(
                parameter.kind is not parameter.POSITIONAL_ONLY,
                f"tools[{name!r}] takes {parameter.name!r} by position only, but tools are called "
                f"with keywords; wrap it: def {name}({parameter.name}): ...",
                TypeError,
            )
    return dict(tools)


def _checked_tasks(name: str, tasks: Any) -> list[Task] | TaskFunction:
    if callable(tasks):
        function: TaskFunction = tasks
        return function
    is_list = isinstance(tasks, Iterable) and not isinstance(tasks, str | Mapping)
    if not is_list:
        raise TypeError(f"{name} is {shorten(tasks)}; it must be a list of dicts or a function")
    checked = [_checked_task(task) for task in tasks]
    require(bool(checked), f"{name} is empty; pass at least one dict with question and answer")
    return checked


def _checked_task(task: Any) -> Task:
    InstanceOf(Mapping, "a dict with question and answer", optional=False)("a task", task)
    missing = [key for key in ("question", "answer") if key not in task]
    if missing:
        raise ValueError(
            f"the task {shorten(task)} has no {' and no '.join(missing)}; it must have both"
        )
    InstanceOf(str, "text", optional=False)("a task's question", task["question"])
    checked: Task = task
    return checked
