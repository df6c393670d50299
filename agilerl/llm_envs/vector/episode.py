"""One multi-turn episode in play, and its environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from agilerl.checks import InstanceOf, finite_number, require, shorten, unpacked
from agilerl.llm_envs.failures import WrongRewardError, reason
from agilerl.llm_envs.seeds import transcript_of
from agilerl.llm_envs.timeouts import CallOutcome
from agilerl.llm_envs.token_observation import TokenObservationWrapper
from agilerl.typing import MultiTurnEnv, ReasoningPrompts


def _no_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row without prompt and actions, which trains nothing."""
    no_action = torch.zeros(1, 1, dtype=torch.bool)
    return torch.zeros(1, 2, dtype=torch.long), no_action, torch.full((1, 1), -1)


@dataclass
class Episode:
    """One episode in play, and its environment. What that returns is checked here.

    ``reset``, ``act`` and ``read`` are or give calls of the environment, which may take long.
    ``start``, ``advance`` and ``finish`` take what these return, and raise TypeError or ValueError
    for what no environment may return.
    """

    seed: int
    env: MultiTurnEnv | None = None
    """None where it could not be made."""
    prompt: ReasoningPrompts | None = None
    """The prompt to answer next; None when the episode is over."""
    first_prompt: str = ""
    turns: int = 0
    rewards: list[float] = field(default_factory=list)
    logps: list[torch.Tensor | None] = field(default_factory=list)
    """The sampler's log-probs, one entry per turn."""
    generated_tokens: int = 0
    truncated: bool = False
    error: BaseException | None = None
    """Why it failed."""
    timed_out: bool = False
    """Whether that was a call that ran out of time."""
    info: dict[str, Any] = field(default_factory=dict)
    """What came with the last prompt or reward."""
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(default_factory=_no_rows)
    turns_planned: int = 0
    """``max_turns`` of the environment."""
    transcript: str = ""

    def take(self, outcome: CallOutcome, method: Callable[[Episode, Any], None]) -> None:
        """Give what a call returned to ``start``, ``advance`` or ``finish``, or end the episode.

        Raises:
            WrongRewardError: If the call did.
        """
        error = outcome.error
        if isinstance(error, WrongRewardError):
            raise error
        if error is None:
            try:
                method(self, outcome.value)
            except (TypeError, ValueError) as wrong_value:
                error = wrong_value
        if error is not None and self.error is None:
            self.error, self.timed_out = error, outcome.timed_out
            self.truncated, self.prompt = False, None

    def reset(self) -> Callable[[], Any]:
        """The call that resets the environment."""
        env = self.env
        assert env is not None
        return partial(env.reset, seed=self.seed)

    def start(self, outcome: Any) -> None:
        """Take what ``reset`` returned."""
        prompt, info = unpacked("reset", outcome, ("prompt", "info"))
        self.prompt = _checked_prompt("reset", prompt)
        self.info = _checked_info("reset", info)
        self.first_prompt = str(self.prompt.get("text", ""))

    def act(self, completion_ids: torch.Tensor, logps: torch.Tensor | None) -> Callable[[], Any]:
        """The call that gives the environment the answer: ``(1, T)`` checked ids."""
        env = self.env
        assert env is not None and self.prompt is not None
        self.turns += 1
        self.generated_tokens += completion_ids.shape[1] - self.prompt["input_ids"].shape[1]
        self.logps.append(None if logps is None else logps.detach().cpu().reshape(-1))
        if isinstance(env, TokenObservationWrapper):
            env.accept(completion_ids)
        return partial(env.step, completion_ids)

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

    def read(self) -> tuple[Any, str]:
        """The environment's rows, and its transcript if it keeps one."""
        assert self.env is not None
        return self.env.get_episode_data(), transcript_of(self.env)

    def finish(self, outcome: Any) -> None:
        """Take what :meth:`read` returned."""
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

    @property
    def failure(self) -> str | None:
        """When it failed, and why in one line."""
        if self.error is None:
            return None
        return f"{self.stage}: {reason(self.error)}".partition("\n")[0]

    @property
    def stage(self) -> str:
        """Where it is, for messages."""
        return f"in turn {self.turns - 1}" if self.turns else "before its first turn"


def check_groups(episodes: Sequence[Episode], size: int) -> None:
    """Check that all episodes of a group begin with the same prompt.

    Advantages compare an episode with the others of its group, so these must have one task.

    Raises:
        ValueError: Naming two that differ.
    """
    for start in range(0, len(episodes), size):
        group = enumerate(episodes[start : start + size], start)
        begun = [(i, e.prompt["input_ids"]) for i, e in group if e.prompt is not None]
        for i, prompt in begun[1:]:
            first, expected = begun[0]
            require(
                torch.equal(prompt, expected),
                f"episodes {first} and {i} are of one group, with the seed {episodes[i].seed}, but "
                "begin with different prompts: reset(seed) of the environment must choose its task "
                "by the seed alone, for example with random.Random(seed)",
            )


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
