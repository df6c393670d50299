"""Question-answer tasks with tools: the model calls Python functions, their results come back.

One turn calls, the next sees the result, a text without a call is the answer::

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
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from agilerl.llm_envs.base import checked_int, finite_number, shorten
from agilerl.llm_envs.rewards import RewardFunction, RewardPool
from agilerl.llm_envs.tasks import Task, TaskPicker, Tasks
from agilerl.llm_envs.timeouts import CallOutcome, CallPool

# The closing tag may be missing: generation stops there, or the model was cut off.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

_HOW_TO_CALL = """\
You can use tools. To call one, write
<tool_call>{"name": "the tool", "arguments": {"argument": "value"}}</tool_call>
and wait for its result, which comes as <tool_response>. A reply without a call is your answer."""


class ToolEnv:
    """A text environment in which a question is answered with the help of tools.

    It gives text; ``TokenObservationWrapper`` makes it trainable. Several calls in one reply are
    made in their order and answered together. What goes wrong with a call (an unknown tool, broken
    JSON, an exception, a time-out) comes back as an ``error: ...`` that the model can react to.

    What a model says while it reasons is not looked at: a call there is not made, and the reward
    function does not see it. A reply whose reasoning has no end is an answer without text.

    The vector environment gives up a step after its ``step_timeout``, 60 s by default. A step here
    takes ``tool_timeout`` or ``reward_timeout`` at most, never both: keep them below it, so that a
    slow tool is told to the model instead of costing the episode.

    Args:
        tasks: Dicts with ``question`` and ``answer``; a seed picks task ``seed % len(tasks)``. Or a
            function from the seed (None: any) to such a dict.
        tools: Functions by name, plain or async, called with keyword arguments. Their signatures
            and the first paragraphs of their docstrings are shown to the model. They run in
            threads, those of different episodes at the same time, and async ones on an event loop
            of this environment: clients that belong to a loop must not be shared between several.
        reward_fn: ``reward_fn(completion, answer, question)`` scores the reply without a call.
        max_calls: Calls per episode that are made, at most; None: no limit but the turns.
        call_cost: Taken from the reward for every call in a reply, made or not.
        tool_timeout: Seconds that the calls of one reply may take, all together.
        max_result_characters: Longer results are cut, with a note.
        instructions: Text before the question; None: how to call, and the tools.
        reward_timeout: Seconds that ``reward_fn`` may take.
        failure_reward: Reward of a reply for which ``reward_fn`` raises or runs out of time; None
            raises ``RewardError``.
        test_tasks: As ``tasks``, for evaluation: the seeds from ``EVALUATION_SEED_START`` on. None:
            ``tasks`` are evaluated on too, which a function can keep apart by the seed.
        reasoning_end: What ends the reasoning; what counts follows the last of them. None: replies
            have no reasoning.
        reasoning_start: What begins it; without it and ``reasoning_end`` a reply is no reasoning.
            None: the prompt has begun it, as some chat templates do, and a reply without
            ``reasoning_end`` is nothing else.

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
        failure_reward: float | None = None,
        test_tasks: Tasks | None = None,
        reasoning_end: str | None = "</think>",
        reasoning_start: str | None = "<think>",
    ) -> None:
        self._tasks = TaskPicker(tasks, test_tasks)
        self.reasoning_end = _checked_tag("reasoning_end", reasoning_end)
        self.reasoning_start = _checked_tag("reasoning_start", reasoning_start)
        self.tools = _checked_tools(tools)
        self.max_calls = None if max_calls is None else checked_int("max_calls", max_calls, least=0)
        self.call_cost = finite_number("call_cost is", call_cost, "pass a number such as 0.01")
        self.max_result_characters = checked_int("max_result_characters", max_result_characters)
        self.instructions = describe_tools(tools) if instructions is None else instructions
        self._calls = CallPool(tool_timeout, called="tool", timeout_name="tool_timeout")
        self._rewards = RewardPool(reward_fn, reward_timeout, failure_reward, reward_workers=1)
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
        self._task, self.calls_made = self._tasks.pick(seed), 0
        question: str = self._task["question"]
        return f"{self.instructions}\n\n{question}" if self.instructions else question, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make the calls in a reply, or score it.

        Returns:
            The results, ``-call_cost`` per call, False, False, and an empty info; for a reply
            without a call: no text, its reward, True, False, and an empty info.

        Raises:
            RewardError: The reward function raised or ran out of time, and there is no
                ``failure_reward``.
            RuntimeError: No episode is running.
            TypeError: The reward function returned no number.
            ValueError: It returned one that is not finite.
        """
        if self._task is None:
            raise RuntimeError("no episode is running; call reset() first")
        said = self._said(action)
        requests = _CALL.findall(said)
        if requests:
            return self._answer(requests), 0.0 - self.call_cost * len(requests), False, False, {}
        task, self._task = self._task, None
        (reward,) = self._rewards.score([said], [task["answer"]], [task["question"]])
        return "", reward, True, False, {}

    def close(self) -> None:
        """Stop the threads that async tools and reward functions run on."""
        self._calls.close()
        self._rewards.close()

    def _said(self, action: str) -> str:
        """A reply without its reasoning."""
        if self.reasoning_end is None:
            return action
        _, end, said = action.rpartition(self.reasoning_end)
        begun = not end if self.reasoning_start is None else self.reasoning_start in said
        return "" if begun else said

    def _answer(self, requests: list[str]) -> str:
        """The responses to all calls of a reply."""
        deadline = time.monotonic() + self._calls.timeout
        outcomes = [self._make(request, deadline - time.monotonic()) for request in requests]
        texts = [_told(outcome) for outcome in outcomes]
        return "\n".join(f"<tool_response>\n{self._cut(t)}\n</tool_response>" for t in texts)

    def _make(self, request: str, seconds: float) -> CallOutcome:
        """Make one call, if it can be made."""
        if self.max_calls is not None and self.calls_made >= self.max_calls:
            return _refused(f"all {self.max_calls} calls are used; answer now")
        call = self._read(request)
        if isinstance(call, str):
            return _refused(call)
        if seconds <= 0:
            return _refused("not made, the calls before it took all the time there is")
        self.calls_made += 1
        (outcome,) = self._calls.run([call], seconds=seconds)
        if outcome.timed_out:
            return _refused(
                f"no result, the calls of a reply have {self._calls.timeout:g} s in all"
            )
        return outcome

    def _read(self, request: str) -> Callable[[], Any] | str:
        """The call that a request stands for, or why it stands for none."""
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
    """How to call, and each tool with its signature and the first paragraph of its docstring."""
    lines = [_HOW_TO_CALL, "", "Tools:"]
    for name, tool in tools.items():
        signature = _signature(tool)
        shown = "(...)" if signature is None else str(signature)
        paragraph = (inspect.getdoc(tool) or "").split("\n\n")[0]
        lines.append(f"- {name}{shown}: {' '.join(paragraph.split())}".rstrip(": "))
    return "\n".join(lines)


def _as_text(tool: Callable[..., Any], arguments: dict[str, Any]) -> str | Awaitable[str]:
    """Runs under the time limit, the conversion of the result included."""
    result = tool(**arguments)
    return _awaited_text(result) if inspect.isawaitable(result) else str(result)


async def _awaited_text(result: Awaitable[Any]) -> str:
    return str(await result)


def _refused(reason: str) -> CallOutcome:
    return CallOutcome(0, value=f"error: {reason}")


def _told(outcome: CallOutcome) -> str:
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


def _checked_tag(name: str, tag: Any) -> str | None:
    if tag is not None and not isinstance(tag, str):
        raise TypeError(f"{name} must be text or None, got {shorten(tag)}")
    if tag == "":
        raise ValueError(f"{name} is empty; pass a tag such as '</think>', or None")
    return tag


def _checked_tools(tools: Any) -> dict[str, Callable[..., Any]]:
    if not isinstance(tools, Mapping):
        raise TypeError(f"tools must be a dict of functions by name, got {shorten(tools)}")
    if not tools:
        raise ValueError("tools is empty; pass at least one, such as {'calculator': calculator}")
    for name, tool in tools.items():
        if not isinstance(name, str) or not callable(tool):
            raise TypeError(f"tools has {name!r}: {shorten(tool)}; pass functions by name")
        signature = _signature(tool)
        for parameter in signature.parameters.values() if signature else ():
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise TypeError(
                    f"tools[{name!r}] takes {parameter.name!r} by position only, but tools are "
                    f"called with keywords; wrap it: def {name}({parameter.name}): ..."
                )
    return dict(tools)
