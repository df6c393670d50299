"""The wrapper, position by position, on byte-level tokenizers where a character is a token."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from chat_tokenizers import STYLES, chat_tokenizer, turn_end
from transformers import PreTrainedTokenizerFast

from agilerl import checks
from agilerl.llm_envs import EVALUATION_SEED_START, TokenObservationWrapper
from agilerl.testing import byte_tokenizer
from agilerl.typing import ActionResult, ReasoningPrompts


class Script:
    """Says the given observations in turn; reward t + 1 in turn t; over after the last."""

    def __init__(
        self, *observations: str, info: dict[str, Any] | None = None, endless: bool = False
    ) -> None:
        self.observations, self.info, self.endless = observations, info or {}, endless
        self.heard: list[str] = []
        self.seed: int | None = None
        self.closed = False

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.seed, self.heard = seed, []
        return self.observations[0], dict(self.info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.heard.append(action)
        turn = len(self.heard)
        over = turn >= len(self.observations) and not self.endless
        said = "over" if over else self.observations[turn % len(self.observations)]
        return said, float(turn), over, False, dict(self.info)

    def close(self) -> None:
        self.closed = True


def answer(
    prompt: dict[str, Any],
    text: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    end: bool = True,
    end_id: int | None = None,
) -> torch.Tensor:
    """``(1, T)``: the prompt, the text, and the end of the turn unless it was cut off."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids += [end_id or tokenizer.eos_token_id] if end else []
    return torch.cat([prompt["input_ids"], torch.tensor([ids], dtype=torch.long)], dim=1)


def play(
    env: TokenObservationWrapper, answers: list[str], **ending: Any
) -> list[tuple[float, bool, bool, dict[str, Any]]]:
    prompt, _ = env.reset()
    steps = []
    for text in answers:
        prompt, *step = env.step(answer(prompt, text, env.tokenizer, **ending))
        steps.append(tuple(step))
    return steps


def test_a_hand_written_episode() -> None:
    """``apply_chat_template=False``: what is said is all there is, one token per character."""
    tokenizer = byte_tokenizer()
    env = TokenObservationWrapper(
        Script("ab", "c", "d"), tokenizer, max_turns=4, apply_chat_template=False
    )
    steps = play(env, ["X", "YZ", "W"])
    end = tokenizer.eos_token_id
    ids, mask, turns, rewards = env.get_episode_data()
    a, b, c, d, w, x, y, z = (tokenizer.encode(letter)[0] for letter in "abcdWXYZ")
    assert ids.tolist() == [[a, b, x, end, c, y, z, end, d, w, end]]
    on = [0, 1, 1, 0, 1, 1, 1, 0, 1, 1]
    assert mask.tolist() == [[bool(value) for value in on]]
    assert turns.tolist() == [[-1, 0, 0, -1, 1, 1, 1, -1, 2, 2]]
    assert rewards.tolist() == [1.0, 2.0, 3.0, 0.0]
    assert (ids.dtype, mask.dtype, turns.dtype, rewards.dtype) == (
        torch.long,
        torch.bool,
        torch.long,
        torch.float32,
    )
    assert steps == [(1.0, False, False, {}), (2.0, False, False, {}), (3.0, True, False, {})]
    assert env.env.heard == ["X", "YZ", "W"]


