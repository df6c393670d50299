"""Tools that the chat template shows to the model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from chat_tokenizers import chat_tokenizer
from transformers.utils import get_json_schema

from agilerl.llm_envs import SyncMultiTurnVecEnv, TokenObservationWrapper, ToolEnv
from agilerl.testing import calculator
from agilerl.typing import ActionResult, ReasoningPrompts

TASKS = [{"question": "2 + 3?", "answer": "5"}]
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 3"}}</tool_call>'
SCHEMA = get_json_schema(calculator)


def search(query: str, limit: int = 3) -> list[str]:
    """Finds pages.

    Args:
        query: What to look for.
        limit: How many to find.
    """
    return [query] * limit


def tool_env(**kwargs: Any) -> ToolEnv:
    arguments = {
        "tasks": TASKS,
        "tools": {"calculator": calculator},
        "reward_fn": lambda completion, answer, question: float(completion.strip() == answer),
        "native_tools": True,
    }
    return ToolEnv(**{**arguments, **kwargs})


def wrapped(env: Any, style: str = "hermes", **kwargs: Any) -> TokenObservationWrapper:
    return TokenObservationWrapper(env, chat_tokenizer(style), 4, **kwargs)


def answer(wrapper: TokenObservationWrapper, prompt: Any, text: str) -> torch.Tensor:
    ids = [*wrapper.tokenizer.encode(text), wrapper.tokenizer.eos_token_id]
    return torch.cat([prompt["input_ids"], torch.tensor([ids])], 1)


class Echo:
    def reset(self, seed: int | None = None) -> Any:
        return "Hi", {}

    def step(self, action: str) -> Any:
        return action, 0.0, False, False, {}


@pytest.mark.parametrize(
    "tools", [[calculator, search], [SCHEMA, search], [SCHEMA["function"], search]]
)
def test_the_template_shows_tools_in_every_prompt(tools: Any) -> None:
    wrapper = wrapped(Echo(), tools=tools, system_prompt="Be brief.")
    prompt, _ = wrapper.reset()
    prompt, *_ = wrapper.step(answer(wrapper, prompt, "A"))
    messages = [("system", "Be brief."), ("user", "Hi"), ("assistant", "A"), ("user", "A")]
    assert prompt["text"] == wrapper.tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tools=[calculator, search],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert '"description": "How many to find."' in prompt["text"]


def test_an_episode_with_native_tools() -> None:
    wrapper = wrapped(tool_env())  # its tools are taken
    prompt, _ = wrapper.reset(seed=0)
    assert json.dumps(SCHEMA) in prompt["text"]
    assert "<|im_start|>user\n2 + 3?<|im_end|>" in prompt["text"]
    assert "You can use tools" not in prompt["text"]
    prompt, reward, terminated, *_ = wrapper.step(answer(wrapper, prompt, CALL * 2))
    assert (reward, terminated) == (0.0, False)
    response = "<tool_response>\n5\n</tool_response>"
    end = f"<|im_end|>\n<|im_start|>user\n{response}\n{response}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt["text"].endswith(CALL * 2 + end)
    assert wrapper.step(answer(wrapper, prompt, "5"))[1:3] == (1.0, True)
    ids, mask, _, _ = wrapper.get_episode_data()
    sampled = wrapper.tokenizer.decode(ids[0, 1:][mask[0]])
    assert sampled == f"{CALL * 2}<|im_end|>5<|im_end|>"  # the calls as they were sampled


@pytest.mark.parametrize("style", ["hermes", "strict"])
def test_many_episodes(style: str) -> None:
    """In a template without the role of tools their results are the user's."""

    def act(prompts: list[ReasoningPrompts]) -> ActionResult:
        ids = []
        for prompt in prompts:
            text = "5" if "<tool_response>\n5\n" in prompt["text"] else CALL
            ids.append(answer(wrapped(Echo(), style), prompt, text))
        return ActionResult(ids, [])

    env = SyncMultiTurnVecEnv(lambda: wrapped(tool_env(), style), batch_size=2)
    episodes = env.play(act, [0, 1])
    assert episodes.returns.tolist() == [1, 1]
    assert not episodes.failed.any()
    env.close()


def test_tools_that_the_template_moves_are_not_repeated() -> None:
    wrapper = wrapped(Echo(), "strict", tools=[calculator])
    prompt, _ = wrapper.reset()
    for _ in range(3):
        prompt, *_ = wrapper.step(answer(wrapper, prompt, "A"))
    assert prompt["text"].count("[TOOLS]") == 1


def test_a_tokenizer_with_a_template_of_its_own_for_tools() -> None:
    tokenizer = chat_tokenizer("hermes")
    tokenizer.chat_template = {
        "default": chat_tokenizer("chatml").chat_template,
        "tool_use": tokenizer.chat_template,
    }
    prompt, _ = TokenObservationWrapper(tool_env(), tokenizer, 4).reset()
    assert json.dumps(SCHEMA) in prompt["text"]


def test_it_is_used_for_later_turns_too() -> None:
    tokenizer = chat_tokenizer("strict")
    tokenizer.chat_template = {
        "default": chat_tokenizer("chatml").chat_template,
        "tool_use": tokenizer.chat_template,  # moves the tools, so that the text is rewritten
    }
    wrapper = TokenObservationWrapper(Echo(), tokenizer, 4, tools=[calculator])
    prompt, _ = wrapper.reset()
    prompt, *_ = wrapper.step(answer(wrapper, prompt, "A"))
    assert prompt["text"].endswith("[user]Hi</s>[assistant]A</s>[user]A</s>[assistant]")


