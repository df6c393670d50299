"""Multi-turn episodes under way, played together; what their environments return is checked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from agilerl.checks import InstanceOf, finite_number, require, shorten
from agilerl.typing import MultiTurnEnv, ReasoningPrompts


def _no_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row without prompt and actions, which trains nothing."""
    no_action = torch.zeros(1, 1, dtype=torch.bool)
    return torch.zeros(1, 2, dtype=torch.long), no_action, torch.full((1, 1), -1)


@dataclass
class Episode:
    """One episode under way. What an environment returns is checked here.

    ``start``, ``advance`` and ``finish`` raise TypeError or ValueError for values that no
    environment may return; the caller then calls ``fail``.
    """

    seed: int
    prompt: ReasoningPrompts | None = None
    """The prompt to answer next; None when the episode is over."""
    first_prompt: str = ""
    turns: int = 0
    rewards: list[float] = field(default_factory=list)
    logps: list[torch.Tensor | None] = field(default_factory=list)
    """The sampler's log-probs, one entry per turn."""
    generated_tokens: int = 0
    truncated: bool = False
    failed: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """What came with the last prompt or reward."""
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(default_factory=_no_rows)
    turns_planned: int = 0
    """``max_turns`` of the environment."""
    transcript: str = ""

    def start(self, outcome: Any) -> None:
        """Take what ``reset`` returned."""
        prompt, info = unpacked("reset", outcome, ("prompt", "info"))
        self.prompt = _checked_prompt("reset", prompt)
        self.info = _checked_info("reset", info)
        self.first_prompt = str(self.prompt.get("text", ""))

    def act(self, completion_ids: torch.Tensor, logps: torch.Tensor | None) -> None:
        """Count the answer to the prompt: ``(1, T)`` ids, prompt included."""
        assert self.prompt is not None
        self.turns += 1
        self.generated_tokens += completion_ids.shape[1] - self.prompt["input_ids"].shape[1]
        self.logps.append(None if logps is None else logps.detach().cpu().reshape(-1))

    def advance(self, outcome: Any, max_turns: int | None) -> None:
        """Take what ``step`` returned; the episode ends after ``max_turns`` at the latest."""
        names = ("prompt", "reward", "terminated", "truncated", "info")
        prompt, reward, terminated, truncated, info = unpacked("step", outcome, names)
        remedy = f"step must return ({', '.join(names)})"
        self.rewards.append(finite_number("step returned the reward", reward, remedy))
        self.info = _checked_info("step", info)
        done = finite_number("step returned terminated =", terminated, remedy) != 0
        self.truncated = finite_number("step returned truncated =", truncated, remedy) != 0
        if not (done or self.truncated) and self.turns == max_turns:
            self.truncated = True
            self.info["truncation_reason"] = "max_turns"
        over = done or self.truncated
        self.prompt = None if over else _checked_prompt("step", prompt)

    def finish(self, outcome: Any) -> None:
        """Take what ``get_episode_data`` returned, and the transcript."""
        data, self.transcript = outcome
        names = ("token_ids", "action_mask", "turn_ids", "turn_rewards")
        tensors = unpacked("get_episode_data", data, names)
        kinds = [type(tensor).__name__ for tensor in tensors]
        require(
            all(isinstance(tensor, torch.Tensor) for tensor in tensors),
            f"get_episode_data must return four tensors, got {kinds}",
            TypeError,
        )
        ids, mask, turn_ids, rewards = (tensor.detach().cpu() for tensor in tensors)
        mask = mask.bool()
        shapes = [tuple(tensor.shape) for tensor in (ids, mask, turn_ids)]
        require(
            ids.dim() == 2 and len(ids) > 0 and mask.shape == turn_ids.shape == ids[:, 1:].shape,
            f"get_episode_data must return (R, T) ids, (R, T - 1) mask and turn ids, got {shapes}",
        )
        trained = turn_ids[mask]
        require(
            not ((trained < 0) | (trained >= self.turns)).any(),
            f"get_episode_data returned turn ids {trained.unique().tolist()} at actions after "
            f"{self.turns} turns; turns count from 0",
        )
        self.rows = ids.long(), mask, turn_ids.long()
        self.turns_planned = rewards.numel()

    def fail(self, error_reward: float) -> None:
        """End the episode; its last turn gets ``error_reward``."""
        self.failed, self.truncated, self.prompt = True, False, None
        del self.rewards[max(self.turns - 1, 0) :]
        self.rewards.append(error_reward)

    def row_logps(self) -> list[torch.Tensor | None]:
        """The sampler's log-probs of each training row, its turns concatenated."""
        _, masks, turn_ids = self.rows
        return [self._logps_of(turns[mask]) for mask, turns in zip(masks, turn_ids, strict=True)]

    def _logps_of(self, actions: torch.Tensor) -> torch.Tensor | None:
        """The log-probs of a row with these turns, one entry per action."""
        of_turns = [torch.zeros(0)]
        turns, counts = actions.unique_consecutive(return_counts=True)
        for turn, count in zip(turns.tolist(), counts.tolist(), strict=True):
            logps = self.logps[turn]
            if logps is None:
                return None
            require(
                logps.numel() >= count,
                f"turn {turn} of the episode with seed {self.seed} has {count} generated tokens, "
                f"but sampling_logps has {logps.numel()} for it; give one each",
            )
            # Trailing pad tokens are stripped from a row, even if the model sampled them.
            of_turns.append(logps[:count])
        return torch.cat(of_turns)


