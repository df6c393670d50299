from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import threading
import time
from typing import Any

import pytest
import torch

from agilerl import checks
from agilerl.llm_envs import (
    EVALUATION_SEED_START,
    RewardError,
    SyncMultiTurnVecEnv,
    TokenObservationWrapper,
    ToolEnv,
)
from agilerl.testing import byte_tokenizer, calculator
from agilerl.typing import ActionResult, ReasoningPrompts

TASKS = [{"question": "2 + 3?", "answer": "5"}, {"question": "{6} * 7?", "answer": "42"}]


def right(completion: str, answer: str, question: str) -> float:
    return float(completion.strip() == answer)


def tool_env(**kwargs: Any) -> ToolEnv:
    arguments = {"tasks": TASKS, "tools": {"calculator": calculator}, "reward_fn": right}
    return ToolEnv(**{**arguments, **kwargs})


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def respond(env: ToolEnv, action: str) -> str:
    """What the one tool response in the observation says; the episode goes on."""
    env.reset(seed=0)
    observation, reward, terminated, truncated, _ = env.step(action)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert observation.startswith("<tool_response>\n")
    assert observation.endswith("\n</tool_response>")
    assert observation.count("tool_response>") == 2
    return observation.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


def test_an_episode() -> None:
    env = tool_env()
    prompt, info = env.reset(seed=1)
    assert prompt.endswith("\n\n{6} * 7?")
    assert '<tool_call>{"name": "the tool", "arguments"' in prompt
    assert "- calculator(expression: str) -> int | float: The value of an arithmetic" in prompt
    assert "Raises" not in prompt
    assert info == {}
    thought = "I compute it. " + call("calculator", expression="6 * 7")
    assert env.step(thought) == ("<tool_response>\n42\n</tool_response>", 0.0, False, False, {})
    assert env.step("42") == ("", 1.0, True, False, {})
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("42")
    env.reset(seed=0)
    assert env.step("42")[1] == 0.0
    env.close()


def test_an_episode_as_token_ids() -> None:
    tokenizer = byte_tokenizer()

    def player(prompts: list[ReasoningPrompts]) -> ActionResult:
        ids = []
        for prompt in prompts:
            had_result = "<tool_response>\n5\n" in prompt["text"]
            text = "5" if had_result else call("calculator", expression="2+3")
            answer = torch.tensor([[*tokenizer.encode(text), tokenizer.eos_token_id]])
            ids.append(torch.cat([prompt["input_ids"], answer], 1))
        return ActionResult(ids, [])

    env = SyncMultiTurnVecEnv(
        lambda: TokenObservationWrapper(tool_env(call_cost=0.5), tokenizer, 3), batch_size=2
    )
    episodes = env.play(player, [0, 1])
    assert episodes.rewards.tolist() == [[-0.5, 1, 0], [-0.5, 0, 0]]
    assert not episodes.failed.any()
    env.close()


def test_a_seed_picks_the_task() -> None:
    env = tool_env(instructions="")
    assert [env.reset(seed=seed)[0] for seed in (0, 1, 2, 1_000_000_001)] == [
        "2 + 3?",
        "{6} * 7?",
        "2 + 3?",
        "{6} * 7?",
    ]
    assert tool_env(tasks=iter(TASKS), instructions="").reset(seed=1)[0] == "{6} * 7?"
    assert env.reset()[0] in ("2 + 3?", "{6} * 7?")
    made = tool_env(tasks=lambda seed: {"question": f"{seed} + 1?", "answer": str(seed + 1)})
    assert made.reset(seed=4)[0].endswith("4 + 1?")
    assert made.step("5")[1] == 1.0


@pytest.fixture
def nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_warned", set())


def asked(env: ToolEnv, seeds: range) -> list[str]:
    return [env.reset(seed=seed)[0] for seed in seeds]


TRAINING, EVALUATION = range(3), range(EVALUATION_SEED_START, EVALUATION_SEED_START + 3)


