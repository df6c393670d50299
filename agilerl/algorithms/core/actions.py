"""From prompt dicts to 1-D prompts, from completions to an ``ActionResult``, and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from agilerl.llm.batch import stack_rows
from agilerl.llm.generation import Completions
from agilerl.typing import ActionResult, MultiTurnEnv, ReasoningPrompts

if TYPE_CHECKING:
    from agilerl.algorithms.core.llm import LLMAlgorithm

Act: TypeAlias = Callable[[Sequence[ReasoningPrompts]], ActionResult]
"""How prompts are answered."""


def unpadded_prompts(obs: Sequence[ReasoningPrompts] | ReasoningPrompts) -> list[torch.Tensor]:
    """The 1-D ids of prompts, without padding on either side; copies, so ``obs`` stays as it is.

    Raises:
        TypeError: If a prompt is no dict with ``input_ids`` and ``attention_mask`` tensors.
        ValueError: If there is no prompt, or a dict does not hold exactly one.
    """
    if isinstance(obs, str) or not isinstance(obs, Mapping | Sequence):
        raise TypeError(f"obs is of type {type(obs).__name__}; it must be a list of prompt dicts")
    prompts = [
        _unpadded(i, prompt) for i, prompt in enumerate([obs] if isinstance(obs, Mapping) else obs)
    ]
    if not prompts:
        raise ValueError("obs is empty; it must hold at least one prompt")
    return prompts


def _unpadded(index: int, prompt: Any) -> torch.Tensor:
    names = ("input_ids", "attention_mask")
    if not isinstance(prompt, Mapping) or not all(
        isinstance(prompt.get(name), torch.Tensor) for name in names
    ):
        raise TypeError(
            f"obs[{index}] is {prompt!r}; it must be a dict with tensors {names[0]!r} and "
            f"{names[1]!r} of shape (1, P), as tokenizer(text, return_tensors='pt') gives"
        )
    ids, mask = (prompt[name] for name in names)
    if ids.shape != mask.shape or ids.numel() != ids.shape[-1]:
        raise ValueError(
            f"obs[{index}] has input_ids of shape {tuple(ids.shape)} and attention_mask of shape "
            f"{tuple(mask.shape)}; both must be (1, P), one prompt per dict"
        )
    return ids.reshape(-1)[mask.reshape(-1).bool()].cpu().long()


def action_result(
    prompts: Sequence[torch.Tensor], completions: Completions, samples: int, pad_token_id: int
) -> ActionResult:
    """Put completions behind their prompts, ``samples`` rows per prompt."""
    ids, masks = [], []
    for i, prompt in enumerate(prompts):
        group = completions.token_ids[i * samples : (i + 1) * samples]
        rows = [torch.cat([prompt, completion]) for completion in group]
        ids.append(stack_rows(rows, pad_token_id))
        position = torch.arange(ids[-1].shape[1] - 1)
        # From lengths, not from ids: the sampled end-of-sequence token may be the padding's id.
        ends = torch.tensor([len(row) - 1 for row in rows])
        masks.append((position >= len(prompt) - 1) & (position < ends[:, None]))
    logps: list[torch.Tensor | None] | None = (
        None if completions.logps is None else list(completions.logps)
    )
    return ActionResult(ids, masks, logps)


def evaluate(agent: LLMAlgorithm, env: Any, loop: int) -> np.ndarray:
    """Greedy rewards ``(loop · rows,)``: of the test split, or of episodes.

    Raises:
        TypeError: If the environment is of no known kind.
        ValueError: If ``loop`` is not positive.
    """
    if loop < 1:
        raise ValueError(f"loop is {loop}; it must be at least 1")

    def act(prompts: Sequence[ReasoningPrompts]) -> ActionResult:
        return agent.get_action(prompts, training=False)

    if hasattr(env, "eval_mode"):
        # The adapter is folded once for the whole split.
        with env.eval_mode(), agent.policy.rollout_weights():
            return np.concatenate([_answer_test_split(act, env) for _ in range(loop)])
    if hasattr(env, "evaluate"):
        with agent.rollout():
            return np.concatenate([env.evaluate(act).returns.numpy() for _ in range(loop)])
    if hasattr(env, "get_episode_data"):
        with agent.rollout():
            returns = [_play_episode(act, env, seed) for seed in range(loop)]
        return np.array(returns, dtype=np.float32)
    raise TypeError(
        f"env is of type {type(env).__name__}; it must be a ReasoningGym, a SyncMultiTurnVecEnv or "
        "a TokenObservationWrapper"
    )


def _answer_test_split(act: Act, env: Any) -> np.ndarray:
    """Rewards ``(rows,)`` of a ``ReasoningGym`` in ``eval_mode``."""
    rewards: list[torch.Tensor] = []
    prompts = env.reset()
    while prompts:
        prompts, scored = env.step(act(prompts).completion_ids)[:2]
        rewards.append(scored.reshape(-1))
    # With fewer rows than processes, some have none.
    return torch.cat([torch.zeros(0), *rewards]).numpy()


def _play_episode(act: Act, env: MultiTurnEnv, seed: int) -> float:
    """The return of one episode."""
    prompt, _ = env.reset(seed=seed)
    total, done = 0.0, False
    while not done:
        action = act([prompt]).completion_ids[0]
        prompt, reward, terminated, truncated, _ = env.step(action)
        total += reward
        done = terminated or truncated
    return total
