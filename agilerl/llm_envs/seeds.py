"""Seeds of multi-turn episodes: training and evaluation have different ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from agilerl.checks import Number, require
from agilerl.typing import Act, Evaluation, MultiTurnEnv

EVALUATION_SEED_START = 1_000_000_000
"""Evaluation episodes have the seeds from here on; training seeds are below."""

USE_ROW_OF_SEED = (
    f"evaluation seeds begin at {EVALUATION_SEED_START}: where a seed chooses a row of data, use "
    "agilerl.llm_envs.row_of_seed(seed, train, test)"
)
"""Remedy, for messages."""

Row = TypeVar("Row")


def row_of_seed(seed: int, train: Sequence[Row], test: Sequence[Row]) -> Row:
    """The row of a dataset that an episode is about: one of ``test`` for evaluation seeds.

    For ``reset(seed)`` of an environment whose tasks are rows of data. ``data[seed % len(data)]``
    would evaluate on training rows.

    Args:
        seed: Of the episode.
        train: Training rows; taken again from the first where there are more seeds.
        test: Held-out rows, likewise.

    Raises:
        ValueError: If there is no row.
    """
    Number(0, integer=True)("seed", seed)
    name, rows, first = "train", train, 0
    if seed >= EVALUATION_SEED_START:
        name, rows, first = "test", test, EVALUATION_SEED_START
    require(len(rows) > 0, f"{name} has no rows, but the seed {seed} asks for one")
    return rows[(seed - first) % len(rows)]


def evaluate_episodes(env: MultiTurnEnv, act: Act, count: int) -> Evaluation:
    """Play one episode for each of the first ``count`` evaluation seeds, one after the other."""
    returns, first_prompts, transcripts = [], [], []
    for seed in range(EVALUATION_SEED_START, EVALUATION_SEED_START + count):
        prompt, _ = env.reset(seed=seed)
        first_prompts.append(str(prompt.get("text", "")))
        total, done = 0.0, False
        while not done:
            completion_ids = act([prompt]).completion_ids[0]
            prompt, reward, terminated, truncated, _ = env.step(completion_ids)
            total += reward
            done = terminated or truncated
        returns.append(total)
        transcripts.append(transcript_of(env))
    rewards = torch.tensor(returns, dtype=torch.float32)
    return Evaluation(rewards, first_prompts, completions=transcripts)


def transcript_of(env: MultiTurnEnv) -> str:
    """The episode as text, which environments need not keep."""
    return str(getattr(env, "transcript", ""))