@pytest.mark.usefixtures("nothing_warned_yet")
def test_evaluation_has_tasks_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    kept_apart = [{"question": "9 - 1?", "answer": "8"}, {"question": "1 + 1?", "answer": "2"}]
    env = tool_env(instructions="", test_tasks=kept_apart)
    assert asked(env, TRAINING) == ["2 + 3?", "{6} * 7?", "2 + 3?"]
    assert asked(env, EVALUATION) == ["9 - 1?", "1 + 1?", "9 - 1?"]
    assert env.step("8")[1] == 1.0
    made = tool_env(
        instructions="", test_tasks=lambda seed: {"question": f"{seed}?", "answer": "1"}
    )
    assert asked(made, EVALUATION)[1] == f"{EVALUATION_SEED_START + 1}?"
    assert asked(made, TRAINING)[1] == "{6} * 7?"
    by_seed = tool_env(tasks=lambda seed: {"question": f"{seed}?", "answer": "1"})
    assert asked(by_seed, EVALUATION)[0].endswith(f"{EVALUATION_SEED_START}?")
    assert not caplog.records


@pytest.mark.usefixtures("nothing_warned_yet")
def test_evaluation_on_the_training_tasks_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    envs = [tool_env(), tool_env()]
    for env in envs:
        asked(env, TRAINING)
    assert not caplog.records
    for env in envs:
        asked(env, EVALUATION)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "pass test_tasks=" in record.message


NOTE = call("note", number=1)


@pytest.mark.parametrize(
    ("reply", "kwargs", "scored"),
    [
        (f"<think>I could {NOTE} but no.</think>It is 5", {}, "It is 5"),
        (f"<think>a</think>{NOTE}<think>b</think>5", {}, "5"),
        (f"no start {NOTE}</think> 5", {}, " 5"),
        (f"<think>It never ends {NOTE}", {}, ""),
        (f"<think>a</think>5 <think>again {NOTE}", {}, ""),
        (f"[think]{NOTE}[/think]5", {"reasoning_end": "[/think]"}, "5"),
        (f"the prompt began it {NOTE}", {"reasoning_start": None}, ""),
        (f"the prompt began it {NOTE}</think>5", {"reasoning_start": None}, "5"),
        ("5", {}, "5"),
        ("<think>a</think>5", {"reasoning_end": None}, "<think>a</think>5"),
    ],
)
def test_what_is_said_while_reasoning_is_not_looked_at(
    reply: str, kwargs: dict[str, Any], scored: str
) -> None:
    noted: list[int] = []
    seen: list[str] = []

    def reward_fn(completion: str, answer: Any, question: str) -> float:
        seen.append(completion)
        return 1.0

    def note(number: int) -> None:
        noted.append(number)

    env = tool_env(tools={"note": note}, reward_fn=reward_fn, call_cost=0.5, **kwargs)
    env.reset(seed=0)
    assert env.step(reply) == ("", 1.0, True, False, {})
    assert (noted, seen, env.calls_made) == ([], [scored], 0)


@pytest.mark.parametrize(
    ("reply", "kwargs"),
    [
        (f"<think>so</think>{NOTE}", {}),
        (NOTE, {}),
        (f"<think>{NOTE}", {"reasoning_end": None}),
        (f"so</think>{NOTE}", {"reasoning_start": None}),
    ],
)
def test_calls_behind_the_reasoning_are_made(reply: str, kwargs: dict[str, Any]) -> None:
    env = tool_env(tools={"note": lambda number: number}, **kwargs)
    assert respond(env, reply) == "1"


def test_several_calls_in_one_reply_are_made_in_order() -> None:
    seen: list[int] = []
    env = tool_env(tools={"note": lambda number: seen.append(number) or number}, call_cost=0.25)
    env.reset(seed=0)
    observation, reward, *_ = env.step("".join(call("note", number=n) for n in (3, 1, 2)))
    assert seen == [3, 1, 2]
    assert observation.split("\n")[1::3] == ["3", "1", "2"]
    assert reward == -0.75