@dataclass
class EpisodeBatch:
    """Episodes that are played together; episode i is played in environment i."""

    episodes: list[Episode]
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0
    handed_out: float = 0.0
    """``time.perf_counter()`` when the prompts were handed out."""
    first_failure: str = ""
    first_error: BaseException | None = None

    def waiting(self) -> list[int]:
        """Indices of the episodes that have a prompt to answer."""
        return [i for i, episode in enumerate(self.episodes) if episode.prompt is not None]

    def prompts(self) -> list[ReasoningPrompts]:
        """Their prompts."""
        return [episode.prompt for episode in self.episodes if episode.prompt is not None]

    def check_groups(self, size: int) -> None:
        """Check that all episodes of a group begin with the same prompt.

        Advantages compare an episode with the others of its group, so these must have one task.

        Raises:
            ValueError: Naming two that differ.
        """
        for i, episode in enumerate(self.episodes):
            first = self.episodes[i - i % size]
            if episode.prompt is None or first.prompt is None:  # it failed
                continue
            require(
                torch.equal(episode.prompt["input_ids"], first.prompt["input_ids"]),
                f"episodes {i - i % size} and {i} are of one group, with the seed {episode.seed}, "
                "but begin with different prompts: reset(seed) of the environment must choose its "
                "task by the seed alone, for example with random.Random(seed)",
            )

    def failed(self) -> list[int]:
        """Indices of the episodes that failed."""
        return [i for i, episode in enumerate(self.episodes) if episode.failed]

    @property
    def mostly_failed(self) -> bool:
        """Whether more than half of the episodes failed."""
        return 2 * len(self.failed()) > len(self.episodes)

    def fail(self, index: int, error: BaseException, error_reward: float) -> None:
        """End an episode because of an error in its environment."""
        episode = self.episodes[index]
        if self.first_error is None:
            when = f"in turn {episode.turns - 1}" if episode.turns else "before its first turn"
            self.first_error = error
            self.first_failure = (
                f"episode {index} (seed {episode.seed}) {when}: {type(error).__name__}: {error}"
            )
        episode.fail(error_reward)

    @contextmanager
    def environment_time(self) -> Iterator[None]:
        """Count the time spent inside as environment time."""
        start = time.perf_counter()
        yield
        self.environment_seconds += time.perf_counter() - start


def episode_data(env: MultiTurnEnv) -> tuple[Any, str]:
    """What ``Episode.finish`` takes."""
    return env.get_episode_data(), transcript(env)


def transcript(env: MultiTurnEnv) -> str:
    """The episode as text, which environments need not keep."""
    return str(getattr(env, "transcript", ""))


def unpacked(method: str, outcome: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """What a method of an environment returned, as a tuple with one value for each name.

    Raises:
        TypeError: It returned something else.
    """
    if not isinstance(outcome, tuple | list) or len(outcome) != len(names):
        raise TypeError(f"{method} must return ({', '.join(names)}), got {shorten(outcome)}")
    return tuple(outcome)


def _checked_prompt(method: str, prompt: Any) -> ReasoningPrompts:
    ids = prompt.get("input_ids") if isinstance(prompt, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[0] != 1:
        raise TypeError(
            f"{method} must return a prompt dict with input_ids of shape (1, P), got "
            f"{shorten(prompt)}"
        )
    return cast(ReasoningPrompts, prompt)


def _checked_info(method: str, info: Any) -> dict[str, Any]:
    """A copy of ``info``; None counts as empty."""
    InstanceOf(Mapping, "a dict")(f"the info that {method} returned", info)
    return dict(info or {})
