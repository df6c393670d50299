"""A text environment as token ids: what the model saw and sampled is what it is trained on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from agilerl.llm_envs.base import checked_int, finite_number, shorten
from agilerl.llm_envs.episode_rows import EpisodeRows, Piece
from agilerl.llm_envs.episodes import evaluate_episodes
from agilerl.llm_envs.turn_boundary import TurnBoundary
from agilerl.typing import Act, Evaluation, ReasoningPrompts, TextEnv

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

    ``info["prefix"]`` and ``info["suffix"]``, if the environment gives them, are put directly
    around its observation. When an episode is cut off, ``info["truncation_reason"]`` says why:
    ``"max_turns"``, ``"max_model_len"``, or ``"environment"``.

    Args:
        env: A text environment: ``reset(seed) -> (str, info)`` (the seed is optional) and
            ``step(str) -> (str, reward, terminated, truncated, info)``.
        tokenizer: The model's tokenizer.
        max_turns: An episode is truncated after this many turns.
        pad_id: Right padding to take off the rows given to ``step``, for those who pad them: the
            first of a trailing run counts as sampled unless a special token is before it. None:
            nothing is taken off, which is right for ``get_action``, where a prompt that is
            completed once is not padded.
        apply_chat_template: Observations become user messages of the tokenizer's chat template;
            False: everything is put one behind the other as it is.
        max_model_len: No row gets longer; None: no limit. The training functions fill in the
            agent's.
        max_output_tokens: Room that a prompt has to leave for the answer; None: one token.
        enable_sliding_window: When the context is full, the oldest turns (but not the first
            observation) leave it until half of it is free, instead of the episode ending. Each turn
            is trained in the context it was sampled in, so an episode may give several rows.
        system_prompt: First message of every conversation.
        chat_template_kwargs: What else the chat template takes, such as ``enable_thinking``.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: A number out of range; a template that refuses the system prompt.
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
    ) -> None:
        self.env = _checked_env(env)
        self.tokenizer = tokenizer
        self.max_turns = checked_int("max_turns", max_turns)
        self.pad_id = None if pad_id is None else checked_int("pad_id", pad_id, 0)
        self.max_model_len = (
            None if max_model_len is None else checked_int("max_model_len", max_model_len, least=2)
        )
        self.max_output_tokens = (
            None
            if max_output_tokens is None
            else checked_int("max_output_tokens", max_output_tokens)
        )
        self.enable_sliding_window = enable_sliding_window
        self._boundary = TurnBoundary(
            tokenizer, apply_chat_template, system_prompt, chat_template_kwargs
        )
        self._takes_seed = _takes_seed(env)
        self._rows: EpisodeRows | None = None
        self._rewards: list[float] = []
        self._done = True

    @property
    def transcript(self) -> str:
        """The episode after its first prompt, as text; special tokens shown."""
        return "" if self._rows is None else self._rows.transcript

    def reset(self, seed: int | None = None) -> tuple[ReasoningPrompts, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: Given to the environment, if its ``reset`` takes one.

        Returns:
            The first prompt and the environment's info.

        Raises:
            TypeError: The environment's ``reset`` returned something else than text and info.
            ValueError: The first prompt leaves no room for output.
        """
        self._rows, self._rewards, self._done = None, [], True
        outcome = self.env.reset(seed=seed) if self._takes_seed else self.env.reset()
        observation, info = _checked_outcome("reset", outcome, ("observation", "info"))
        text, ids = self._boundary.open(_observed(observation, info))
        if not ids:
            raise ValueError("the first observation gives a prompt without any token")
        if not self._fits(len(ids)):
            raise ValueError(
                f"the first prompt has {len(ids)} tokens and has to leave room for "
                f"{self._reserve()} of output, but max_model_len is {self.max_model_len}: raise "
                "max_model_len, shorten the observation, or lower max_output_tokens"
            )
        self._rows, self._done = EpisodeRows(Piece(ids, text)), False
        return self._prompt(), dict(info)

    def step(
        self, full_completion_ids: torch.Tensor
    ) -> tuple[ReasoningPrompts, float, bool, bool, dict[str, Any]]:
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
        if self._rows is None or self._done:
            raise RuntimeError("no episode is running; call reset() first")
        action = self._action(full_completion_ids, self._rows.context_ids())
        text = self.tokenizer.decode(action, clean_up_tokenization_spaces=False)
        # Noted before the environment acts, which may raise: what was sampled is not lost.
        self._rows.add_action(Piece(action, text, turn=len(self._rewards)))
        self._rewards.append(0.0)
        self._done = True

        said = self.tokenizer.decode(
            action, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        names = ("observation", "reward", "terminated", "truncated", "info")
        outcome = _checked_outcome("step", self.env.step(said), names)
        observation, reward, terminated, truncated, info = outcome
        self._rewards[-1] = finite_number(
            "the environment's step returned the reward", reward, "return one finite number"
        )
        terminated, reason = bool(terminated), "environment" if truncated else None
        observation = _observed(observation, info)
        if not terminated and reason is None:
            reason = self._continue(self._rows, action, observation)
        self._done = terminated or reason is not None
        info = dict(info) if reason is None else {**info, "truncation_reason": reason}
        return self._prompt(), self._rewards[-1], terminated, reason is not None, info

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
        if self._rows is None:
            raise RuntimeError("there is no episode; call reset() first")
        rewards = torch.zeros(self.max_turns)
        rewards[: len(self._rewards)] = torch.tensor(self._rewards)
        return *self._rows.tensors(self.pad_id or self.tokenizer.pad_token_id or 0), rewards

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
        """Play one episode for each of the seeds 0 to ``loop - 1``.

        Args:
            act: Answers prompts once each.
            loop: Episodes to play.
        """
        return evaluate_episodes(self, act, range(loop))

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        close = getattr(self.env, "close", None)
        if callable(close):
            close()

    def _continue(self, rows: EpisodeRows, action: list[int], observation: str) -> str | None:
        """Append the environment's answer; or say why the episode cannot go on."""
        if len(self._rewards) >= self.max_turns:
            return "max_turns"
        text, ids = self._boundary.follow(action, observation)
        feedback = Piece(ids, text)
        if not self._fits(rows.length + len(feedback.ids)):
            if not self.enable_sliding_window:
                return "max_model_len"
            # Down to half the context at once: a slide begins a new row and recomputes its context.
            while not self._fits(2 * (rows.length + len(feedback.ids))) and rows.drop_oldest_turn():
                pass
            if not self._fits(rows.length + len(feedback.ids)):
                return "max_model_len"
        rows.add_feedback(feedback)
        return None

    def _fits(self, length: int) -> bool:
        return self.max_model_len is None or length + self._reserve() <= self.max_model_len

    def _reserve(self) -> int:
        return self.max_output_tokens or 1

    def _prompt(self) -> ReasoningPrompts:
        assert self._rows is not None
        input_ids = torch.tensor([self._rows.context_ids()], dtype=torch.long)
        return ReasoningPrompts(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            text=self._rows.context_text(),
        )

    def _action(self, full_completion_ids: Any, prompt: list[int]) -> list[int]:
        """The sampled ids: what follows the prompt, without padding."""
        remedy = "pass the (1, T) completion_ids that get_action returned for the last prompt"
        if not isinstance(full_completion_ids, torch.Tensor) or (
            full_completion_ids.is_floating_point()
        ):
            raise TypeError(
                f"full_completion_ids must be a tensor of token ids, got "
                f"{type(full_completion_ids).__name__}; {remedy}"
            )
        shape = tuple(full_completion_ids.shape)
        if len(shape) != 2 or shape[0] != 1:
            raise ValueError(f"full_completion_ids has shape {shape}; {remedy}")
        ids = full_completion_ids[0].tolist()
        if ids[: len(prompt)] != prompt:
            raise ValueError(
                f"full_completion_ids does not start with the {len(prompt)} tokens of the prompt "
                f"handed out last; {remedy}"
            )
        action = self._without_padding(ids[len(prompt) :])
        if not action:
            raise ValueError(f"full_completion_ids has no token after the prompt; {remedy}")
        length = len(prompt) + len(action)
        if self.max_model_len is not None and length > self.max_model_len:
            raise ValueError(
                f"full_completion_ids has {length} tokens, but max_model_len is "
                f"{self.max_model_len}: give the agent the same max_model_len, or a "
                f"max_output_tokens of at most {self._reserve()}"
            )
        return action

    def _without_padding(self, ids: list[int]) -> list[int]:
        end = len(ids)
        while end and ids[end - 1] == self.pad_id:
            end -= 1
        padded = end < len(ids)
        ended = end > 0 and ids[end - 1] in self._boundary.special_ids
        # What ends answers may be the padding's id: after plain text the first one was sampled.
        return ids[: end + 1] if padded and not ended else ids[:end]


def _checked_env(env: Any) -> TextEnv:
    if not callable(getattr(env, "reset", None)) or not callable(getattr(env, "step", None)):
        raise TypeError(
            f"env must have reset(seed) and step(action) methods, got {type(env).__name__}; pass a "
            "text environment"
        )
    checked: TextEnv = env
    return checked


def _takes_seed(env: TextEnv) -> bool:
    try:
        parameters = inspect.signature(env.reset).parameters.values()
    except (TypeError, ValueError):
        return True  # Some builtins have no signature.
    return any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters)


def _checked_outcome(method: str, outcome: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """What the environment returned, if it is a tuple of ``names`` with text and a mapping."""
    expected = f"the environment's {method} must return ({', '.join(names)})"
    if not isinstance(outcome, tuple | list) or len(outcome) != len(names):
        raise TypeError(f"{expected}, got {shorten(outcome)}")
    observation, *rest, info = outcome
    if not isinstance(observation, str):
        raise TypeError(f"{expected} with the observation as text, got {shorten(observation)}")
    if info is not None and not isinstance(info, Mapping):
        raise TypeError(f"{expected} with the info as a dict, got {shorten(info)}")
    return (observation, *rest, info or {})


def _observed(observation: str, info: Mapping[str, Any]) -> str:
    return f"{info.get('prefix') or ''}{observation}{info.get('suffix') or ''}"
