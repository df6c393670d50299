"""The episodes that a vector environment plays together, and the answers given to them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

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
    hung: set[int] = field(default_factory=set)
    """Places of environments that a thread still has."""
    first_failure: str = ""
    first_error: BaseException | None = None

    def waiting(self) -> list[int]:
        """Places of the episodes that have a prompt to answer."""
        return [place for place, e in enumerate(self.episodes) if e.prompt is not None]

    def prompts(self) -> list[ReasoningPrompts]:
        """Their prompts."""
        return [e.prompt for e in self.episodes if e.prompt is not None]

    def note(self, place: int, error: BaseException, timed_out: bool) -> None:
        """Remember that the environment at ``place`` failed."""
        if timed_out:
            self.hung.add(place)
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


def checked_answers(completion_ids: Any, prompts: Sequence[ReasoningPrompts]) -> list[torch.Tensor]:
    """The answers to ``prompts``, one ``(1, T)`` tensor of ids each, on the CPU.

    Raises:
        TypeError: Something else than a list of tensors of ids.
        ValueError: Another number of answers, another shape, or not starting with the prompt.
    """
    remedy = "pass the completion_ids that get_action returned for the prompts handed out last"
    if not isinstance(completion_ids, list | tuple):
        raise TypeError(
            f"completion_ids must be a list of tensors, got {type(completion_ids).__name__}; "
            f"{remedy}"
        )
    if len(completion_ids) != len(prompts):
        raise ValueError(
            f"completion_ids has {len(completion_ids)} entries for the {len(prompts)} prompts "
            f"handed out; {remedy}"
        )
    answers = []
    for index, (ids, prompt) in enumerate(zip(completion_ids, prompts, strict=True)):
        if not isinstance(ids, torch.Tensor) or ids.is_floating_point():
            raise TypeError(f"completion_ids[{index}] must be a tensor of token ids; {remedy}")
        if ids.dim() != 2 or ids.shape[0] != 1:
            raise ValueError(
                f"completion_ids[{index}] has shape {tuple(ids.shape)}, expected (1, T): prompt "
                f"and one answer; {remedy}, with repeat_prompts=False"
            )
        answer, start = ids.detach().cpu(), prompt["input_ids"].cpu()
        if not torch.equal(answer[:, : start.shape[1]], start):
            raise ValueError(
                f"completion_ids[{index}] does not start with the {start.shape[1]} tokens of "
                f"prompt {index}; {remedy}"
            )
        answers.append(answer)
    return answers
