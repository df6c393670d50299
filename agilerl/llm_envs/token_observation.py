"""A text environment as token ids: the model is trained on exactly the ids it saw and sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from agilerl.checks import (
    COUNT,
    FLAG,
    OPTIONAL_COUNT,
    Number,
    require,
)
from agilerl.llm_envs.completion_checks import check_answer_length, check_completion
from agilerl.llm_envs.conversation.episode_tokens import EpisodeTokens, Segment
from agilerl.llm_envs.conversation.text_environment import reset_outcome, step_outcome, takes_seed
from agilerl.llm_envs.conversation.turn_boundary import TurnBoundary
from agilerl.llm_envs.event_loop import EventLoopThread, Wait, awaited
from agilerl.llm_envs.seeds import evaluate_episodes
from agilerl.llm_envs.tools import shown_tools
from agilerl.typing import Act, Evaluation, ReasoningPrompts, TextEnv

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ResetResult: TypeAlias = tuple[ReasoningPrompts, dict[str, Any]]
StepResult: TypeAlias = tuple[ReasoningPrompts, float, bool, bool, dict[str, Any]]
"""Next prompt, reward, terminated, truncated, info."""


class TokenObservationWrapper:
    """Plays one episode at a time, token in, token out: sampled ids are never tokenised again.

    ::

        prompt, info = env.reset(seed=0)
        done = False
        while not done:
            result = agent.get_action([prompt], repeat_prompts=False)
            prompt, reward, terminated, truncated, info = env.step(result.completion_ids[0])
            done = terminated or truncated
        token_ids, action_mask, turn_ids, turn_rewards = env.get_episode_data()

    ``info["prefix"]`` and ``info["suffix"]``, if present, are added directly before and after the
    observation. ``info["truncation_reason"]`` of a truncated episode is ``"max_turns"``,
    ``"max_model_len"``, or ``"environment"``.

    Where ``reset`` or ``step`` of the environment is ``async``, the methods here wait for it; all
    are awaited on one event loop, the wrapper's own or that of the vector environment.

    Args:
        env: A text environment: ``reset(seed) -> (observation, info)`` (the seed is optional) and
            ``step(str) -> (observation, reward, terminated, truncated, info)``. An observation is
            text or a list of messages, such as ``[{"role": "user", "content": "Hi"}]``; those of
            ``reset`` may begin with a system message and have examples of answers among them.
        tokenizer: The model's tokenizer.
        max_turns: An episode is truncated after this many turns.
        pad_id: Right padding to strip from what is given to ``step``; the first of a trailing run
            counts as sampled unless a special token precedes it. None: nothing is stripped, which
            is right for ``get_action``, where a prompt that is completed once is not padded.
        apply_chat_template: Observations become user messages of the tokenizer's chat template;
            False: observations and answers are concatenated as they are.
        max_model_len: Most tokens of a row; None: no limit. The training functions fill in the
            agent's.
        max_output_tokens: Tokens that a prompt must leave free for the answer; None: one.
        enable_sliding_window: When the context is full, the oldest turns (but not the first
            observation) leave it until half of it is free, instead of the episode ending. Each turn
            is trained in the context it was sampled in, so an episode may give several rows.
        system_prompt: First message of every conversation.
        chat_template_kwargs: Further arguments of the chat template, such as ``enable_thinking``.
        tools: Functions with type hints and docstrings in Google's style, or JSON schemas, which
            the chat template shows to the model. None: ``tool_schemas`` of the environment, if it
            has this attribute.
        skip_special_tokens: False keeps special tokens in what the environment's ``step`` is given,
            except the one that ends an answer: for calls of tools that are marked by them.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: A number out of range; a template that refuses the system prompt, or does not
            show tools; a tool without type hints or docstring.
    """

    def __init__(  # noqa: PLR0913 - the public contract
        self,
        env: TextEnv,
        tokenizer: PreTrainedTokenizerBase,
        max_turns: int,
        pad_id: int | None = None,
        apply_chat_template: bool = True,
        max_model_len: int | None = None,
        max_output_tokens: int | None = None,
        enable_sliding_window: bool = False,
        *,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Callable[..., Any] | Mapping[str, Any]] | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        require(
            isinstance(env, TextEnv),
            f"env must have reset(seed) and step(action) methods, got {type(env).__name__}; pass "
            "a text environment",
            TypeError,
        )
        COUNT("max_turns", max_turns)
        Number(0, integer=True, optional=True)("pad_id", pad_id)
        Number(2, integer=True, optional=True)("max_model_len", max_model_len)
        OPTIONAL_COUNT("max_output_tokens", max_output_tokens)
        self.env = env
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.pad_id = pad_id
        self.max_model_len = max_model_len
        self.max_output_tokens = max_output_tokens
        self.enable_sliding_window = enable_sliding_window
        FLAG("skip_special_tokens", skip_special_tokens)
        self.skip_special_tokens = skip_special_tokens
        shown = shown_tools(env, tools)
        self._shows_tools = len(shown) > 0
        self._boundary = TurnBoundary(
            tokenizer, apply_chat_template, system_prompt, chat_template_kwargs, shown
        )
        self._event_loop: EventLoopThread | None = None
        self._accepted: torch.Tensor | None = None
        self._takes_seed = takes_seed(env)
        self._tokens: EpisodeTokens | None = None
        self._rewards: list[float] = []
        self._done = True

    @property
    def transcript(self) -> str:
        """The episode after its first prompt, as text; special tokens shown."""
        return "" if self._tokens is None else self._tokens.transcript

    def reset(self, seed: int | None = None) -> ResetResult:
        """Start an episode.

        Args:
            seed: Given to the environment, if its ``reset`` takes one.

        Returns:
            The first prompt and the environment's info.

        Raises:
            TypeError: The environment's ``reset`` returned something else than an observation and
                info.
            ValueError: The first prompt leaves no room for output; messages in roles that are not
                allowed; an environment with native tools, none of which is shown.
        """
        self._tokens, self._rewards, self._done = None, [], True
        begun = self.env.reset(seed=seed) if self._takes_seed else self.env.reset()
        messages, info = reset_outcome(awaited(begun, self._own_wait))
        text, ids = self._boundary.open(messages)
        require(
            self._shows_tools or not info.get("tool_schemas"),
            "the environment has tools that the chat template has to show (tool_schemas of the "
            "info that reset returned), but the wrapper was given none: pass tools=..., the "
            "tool_schemas of the ToolEnv within, or give the environment around it this attribute",
        )
        require(bool(ids), "the first observation gives a prompt without any token")
        require(
            self._fits(len(ids)),
            f"the first prompt has {len(ids)} tokens and has to leave room for {self._reserve()} "
            f"of output, but max_model_len is {self.max_model_len}: raise max_model_len, shorten "
            "the observation, or lower max_output_tokens",
        )
        self._tokens, self._done = EpisodeTokens(Segment(ids, text)), False
        return self._prompt(), info

    def step(self, full_completion_ids: torch.Tensor) -> StepResult:
        """Take the model's answer to the prompt handed out last.

        Args:
            full_completion_ids: ``(1, T)`` long: prompt, answer, and padding if ``pad_id`` is set.

        Returns:
            The next prompt, reward, terminated, truncated, info. After the end the prompt is the
            conversation as it was.

        Raises:
            RuntimeError: No episode is running.
            TypeError: Not a tensor of ids, or the environment returned something else than its
                five values.
            ValueError: The ids do not continue the prompt or are too many; the reward is not
                finite.
        """
        if self._tokens is None or self._done:
            raise RuntimeError("no episode is running; call reset() first")
        if full_completion_ids is not self._accepted:
            name, prompt = "full_completion_ids", self._prompt()["input_ids"]
            check_completion(name, full_completion_ids, prompt, group_size=1)
            check_answer_length(name, full_completion_ids, prompt, self)
        self._accepted = None
        action = self._without_padding(full_completion_ids[0, self._tokens.length :].tolist())
        text = self.tokenizer.decode(action, clean_up_tokenization_spaces=False)
        # Before the environment acts, which may raise: the sampled ids are kept in any case.
        self._tokens.append(Segment(action, text, turn=len(self._rewards)))
        self._rewards.append(0.0)
        self._done = True

        if self.skip_special_tokens:
            text = self.tokenizer.decode(
                action, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        else:
            text = self._boundary.answer_text(action)
        outcome = awaited(self.env.step(text), self._own_wait)
        messages, reward, terminated, truncated, info = step_outcome(outcome)
        self._rewards[-1] = reward
        reason = "environment" if truncated else None
        if not terminated and reason is None:
            reason = self._continue(self._tokens, action, messages)
        self._done = terminated or reason is not None
        if reason is not None:
            info["truncation_reason"] = reason
        return self._prompt(), reward, terminated, reason is not None, info

    def accept(self, full_completion_ids: torch.Tensor) -> None:
        """Let :meth:`step` take this tensor, which was checked with those of a batch, as it is."""
        self._accepted = full_completion_ids

    def get_episode_data(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The episode as training rows; R is 1 unless the window slid.

        Returns:
            Token ids ``(R, T)`` long, right-padded, up to the last action; action mask
            ``(R, T - 1)`` bool, True where position s predicts a sampled token; turn ids
            ``(R, T - 1)`` long, -1 outside actions; rewards ``(max_turns,)`` float32, 0 for turns
            that were not played.

        Raises:
            RuntimeError: No episode was started.
        """
        if self._tokens is None:
            raise RuntimeError("there is no episode; call reset() first")
        rewards = torch.zeros(self.max_turns)
        rewards[: len(self._rewards)] = torch.tensor(self._rewards)
        return *self._tokens.tensors(self.pad_id or self.tokenizer.pad_token_id or 0), rewards

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
        """Play one episode for each of the first ``loop`` seeds from ``EVALUATION_SEED_START`` on.

        Args:
            act: Answers prompts once each.
            loop: Episodes to play.
        """
        return evaluate_episodes(self, act, loop)

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        close = getattr(self.env, "close", None)
        try:
            if callable(close):
                awaited(close(), self._own_wait)
        finally:
            if self._event_loop is not None:
                self._event_loop.stop()
                self._event_loop = None

    def _own_wait(self) -> Wait:
        """Waits on an event loop of the wrapper's own, where no vector environment calls."""
        self._event_loop = self._event_loop or EventLoopThread("environment")
        return self._event_loop.wait_for

    def _continue(
        self, tokens: EpisodeTokens, action: list[int], messages: list[Any]
    ) -> str | None:
        """Append the next observation, or return the reason why the episode is truncated."""
        if len(self._rewards) >= self.max_turns:
            return "max_turns"
        text, ids = self._boundary.follow(action, messages)
        if not self._fits(tokens.length + len(ids)):
            if not self.enable_sliding_window:
                return "max_model_len"
            # Down to half the context at once: a slide begins a new row and recomputes its context.
            while not self._fits(2 * (tokens.length + len(ids))) and tokens.drop_oldest_turn():
                pass
            if not self._fits(tokens.length + len(ids)):
                return "max_model_len"
        tokens.append(Segment(ids, text))
        return None

    def _fits(self, length: int) -> bool:
        return self.max_model_len is None or length + self._reserve() <= self.max_model_len

    def _reserve(self) -> int:
        return self.max_output_tokens or 1

    def _prompt(self) -> ReasoningPrompts:
        assert self._tokens is not None
        input_ids = torch.tensor([self._tokens.context_ids()], dtype=torch.long)
        return ReasoningPrompts(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            text=self._tokens.context_text(),
        )

    def _without_padding(self, ids: list[int]) -> list[int]:
        end = len(ids)
        while end and ids[end - 1] == self.pad_id:
            end -= 1
        assert self._tokens is not None
        full = self._tokens.length + end == self.max_model_len
        ended = end > 0 and ids[end - 1] in self._boundary.special_ids
        # What ends answers may be the padding's id: after plain text the first one was sampled, if
        # there was room for it.
        return ids[:end] if ended or full else ids[: end + 1]