def test_a_template_that_shows_no_tools_is_refused() -> None:
    with pytest.raises(ValueError, match="does not show tools: a conversation reads the same"):
        wrapped(Echo(), "chatml", tools=[calculator])
    with pytest.raises(ValueError, match="tools are shown by a chat template, which is not used"):
        wrapped(Echo(), tools=[calculator], apply_chat_template=False)
    with pytest.raises(ValueError, match="chat_template_kwargs has 'tools' too"):
        wrapped(Echo(), tools=[search], chat_template_kwargs={"tools": [SCHEMA]})
    with pytest.raises(ValueError, match="as ToolEnv does without native_tools"):
        wrapped(tool_env(), "chatml")


def bare(x):  # type: ignore[no-untyped-def]
    """No type.

    Args:
        x: A value.
    """


def undescribed(x: int) -> int:
    """No arguments."""
    return x


@pytest.mark.parametrize(
    ("tools", "error", "says"),
    [
        ([bare], ValueError, r"tools\[0\]: .* type hint.* pass a JSON schema"),
        ([calculator, undescribed], ValueError, r"tools\[1\]: .* no description for the argument"),
        ([{"description": "x"}], ValueError, r"tools\[0\] is .*, a schema without a name"),
        (["calculator"], TypeError, r"tools\[0\] is 'calculator'; it must be a function or"),
        (calculator, TypeError, "tools is <function .*it must be a list of functions"),
    ],
)
def test_bad_tools(tools: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        wrapped(Echo(), tools=tools)


def test_a_native_tool_of_a_tool_env_has_to_be_described() -> None:
    with pytest.raises(ValueError, match=r"tools\['double'\]: .* no description"):
        tool_env(tools={"double": undescribed})
    env = tool_env(tools={"sums": calculator})  # called by this name
    assert env.tool_schemas[0]["function"]["name"] == "sums"


def fenced(reply: str) -> list[dict[str, Any]]:
    """Calls in a block of code, as some models write them."""
    return [json.loads(part.split("```")[0]) for part in reply.split("```json")[1:]]


@pytest.mark.parametrize("native", [True, False])
def test_calls_in_another_format(native: bool) -> None:
    env = tool_env(parse_calls=fenced, native_tools=native)
    env.reset(seed=0)
    arguments = {"name": "calculator", "arguments": {"expression": "1 + 1"}}
    observation, *_ = env.step(f"```json{json.dumps(arguments)}```")
    (message,) = observation if native else [{"content": observation}]
    assert message["content"] == ("2" if native else "<tool_response>\n2\n</tool_response>")
    nested = {"type": "function", "function": arguments}  # as transformers' parse_response
    assert "2" in str(env.step(f"```json{json.dumps(nested)}```")[0])
    assert "error: JSONDecodeError" in str(env.step("```json {broken```")[0])
    assert env.step(f"{CALL} is no call here: 5")[2]


@pytest.mark.parametrize("found", [None, "calls", [1]])
def test_a_parser_that_returns_something_else(found: Any) -> None:
    env = tool_env(parse_calls=lambda reply: found)
    env.reset(seed=0)
    with pytest.raises(TypeError, match=r"parse_calls returned .* must return a list of dicts"):
        env.step("5")
    with pytest.raises(TypeError, match="parse_calls is 3"):
        tool_env(parse_calls=3)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_that_mark_calls_can_be_kept(skip: bool) -> None:
    wrapper = wrapped(Echo(), "strict", skip_special_tokens=skip)
    prompt, _ = wrapper.reset()
    prompt, *_ = wrapper.step(answer(wrapper, prompt, "[user]5"))
    assert prompt["text"].endswith(f"[user]{'' if skip else '[user]'}5</s>[assistant]")


def test_calls_read_by_transformers() -> None:
    tokenizer = chat_tokenizer("hermes")
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {"content": "text"},
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    env = tool_env(
        parse_calls=lambda reply: tokenizer.parse_response(reply, prefix="").get("tool_calls", [])
    )
    env.reset(seed=0)
    assert env.step(f"I compute. {CALL}")[0] == [
        {"role": "tool", "name": "calculator", "content": "5"}
    ]
    broken = env.step("<tool_call>{broken</tool_call>")[0]
    assert broken[0]["content"].startswith("error: ValueError: json parser could not parse")
    assert env.step("5")[1:3] == (1.0, True)


class Delegating:
    """As one that logs what is played."""

    def __init__(self, env: ToolEnv) -> None:
        self.env = env

    def reset(self, seed: int | None = None) -> Any:
        return self.env.reset(seed)

    def step(self, action: str) -> Any:
        return self.env.step(action)


def test_tools_of_an_environment_within_another_are_not_lost() -> None:
    inner = tool_env()
    with pytest.raises(ValueError, match="has tools that the chat template has to show"):
        wrapped(Delegating(inner)).reset(seed=0)
    expected, _ = wrapped(tool_env()).reset(seed=0)
    prompt, _ = wrapped(Delegating(inner), tools=inner.tool_schemas).reset(seed=0)
    assert prompt["text"] == expected["text"]

    class Forwards(Delegating):
        tool_schemas = inner.tool_schemas

    prompt, _ = wrapped(Forwards(inner)).reset(seed=0)
    assert prompt["text"] == expected["text"]
    # Described in the first observation they need no template.
    wrapped(Delegating(tool_env(native_tools=False))).reset(seed=0)
