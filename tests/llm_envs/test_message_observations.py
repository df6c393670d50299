"""Observations that are lists of messages, over the templates that model families use."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from chat_tokenizers import STYLES, chat_tokenizer, turn_end
from transformers import PreTrainedTokenizerFast

from agilerl import checks
from agilerl.llm_envs import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.testing import byte_tokenizer
from agilerl.typing import ActionResult, ReasoningPrompts


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


class Says:
    """Hands out these observations, one after the other; over after the last."""

    def __init__(self, *observations: Any, info: dict[str, Any] | None = None) -> None:
        self.observations, self.info, self.turn = observations, info, 0

    def reset(self, seed: int | None = None) -> Any:
        self.turn = 0
        return self.observations[0], dict(self.info or {})

    def step(self, action: str) -> Any:
        self.turn += 1
        over = self.turn >= len(self.observations)
        observation = [] if over else self.observations[self.turn]
        return observation, 1.0, over, False, dict(self.info or {})


def play(wrapper: TokenObservationWrapper, *answers: str, end_id: int | None = None) -> str:
    """The conversation that the model sees after these answers."""
    tokenizer = wrapper.tokenizer
    prompt, _ = wrapper.reset()
    for text in answers:
        ids = [*tokenizer.encode(text), end_id or tokenizer.eos_token_id]
        before = torch.cat([prompt["input_ids"], torch.tensor([ids])], 1)
        prompt, *_ = wrapper.step(before)
        assert prompt["input_ids"][0, : before.shape[1]].tolist() == before[0].tolist()
    assert tokenizer.decode(prompt["input_ids"][0]) == prompt["text"]
    return prompt["text"]


def rendered(tokenizer: PreTrainedTokenizerFast, *messages: dict[str, Any], **more: Any) -> str:
    return str(
        tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **more
        )
    )


EXAMPLE = [said("user", "2+2?"), said("assistant", "4"), said("user", "3+3?")]


@pytest.mark.parametrize("style", STYLES)
def test_examples_of_answers_and_messages_of_the_user(style: str) -> None:
    """What the model sees is what the template writes."""
    tokenizer = chat_tokenizer(style)
    wrapper = TokenObservationWrapper(Says(EXAMPLE, [said("user", "9+9?")]), tokenizer, 4)
    text = play(wrapper, "6", end_id=turn_end(style, tokenizer))
    assert text == rendered(tokenizer, *EXAMPLE, said("assistant", "6"), said("user", "9+9?"))
    # Only what was sampled is trained, not the examples.
    ids, mask, turns, _ = wrapper.get_episode_data()
    assert (
        tokenizer.decode(ids[0, 1:][mask[0]])
        == f"6{tokenizer.decode([turn_end(style, tokenizer)])}"
    )
    assert torch.equal(mask, turns >= 0)


@pytest.mark.parametrize("style", ["chatml", "llama3", "hermes", "reasoning"])
def test_a_system_message_and_results_of_tools(style: str) -> None:
    tokenizer = chat_tokenizer(style)
    start = [said("system", "Be brief."), said("user", "2+2?")]
    results = [said("tool", "4", name="add", tool_call_id="1"), said("tool", "5", name="add")]
    wrapper = TokenObservationWrapper(Says(start, results, results), tokenizer, 4)
    text = play(wrapper, "add(2, 2)", "and", end_id=turn_end(style, tokenizer))
    answers = [said("assistant", "add(2, 2)"), said("assistant", "and")]
    assert text == rendered(tokenizer, *start, answers[0], *results, answers[1], *results)


@pytest.mark.parametrize("style", ["strict", "mistral"])
def test_a_template_without_the_role_of_tools(style: str) -> None:
    """The results are one message of the user."""
    tokenizer = chat_tokenizer(style)
    results = [said("tool", "4"), said("tool", "5")]
    text = play(TokenObservationWrapper(Says("Hi", results), tokenizer, 4), "A")
    merged = "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
    assert text == rendered(
        tokenizer, said("user", "Hi"), said("assistant", "A"), said("user", merged)
    )


def test_results_of_tools_around_a_message_of_the_user() -> None:
    tokenizer = chat_tokenizer("mistral")
    messages = [said("tool", "4"), said("user", "and?"), said("tool", "5")]
    text = play(TokenObservationWrapper(Says("Hi", messages), tokenizer, 4), "A")
    assert text == (
        "<s>[INST]Hi[/INST]A</s>[INST]<tool_response>\n4\n</tool_response>[/INST]"
        "[INST]and?[/INST][INST]<tool_response>\n5\n</tool_response>[/INST]"
    )


def test_a_template_that_takes_every_other_role_for_the_user() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['role'] +", "('assistant' if message['role'] == 'assistant' else 'user') +"
    )
    text = play(TokenObservationWrapper(Says("Hi", [said("tool", "4")]), tokenizer, 4), "A")
    assert "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>" in text


def test_nothing_has_to_be_said_when_it_is_cut_off() -> None:
    class Short(Says):
        def step(self, action: str) -> Any:
            return [], 1.0, False, True, {}

    wrapper = TokenObservationWrapper(Short("Hi"), byte_tokenizer(), 4)
    assert play(wrapper, "A").endswith("A<|im_end|>")


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("", True),
        *(
            (text, ended)
            for text in (
                "<",
                "<think>",
                "<think>\n\n</think>\n\n",
                "<think>\nok\n</think>\n\ncall",
                "hi",
            )
            for ended in (True, False)
        ),
    ],
)
def test_a_turn_has_one_end_where_the_template_adds_reasoning(text: str, ended: bool) -> None:
    tokenizer = chat_tokenizer("added")
    wrapper = TokenObservationWrapper(Says("Hi", [said("tool", "4")]), tokenizer, 4)
    prompt, _ = wrapper.reset()
    sampled = [*tokenizer.encode(text), *([tokenizer.eos_token_id] if ended else [])]
    ids = torch.cat([prompt["input_ids"], torch.tensor([sampled])], 1)
    following, *_ = wrapper.step(ids)
    assert following["text"] == (
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n"
        "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    )


def test_other_keys_reach_the_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ' ' + (m.name or '-') + ': ' + m.content + '\n' }}"
        "{% endfor %}"
    )
    env = Says([said("user", "Hi", name="Ada")], [said("tool", "4", name="add")])
    # The template ends an answer with a line, which the model does not sample here.
    assert play(TokenObservationWrapper(env, tokenizer, 4), "A").startswith("user Ada: Hi\n")
    assert play(TokenObservationWrapper(env, tokenizer, 4), "A").endswith("\ntool add: 4\n")


def test_a_system_message_that_is_said_again_by_the_template_is_not() -> None:
    """As the system prompt, in a template that puts it into the last message of the user."""
    tokenizer = chat_tokenizer("mistral")
    env = Says([said("system", "Be brief."), said("user", "Hi")], "more")
    assert play(TokenObservationWrapper(env, tokenizer, 4), "A").count("Be brief.") == 1


def test_without_a_template_contents_are_concatenated(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    tokenizer = byte_tokenizer()
    env = Says([said("system", "S"), said("user", "U")], [said("tool", "4"), said("user", "V")])
    with caplog.at_level(logging.WARNING, logger="agilerl"):
        text = play(TokenObservationWrapper(env, tokenizer, 4, apply_chat_template=False), "A")
    assert text == "SUA<|im_end|>4V"
    (record,) = caplog.records
    assert "concatenated, without roles" in record.message


def test_the_cost_is_linear_in_the_turns() -> None:
    """Characters rendered and tokens made, counted; the opening is the same for every turn."""
    tokenizer = chat_tokenizer("hermes")
    cost = []
    for turns in (8, 64):
        wrapper = TokenObservationWrapper(
            Says(EXAMPLE, *[[said("tool", "4")]] * turns), tokenizer, turns + 2
        )
        made = 0
        plain = type(tokenizer).apply_chat_template

        def counting(*args: Any, plain: Any = plain, **kwargs: Any) -> str:
            nonlocal made
            text = str(plain(*args, **kwargs))
            made += len(text)
            return text

        class Counting(type(tokenizer)):  # type: ignore[misc]
            apply_chat_template = counting

        wrapper.tokenizer.__class__ = Counting
        play(wrapper, *["A"] * turns)
        tokenizer.__class__ = PreTrainedTokenizerFast
        cost.append(made)
    assert cost[1] < 8 * cost[0] * 1.05


HI, ASSISTANT = said("user", "Hi"), said("assistant", "A")


@pytest.mark.parametrize(
    ("observations", "error", "says"),
    [
        ([None], TypeError, "reset returned is None; it must be text or a list of messages"),
        (["Hi", None], TypeError, "step returned is None; it must be text or a list"),
        (["Hi", {"role": "user"}], TypeError, "step returned is {'role'.*must be text or a list"),
        (["Hi", b"bytes"], TypeError, "is b'bytes'; it must be text"),
        ([[]], ValueError, "reset returned is an empty list"),
        (["Hi", []], ValueError, "step returned is an empty list"),
        ([["Hi"]], TypeError, "message 0 of the observation .* is 'Hi'; it must be a dict with"),
        (
            [[{"role": "user"}]],
            TypeError,
            "the content of message 0 of .* is None; it must be text",
        ),
        ([[HI, said("user", ["x"])]], TypeError, r"content of message 1 .* is \['x'\]"),
        ([[said("bot", "x")]], ValueError, "the role of message 0 .* is 'bot'; it must be one of"),
        (["Hi", [ASSISTANT, HI]], ValueError, r"\['assistant', 'user'\]; those of a step are"),
        (["Hi", [said("system", "x"), HI]], ValueError, "those of a step are the user's"),
        ([[HI, ASSISTANT]], ValueError, "the last one, which the model answers, must be"),
        ([[said("system", "x")]], ValueError, "the last one, which the model answers, must be"),
        ([[HI, said("system", "x"), HI]], ValueError, "system message can only be the first"),
    ],
)
def test_unusable_observations(observations: list[Any], error: type[Exception], says: str) -> None:
    """The environment's failure, and the message names it."""
    tokenizer = byte_tokenizer()
    with pytest.raises(error, match=says):
        play(TokenObservationWrapper(Says(*observations, "more"), tokenizer, 4), "A", "B")