def test_a_call_without_its_closing_tag() -> None:
    action = call("calculator", expression="1 + 1").removesuffix("</tool_call>")
    assert respond(tool_env(), action) == "2"
    assert respond(tool_env(), action[:-3]).startswith("error: not valid JSON")


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (call("search", query="x"), "error: no tool 'search'; the tools are calculator"),
        ('<tool_call>{"name": ["x"]}</tool_call>', "error: no tool ['x']"),
        ("<tool_call>calculator(1)</tool_call>", "error: not valid JSON: Expecting value"),
        ("<tool_call></tool_call>", "error: not valid JSON"),
        ("<tool_call>[1]</tool_call>", 'error: a call is {"name": ..., "arguments": {...}}'),
        ('<tool_call>{"name": "calculator", "arguments": "1"}</tool_call>', "error: a call is"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "error: not valid JSON"),
        ('<tool_call>{"name": "calculator"}</tool_call>', "error: TypeError: calculator() missing"),
        (call("calculator", text="1"), "error: TypeError: calculator() got an unexpected"),
        (call("calculator", expression="1/0"), "error: ZeroDivisionError: division by zero"),
        (call("calculator", expression="x + 1"), "error: ValueError: 'x' is not allowed"),
    ],
)
def test_what_goes_wrong_with_a_call_is_told(action: str, told: str) -> None:
    assert respond(tool_env(), action).startswith(told)


def test_a_tool_that_hangs_or_exits() -> None:
    release = threading.Event()

    def leave() -> None:
        raise SystemExit(3)

    env = tool_env(tools={"wait": release.wait, "leave": leave}, tool_timeout=0.5)
    assert respond(env, call("wait")) == (
        "error: no result, the calls of a reply have 0.5 s in all"
    )
    assert respond(env, call("leave")) == "error: SystemExit: 3"
    release.set()


def test_the_calls_of_a_reply_share_their_time() -> None:
    release = threading.Event()
    env = tool_env(tools={"wait": release.wait}, tool_timeout=0.5)
    env.reset(seed=0)
    start = time.perf_counter()
    observation, *_ = env.step(call("wait") * 5)
    assert time.perf_counter() - start < 0.5 * 4
    release.set()
    answers = observation.split("\n")[1::3]
    assert answers[0].startswith("error: no result")
    assert set(answers[1:]) == {"error: not made, the calls before it took all the time there is"}
    assert env.calls_made == 1


def test_time_limits_are_below_that_of_the_vector_environment() -> None:
    """Else a hung tool would end the episode instead of being told to the model."""
    limits = inspect.signature(ToolEnv).parameters
    outer = inspect.signature(SyncMultiTurnVecEnv).parameters["step_timeout"].default
    assert max(limits[name].default for name in ("tool_timeout", "reward_timeout")) < outer


def test_results_of_any_kind() -> None:
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    async def later(value: int) -> list[int]:
        await asyncio.sleep(0.001)
        return [value]

    tools = {"later": later, "long": lambda: "x" * 100, "mute": Mute, "none": lambda: None}
    env = tool_env(tools=tools, max_result_characters=10)
    assert respond(env, call("later", value=7)) == "[7]"
    assert respond(env, call("long")) == "xxxxxxxxxx... (cut, 100 characters in all)"
    assert respond(tool_env(tools=tools), call("mute")) == "error: RuntimeError: no text"
    assert respond(env, call("none")) == "None"
    env.close()


def test_calls_are_limited_and_cost() -> None:
    env = tool_env(max_calls=1, call_cost=0.1)
    for _ in range(2):
        env.reset(seed=0)
        observation, reward, *_ = env.step(call("calculator", expression="1") * 2)
        assert observation.split("\n")[1::3] == ["1", "error: all 1 calls are used; answer now"]
        assert reward == -0.2
        assert env.calls_made == 1
        assert env.step("5")[1:3] == (1.0, True)


def test_instructions_show_every_tool() -> None:
    def look_up(name: str, limit: int = 3) -> str:
        """Finds a person
        by name.

        Not shown.
        """
        return name * limit

    tools = {"look_up": look_up, "bare": lambda x: x}
    text = tool_env(tools=tools).instructions
    assert text.endswith(
        "Tools:\n- look_up(name: str, limit: int = 3) -> str: Finds a person by name.\n- bare(x)"
    )
    assert tool_env(instructions="Think.").reset(seed=0)[0] == "Think.\n\n2 + 3?"


def test_the_reward_function_gets_completion_answer_and_question() -> None:
    seen: list[tuple[str, Any, str]] = []

    def reward_fn(*arguments: Any) -> float:
        seen.append(arguments)
        return 0.5

    env = tool_env(reward_fn=reward_fn)
    env.reset(seed=0)
    assert env.step(" five ")[1] == 0.5
    assert seen == [(" five ", "5", "2 + 3?")]


