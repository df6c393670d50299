"""The episodes that a vector environment plays together, and the answers given to them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from agilerl.llm_envs.base import ANSWERS_REMEDY, check_answers
from agilerl.llm_envs.episodes import Episode
from agilerl.typing import ReasoningPrompts


@dataclass
class EpisodeBatch:
    """Episodes that are played together."""

    episodes: list[Episode]
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0
    handed_out: float = 0.0
    """``time.perf_counter()`` when the prompts were handed out."""
    first_failure: str = ""
    first_error: BaseException | None = None

    def waiting(self) -> list[int]:
        """Places of the episodes that have a prompt to answer."""
        return [place for place, e in enumerate(self.episodes) if e.prompt is not None]

    def prompts(self) -> list[ReasoningPrompts]:
        """Their prompts."""
        return [e.prompt for e in self.episodes if e.prompt is not None]

    def failed(self) -> list[int]:
        """Places of the episodes that failed."""
        return [place for place, e in enumerate(self.episodes) if e.failed]

    @property
    def lost(self) -> bool:
        """Whether more than half of the episodes failed."""
        return 2 * len(self.failed()) > len(self.episodes)

    def note(self, place: int, error: BaseException) -> None:
        """Remember that the environment at ``place`` failed."""
        if self.first_error is None:
            episode = self.episodes[place]
            when = f"in turn {episode.turns - 1}" if episode.turns else "before its first turn"
            self.first_error = error
            self.first_failure = (
                f"episode {place} (seed {episode.seed}) {when}: {type(error).__name__}: {error}"
            )

    @contextmanager
    def in_environments(self) -> Iterator[None]:
        """Count what is done inside as environment time."""
        start = time.perf_counter()
        yield
        self.environment_seconds += time.perf_counter() - start


def checked_answers(
    completion_ids: Any, prompts: Sequence[ReasoningPrompts], envs: Sequence[Any]
) -> list[torch.Tensor]:
    """The answers to ``prompts``, one ``(1, T)`` tensor of ids each, on the CPU.

    What is wrong with an answer is found here, before any environment acts: an exception from an
    environment counts as its own failure.

    Args:
        completion_ids: What the caller passed.
        prompts: The prompts handed out last.
        envs: The environment of each. Where one has a ``max_model_len`` that is not None, no
            answer may be longer; trailing ``pad_id`` does not count.

    Raises:
        TypeError: Something else than a list of tensors of ids.
        ValueError: Another number of answers, another shape, not starting with the prompt, nothing
            after it, or too long.
    """
    check_answers(completion_ids, prompts)
    answers = []
    for index, (ids, prompt, env) in enumerate(zip(completion_ids, prompts, envs, strict=True)):
        if ids.dim() != 2 or ids.shape[0] != 1:
            raise ValueError(
                f"completion_ids[{index}] has shape {tuple(ids.shape)}, expected (1, T): prompt "
                f"and one answer; {ANSWERS_REMEDY}, with repeat_prompts=False"
            )
        answer, start = ids.detach().cpu(), prompt["input_ids"].cpu()
        if not torch.equal(answer[:, : start.shape[1]], start):
            raise ValueError(
                f"completion_ids[{index}] does not start with the {start.shape[1]} tokens of "
                f"prompt {index}; {ANSWERS_REMEDY}"
            )
        if answer.shape[1] == start.shape[1]:
            raise ValueError(
                f"completion_ids[{index}] has no token after its prompt; {ANSWERS_REMEDY}"
            )
        length, limit = _length(answer[0], env), getattr(env, "max_model_len", None)
        if limit is not None and length > limit:
            raise ValueError(
                f"completion_ids[{index}] has {length} tokens, but max_model_len of its "
                f"environment is {limit}: give the agent the same max_model_len"
            )
        answers.append(answer)
    return answers


def checked_logps(
    sampling_logps: Sequence[torch.Tensor | None] | None, count: int
) -> Sequence[torch.Tensor | None]:
    """One entry for each of ``count`` prompts.

    Raises:
        ValueError: Another number of them.
    """
    logps = [None] * count if sampling_logps is None else sampling_logps
    if len(logps) != count:
        raise ValueError(
            f"sampling_logps has {len(logps)} entries for the {count} prompts handed out; pass one "
            "per prompt, or None"
        )
    return logps


def _length(ids: torch.Tensor, env: Any) -> int:
    """Tokens up to the last that is not padding."""
    pad_id = getattr(env, "pad_id", None)
    if pad_id is None:
        return len(ids)
    tokens = (ids != pad_id).nonzero()
    return int(tokens[-1]) + 1 if len(tokens) else 0