def test_an_unusable_observation_ends_one_episode(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> TokenObservationWrapper:
        made.append(None)
        bad = len(made) == 2
        return TokenObservationWrapper(Says("Hi", None if bad else "more"), byte_tokenizer(), 4)

    def act(prompts: list[ReasoningPrompts]) -> ActionResult:
        answer = torch.tensor([[65]])
        return ActionResult([torch.cat([p["input_ids"], answer], 1) for p in prompts], [])

    made: list[None] = []
    episodes = SyncMultiTurnVecEnv(make, 3, max_workers=1).play(act, [1, 2, 3])
    assert episodes.failed.tolist() == [False, True, False]
    assert "the observation that the environment's step returned is None" in caplog.text


def test_what_goes_around_a_text_does_not_go_around_messages() -> None:
    env = Says([HI], info={"suffix": "?"})
    with pytest.raises(ValueError, match="info has a prefix or suffix"):
        TokenObservationWrapper(env, byte_tokenizer(), 4).reset()


def test_a_system_message_beside_a_system_prompt() -> None:
    env = Says([said("system", "x"), HI])
    wrapper = TokenObservationWrapper(env, byte_tokenizer(), 4, system_prompt="y")
    with pytest.raises(ValueError, match="but there is a system_prompt too"):
        wrapper.reset()