EXPECTED = {
    "chatml": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "A<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nB<|im_end|>",
    "llama3": "<|begin|><|header|>user<|end_header|>\n\nHi<|eot|>"
    "<|header|>assistant<|end_header|>\n\n"
    "A<|eot|><|header|>user<|end_header|>\n\nmore<|eot|>"
    "<|header|>assistant<|end_header|>\n\nB<|eot|>",
    "gemma": "<bos><start>user\nHi<end>\n<start>model\n"
    "A<end>\n<start>user\nmore<end>\n<start>model\nB<end>",
    "phi": "<|user|>\nHi<|end|>\n<|assistant|>\nA<|end|>\n"
    "<|user|>\nmore<|end|>\n<|assistant|>\nB<|end|>",
    "mistral": "<s>[INST]Hi[/INST]A</s>[INST]more[/INST]B</s>",
    "hermes": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "A<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nB<|im_end|>",
    "strict": "[user]Hi</s>[assistant]A</s>[user]more</s>[assistant]B</s>",
    "reasoning": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "A<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nB<|im_end|>",
    "added": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "A<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nB<|im_end|>",
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("end", [True, False])
def test_what_stands_between_turns(style: str, end: bool) -> None:
    """The same text whether the model ended its answer itself or was cut off."""
    tokenizer = chat_tokenizer(style)
    env = TokenObservationWrapper(Script("Hi", "more"), tokenizer, max_turns=4)
    end_id = turn_end(style, tokenizer)
    play(env, ["A", "B"], end=end, end_id=end_id)
    ids, mask, turns, _ = env.get_episode_data()
    text, ending = EXPECTED[style], tokenizer.decode([end_id])
    if not end:
        text, ending = text.removesuffix(ending), ""
    assert tokenizer.decode(ids[0]) == text
    assert tokenizer.decode(ids[0, 1:][turns[0] == 0]) == "A" + ending
    assert tokenizer.decode(ids[0, 1:][turns[0] == 1]) == "B" + ending
    assert torch.equal(mask, turns >= 0)
    # The template itself writes the same conversation in the same way.
    messages = [
        {"role": role, "content": content}
        for role, content in [("user", "Hi"), ("assistant", "A"), ("user", "more")]
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith(rendered)


def test_another_ending_than_the_templates_is_kept_and_the_templates_follows() -> None:
    tokenizer = byte_tokenizer()
    env = TokenObservationWrapper(Script("Hi", "more"), tokenizer, max_turns=4)
    prompt, _ = env.reset()
    action = torch.tensor(
        [[*tokenizer.encode("A"), tokenizer.convert_tokens_to_ids("<|endoftext|>")]]
    )
    prompt, *_ = env.step(torch.cat([prompt["input_ids"], action], dim=1))
    text = tokenizer.decode(prompt["input_ids"][0])
    assert "A<|endoftext|><|im_end|>\n<|im_start|>user\nmore" in text


def test_a_template_with_a_space_before_the_end_does_not_end_a_turn_twice() -> None:
    tokenizer = chat_tokenizer("mistral")
    tokenizer.chat_template = tokenizer.chat_template.replace("+ '</s>'", "+ ' </s>'")
    env = TokenObservationWrapper(Script("Hi", "more"), tokenizer, max_turns=4)
    play(env, ["A", "B"])
    assert (
        tokenizer.decode(env.get_episode_data()[0][0])
        == "<s>[INST]Hi[/INST]A</s>[INST]more[/INST]B</s>"
    )


@pytest.mark.parametrize("style", ["chatml", "llama3", "mistral"])
def test_system_prompt(style: str) -> None:
    tokenizer = chat_tokenizer(style)
    env = TokenObservationWrapper(Script("Hi"), tokenizer, 2, system_prompt="Be brief.")
    prompt, _ = env.reset()
    assert "Be brief." in prompt["text"]
    assert tokenizer.decode(prompt["input_ids"][0]) == prompt["text"]


def test_a_template_without_a_system_role_says_so_at_once() -> None:
    with pytest.raises(ValueError, match="System role not supported"):
        TokenObservationWrapper(Script("Hi"), chat_tokenizer("gemma"), 2, system_prompt="Be brief.")


@pytest.mark.parametrize(
    ("style", "first_answer", "system_prompt"),
    [
        ("reasoning", "<think>long</think>A", None),  # earlier reasoning is dropped
        ("llama3", "A \n", None),  # contents are trimmed
        ("mistral", "A", "Be brief."),  # the system prompt moves to the last message
    ],
)
def test_a_template_that_rewrites_earlier_turns(
    style: str,
    first_answer: str,
    system_prompt: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ids stay as they were sampled, and the log says so once."""
    monkeypatch.setattr(checks, "_warned", set())
    tokenizer = chat_tokenizer(style)
    env = TokenObservationWrapper(
        Script("Hi", "more", "and"), tokenizer, 4, system_prompt=system_prompt
    )
    with caplog.at_level(logging.WARNING, logger="agilerl"):
        prompt, _ = env.reset()
        for text in (first_answer, first_answer, "C"):
            before = answer(prompt, text, tokenizer)
            prompt, _, terminated, _, _ = env.step(before)
            assert prompt["input_ids"][0, : before.shape[1]].tolist() == before[0].tolist()
    assert terminated
    assert [r for r in caplog.records if "written earlier" in r.message or "kept as" in r.message]
    assert len(caplog.records) == 1
    ids = env.get_episode_data()[0]
    if style == "reasoning":
        assert tokenizer.decode(ids[0]).count("<think>long</think>") == 2
    assert tokenizer.decode(ids[0]).count("more") == 1
    # A system prompt that moves is not said again at every turn.
    assert tokenizer.decode(ids[0]).count("Be brief.") == (system_prompt is not None)


def test_an_observation_that_holds_the_word_that_stands_for_an_answer() -> None:
    tokenizer = chat_tokenizer("reasoning")
    texts = []
    for word in ("ANSWER-0-END", "something"):
        env = TokenObservationWrapper(Script("Hi", f"was: {word}", "and"), tokenizer, 4)
        prompt, _ = env.reset()
        prompt, *_ = env.step(answer(prompt, "<think>long</think>A", tokenizer))
        texts.append(tokenizer.decode(prompt["input_ids"][0]).replace(word, "WORD"))
    assert texts[0] == texts[1]


def test_prefix_and_suffix_of_the_info_surround_the_observation() -> None:
    env = TokenObservationWrapper(
        Script("Hi", "more", info={"prefix": "<", "suffix": ">"}),
        byte_tokenizer(),
        4,
        apply_chat_template=False,
    )
    play(env, ["A"])
    assert env.transcript == "A<|im_end|><more>"
    assert env.tokenizer.decode(env.get_episode_data()[0][0]) == "<Hi>A<|im_end|>"


def test_seeds_go_to_environments_that_take_them() -> None:
    class Seedless(Script):
        def reset(self) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
            return super().reset()

    seeded = Script("Hi")
    TokenObservationWrapper(seeded, byte_tokenizer(), 2).reset(seed=5)
    assert seeded.seed == 5
    prompt, _ = TokenObservationWrapper(Seedless("Hi"), byte_tokenizer(), 2).reset(seed=5)
    assert "Hi" in prompt["text"]


def test_max_turns_truncates() -> None:
    env = TokenObservationWrapper(Script("Hi", endless=True), byte_tokenizer(), max_turns=2)
    steps = play(env, ["A", "B"])
    assert steps[0] == (1.0, False, False, {})
    assert steps[1] == (2.0, False, True, {"truncation_reason": "max_turns"})
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(torch.zeros(1, 3, dtype=torch.long))


def raw(env: Any, **arguments: Any) -> TokenObservationWrapper:
    return TokenObservationWrapper(
        env, byte_tokenizer(), **({"max_turns": 9, "apply_chat_template": False} | arguments)
    )


@pytest.mark.parametrize(("limit", "fits"), [(10, True), (9, False)])
def test_feedback_that_does_not_fit_ends_the_episode(limit: int, fits: bool) -> None:
    """2 + answer 2 + feedback 5 + one token of room make 10."""
    env = raw(Script("ab", "hello"), max_model_len=limit)
    ((_, terminated, truncated, info),) = play(env, ["X"])
    assert (terminated, truncated) == (False, not fits)
    assert info.get("truncation_reason") == (None if fits else "max_model_len")
    assert env.get_episode_data()[0].shape == (1, 4)


def test_room_for_the_answer_is_kept() -> None:
    assert play(raw(Script("ab", "c"), max_model_len=9, max_output_tokens=4), ["X"])[0][2] is False
    assert play(raw(Script("ab", "c"), max_model_len=8, max_output_tokens=4), ["X"])[0][2] is True


def test_a_first_prompt_without_room() -> None:
    env = raw(Script("hello"), max_model_len=8, max_output_tokens=4)
    with pytest.raises(ValueError, match=r"has 5 tokens .* room for 4 .* max_model_len is 8"):
        env.reset()


def test_an_answer_longer_than_the_context_is_refused() -> None:
    env = raw(Script("ab"), max_model_len=4)
    prompt, _ = env.reset()
    with pytest.raises(ValueError, match="5 tokens, but max_model_len is 4"):
        env.step(answer(prompt, "abc", env.tokenizer, end=False))


def test_the_sliding_window_drops_the_oldest_turns_and_trains_each_in_its_context() -> None:
    """First prompt 2; turns of answer 2 (with its end) and feedback 2; 9 tokens hold two turns."""
    env = raw(Script("ab", "11", "22", "33", "44"), max_model_len=9, enable_sliding_window=True)
    contexts = []
    prompt, _ = env.reset()
    for letter in "VWXYZ":
        contexts.append(env.tokenizer.decode(prompt["input_ids"][0]))
        prompt, _, terminated, truncated, _ = env.step(answer(prompt, letter, env.tokenizer))
        assert prompt["input_ids"].shape[1] <= 9
    assert (terminated, truncated) == (True, False)
    end = env.tokenizer.eos_token
    assert contexts == [
        "ab",
        f"abV{end}11",
        f"abW{end}22",
        f"abX{end}33",
        f"abY{end}44",
    ]
    ids, mask, turns, rewards = env.get_episode_data()
    texts = [env.tokenizer.decode(row).replace("<|pad|>", "") for row in ids]
    assert texts == [
        f"abV{end}11W{end}",
        f"abW{end}22X{end}",
        f"abX{end}33Y{end}",
        f"abY{end}44Z{end}",
    ]
    assert turns.tolist() == [
        [-1, 0, 0, -1, -1, 1, 1],
        [-1, -1, -1, -1, -1, 2, 2],
        [-1, -1, -1, -1, -1, 3, 3],
        [-1, -1, -1, -1, -1, 4, 4],
    ]
    assert torch.equal(mask, turns >= 0)
    assert rewards.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0, 0.0]


def test_a_slide_frees_half_of_the_context() -> None:
    """Turns of 4 tokens in 40: a row begins with at most 20 and takes several turns."""
    env = raw(
        Script("ab", *["12"] * 19), max_turns=20, max_model_len=40, enable_sliding_window=True
    )
    play(env, ["V"] * 20)
    ids, _, turns, _ = env.get_episode_data()
    assert turns[turns >= 0].tolist() == [turn for turn in range(20) for _ in range(2)]
    first = [int((row >= 0).nonzero()[0]) for row in turns[1:]]
    assert ids.shape[0] <= 5
    assert max(first) < 20 < ids.shape[1] <= 40


def test_a_slide_may_drop_several_turns_and_may_not_suffice() -> None:
    env = raw(Script("ab", "1", "2", "333333"), max_model_len=14, enable_sliding_window=True)
    steps = play(env, ["V", "W", "X"])
    assert not any(step[2] for step in steps)
    ids = env.get_episode_data()[0]
    assert ids.shape[0] == 1, "no answer was sampled after the window slid"

    env = raw(
        Script("ab", "1", "a very long observation"), max_model_len=14, enable_sliding_window=True
    )
    steps = play(env, ["V", "W"])
    assert steps[-1][2:] == (True, {"truncation_reason": "max_model_len"})
    assert env.get_episode_data()[2].max() == 1


@pytest.mark.parametrize("pad", ["<|pad|>", "<|im_end|>"])
def test_padding_is_taken_off_but_a_sampled_end_is_kept(pad: str) -> None:
    """Also where both are the same token."""
    env = raw(Script("ab"), pad_id=byte_tokenizer().convert_tokens_to_ids(pad))
    prompt, _ = env.reset()
    row = answer(prompt, "X", env.tokenizer)
    env.step(torch.cat([row, torch.full((1, 3), env.pad_id)], dim=1))
    assert env.get_episode_data()[1].sum() == 2


def test_without_a_pad_id_every_token_counts_as_sampled() -> None:
    """Some models may stop at their padding token; the end of a turn is then not to be lost."""
    for pad_id in (None, byte_tokenizer().pad_token_id):
        env = raw(Script("ab", "c"), pad_id=pad_id)
        prompt, _ = env.reset()
        for text in ("X", ""):
            row = answer(prompt, text, env.tokenizer, end_id=env.tokenizer.pad_token_id)
            prompt, *_ = env.step(row)
        assert env.get_episode_data()[1].sum() == 3
        assert env.get_episode_data()[0][0, -1] == env.tokenizer.pad_token_id


def test_what_else_the_chat_template_takes() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ mood }}: " + str(tokenizer.chat_template)
    env = TokenObservationWrapper(
        Script("Hi", "more"), tokenizer, 4, chat_template_kwargs={"mood": "calm"}
    )
    play(env, ["A", "B"])
    assert tokenizer.decode(env.get_episode_data()[0][0]).startswith("calm: <|im_start|>user\nHi")


def test_what_the_chat_template_cannot_take(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs has 'tokenize'"):
        TokenObservationWrapper(
            Script("Hi"), byte_tokenizer(), 4, chat_template_kwargs={"tokenize": True}
        )
    TokenObservationWrapper(
        *(Script("Hi"), byte_tokenizer(), 4),
        apply_chat_template=False,
        chat_template_kwargs={"without_a_template": 1},
    )
    assert "chat_template_kwargs ['without_a_template'] have no effect" in caplog.text


def test_what_was_sampled_is_kept_when_the_environment_raises() -> None:
    class Broken(Script):
        def step(self, action: str) -> Any:
            raise OSError("no such game")

    env = raw(Broken("ab"))
    prompt, _ = env.reset()
    with pytest.raises(OSError, match="no such game"):
        env.step(answer(prompt, "X", env.tokenizer))
    _, mask, turns, rewards = env.get_episode_data()
    assert (int(mask.sum()), int(turns.max()), float(rewards.sum())) == (2, 0, 0.0)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(answer(prompt, "X", env.tokenizer))


def test_128_turns_cost_the_tokenisation_of_128_single_turns() -> None:
    """Counted in calls and tokens; the conversation so far is never tokenised again."""
    turns = 128

    def cost(env: TokenObservationWrapper, answers: list[str]) -> tuple[int, int]:
        calls = tokens = 0
        plain = type(env.tokenizer).__call__

        def counting(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls, tokens
            made = plain(tokenizer, *args, **kwargs)
            calls, tokens = calls + 1, tokens + len(made["input_ids"])
            return made

        class Counting(type(env.tokenizer)):  # type: ignore[misc]
            __call__ = counting

        env.tokenizer.__class__ = Counting
        prompt, _ = env.reset()
        for text in answers:
            ids = torch.tensor([[*text.encode(), env.tokenizer.eos_token_id]])
            prompt, *_ = env.step(torch.cat([prompt["input_ids"], ids], dim=1))
        return calls, tokens

    observation = "What is the next move in this game of ours?"
    long_env = TokenObservationWrapper(
        Script(observation, endless=True), byte_tokenizer(), max_turns=turns + 1
    )
    long = cost(long_env, ["A"] * turns)
    single = cost(TokenObservationWrapper(Script(observation), byte_tokenizer(), 1), ["A"])
    assert long[0] <= 1.5 * turns * single[0]
    assert long[1] <= 1.5 * turns * single[1]


def test_evaluate_plays_the_first_evaluation_seeds() -> None:
    script, tokenizer = Script("a", "b"), byte_tokenizer()
    env = TokenObservationWrapper(script, tokenizer, max_turns=2, apply_chat_template=False)
    seeds: list[int] = []

    def act(prompts: list[ReasoningPrompts]) -> ActionResult:
        seeds.append(script.seed)
        return ActionResult([answer(prompt, "x", tokenizer) for prompt in prompts], [])

    evaluation = env.evaluate(act, loop=3)
    assert [seed - EVALUATION_SEED_START for seed in seeds] == [0, 0, 1, 1, 2, 2]
    assert evaluation.rewards.tolist() == [1.0 + 2.0] * 3
    assert evaluation.questions == ["a"] * 3
    assert evaluation.completions == ["x<|im_end|>bx<|im_end|>"] * 3


def test_close() -> None:
    env = raw(Script("ab"))
    env.close()
    assert env.env.closed


@pytest.mark.parametrize(
    ("method", "value", "says"),
    [
        ("reset", "text", r"reset must return \(observation, info\)"),
        ("reset", (1, {}), "observation .* is 1; it must be text"),
        ("reset", ("a", 3), "is 3; it must be a dict"),
        ("step", ("a", 0.0, True), r"step must return \(observation, reward"),
        ("step", ("a", "much", True, False, {}), "reward 'much'"),
    ],
)
def test_environments_that_return_something_else(method: str, value: Any, says: str) -> None:
    env = Script("ab")
    setattr(env, method, lambda *args, **kwargs: value)
    with pytest.raises(TypeError, match=says):
        play(raw(env), ["X"])


def test_a_reward_that_is_not_finite() -> None:
    env = Script("ab")
    env.step = lambda action: ("a", float("nan"), True, False, {})  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not a finite"):
        play(raw(env), ["X"])


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"env": object()}, TypeError, "env must have reset"),
        ({"max_turns": 0}, ValueError, "max_turns is .*must be at least 1"),
        ({"max_turns": 1.5}, TypeError, "max_turns is .*must be an integer"),
        ({"max_model_len": 1}, ValueError, "max_model_len is .*must be at least 2"),
        ({"max_output_tokens": 0}, ValueError, "max_output_tokens is .*must be at least 1"),
        ({"pad_id": -1}, ValueError, "pad_id is .*must be at least 0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        TokenObservationWrapper(
            **({"env": Script("a"), "tokenizer": byte_tokenizer(), "max_turns": 2} | arguments)
        )


@pytest.mark.parametrize(
    ("ids", "error", "says"),
    [
        ([[1, 2]], TypeError, "must be a tensor of token ids"),
        (torch.zeros(1, 4), TypeError, "must be a tensor of token ids"),
        (torch.zeros(4, dtype=torch.long), ValueError, r"has shape \(4,\)"),
        (torch.zeros(2, 4, dtype=torch.long), ValueError, r"has shape \(2, 4\)"),
        (torch.zeros(1, 4, dtype=torch.long), ValueError, "does not start with the 2 tokens"),
        (torch.tensor([[97, 98]]), ValueError, "no token after its prompt"),
    ],
)
def test_bad_completions(ids: Any, error: type[Exception], says: str) -> None:
    env = raw(Script("ab"))
    prompt, _ = env.reset()
    if isinstance(ids, torch.Tensor) and ids.tolist() == [[97, 98]]:
        ids = prompt["input_ids"]
    with pytest.raises(error, match=says):
        env.step(ids)


def test_nothing_before_reset() -> None:
    env = raw(Script("ab"))
    with pytest.raises(RuntimeError, match="call reset"):
        env.get_episode_data()
    assert env.transcript == ""
    env.reset()
    ids, mask, turns, rewards = env.get_episode_data()
    assert (ids.shape, mask.any().item(), turns.tolist()) == ((1, 2), False, [[-1]])
    assert rewards.tolist() == [0.0] * 9


def test_an_answer_that_fills_the_context_may_be_padded() -> None:
    """The padding is not taken for a token that was sampled: there was no room for one."""
    env = raw(Script("ab", endless=True), max_model_len=6, pad_id=byte_tokenizer().pad_token_id)
    prompt, _ = env.reset()
    full = answer(prompt, "WXYZ", env.tokenizer, end=False)
    env.step(torch.cat([full, torch.full((1, 3), env.pad_id)], dim=1))
    assert env.get_episode_data()[0].shape == (1, 6)