def test_a_failing_reward_function() -> None:
    calls = []

    def fails(completion: str, answer: Any, question: str) -> float:
        calls.append(completion)
        if len(calls) < 3:
            raise KeyError(completion)
        return 1.0

    env = tool_env(reward_fn=fails)
    env.reset(seed=0)
    with pytest.raises(RewardError, match="KeyError"):
        env.step("5")
    env = tool_env(reward_fn=fails, failure_retries=1)
    env.reset(seed=0)
    assert env.step("5")[1] == 1.0
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"tasks": []}, ValueError, "tasks is empty"),
        ({"tasks": "ab"}, TypeError, "tasks is 'ab'; it must be a list of dicts or a function"),
        ({"tasks": 3}, TypeError, "tasks is 3; it must be a list of dicts or a function"),
        ({"test_tasks": []}, ValueError, "test_tasks is empty"),
        ({"test_tasks": [{}]}, ValueError, "has no question and no answer"),
        ({"reasoning_end": ""}, ValueError, "reasoning_end is empty"),
        ({"reasoning_start": 1}, TypeError, "reasoning_start is 1; it must be text or None"),
        ({"tasks": ["x"]}, TypeError, "a task is 'x'; it must be a dict"),
        ({"tasks": [{"question": "x"}]}, ValueError, "has no answer"),
        (
            {"tasks": [{"question": 1, "answer": 1}]},
            TypeError,
            "a task's question is 1; it must be text",
        ),
        ({"tools": {}}, ValueError, "tools is empty"),
        ({"tools": [calculator]}, TypeError, "tools is .*must be a dict of functions by name"),
        ({"tools": {"x": 1}}, TypeError, "tools has 'x': 1"),
        ({"tools": {"sqrt": math.sqrt}}, TypeError, r"tools\['sqrt'\] takes 'x' by position only"),
        ({"reward_fn": len}, TypeError, "three arguments"),
        ({"max_calls": -1}, ValueError, "max_calls is .*must be at least 0"),
        ({"call_cost": "1"}, TypeError, "call_cost is '1'"),
        ({"tool_timeout": 0}, ValueError, "tool_timeout is 0"),
        ({"max_result_characters": 0}, ValueError, "max_result_characters is .*must be at least 1"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tool_env(**kwargs)


def test_a_task_function_that_returns_no_task() -> None:
    with pytest.raises(TypeError, match="a task is None; it must be a dict"):
        tool_env(tasks=lambda seed: None).reset(seed=0)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(2 + 3) * 4**2", 80),
        ("7 / 2", 3.5),
        ("6 / 3", 2),
        ("7 // 2 - 7 % 4", 0),
        ("-2**2", -4),
        ("2**-2", 0.25),
        ("2**0.5", math.sqrt(2)),
        ("+1.5e3", 1500),
        (" 1_000 ", 1000),
        ("10**300", 10**300),
        ("0**0", 1),
        ("1**10**300", 1),
        ("-" * 499 + "1", -1),
    ],
)
def test_calculator(expression: str, value: float) -> None:
    result = calculator(expression)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("expression", "error", "match"),
    [
        ("x", ValueError, "'x' is not allowed"),
        ("__import__('os').system('x')", ValueError, "is not allowed"),
        ("().__class__", ValueError, "is not allowed"),
        ("True", ValueError, "'True' is not allowed"),
        ("'a' * 9", ValueError, "is not allowed"),
        ("2 ^ 3", ValueError, r"'2 \^ 3' is not allowed; use numbers"),
        ("1,000", ValueError, "is not allowed"),
        ("1j", ValueError, "is not allowed"),
        ("9**9**9**9", ValueError, "beyond what is computed"),
        ("10**300 * 10", ValueError, "beyond 1e300"),
        ("1e999", ValueError, "beyond 1e300"),
        ("(-8)**0.5", ValueError, "not a real number"),
        ("1 / 0", ZeroDivisionError, "division by zero"),
        ("1 +", ValueError, "cannot read '1 \\+' as arithmetic"),
        ("", ValueError, "cannot read ''"),
        ("1\x00", ValueError, "cannot read"),
        ("(" * 240 + "1" + ")" * 240, ValueError, "cannot read"),
        ("1" * 501, ValueError, "501 characters"),
        (5, TypeError, "expression is 5; it must be text"),
    ],
)
def test_calculator_refuses(expression: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        calculator(expression)
