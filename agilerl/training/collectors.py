"""Single-turn collection: prompts from the environment, groups from the agent, rewards back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from agilerl.training.protocols import Agent, Experience, Sample, SingleTurnEnv

if TYPE_CHECKING:
    import numpy as np

SAMPLES_PER_ITERATION = 4


class ReasoningCollector:
    """Collects from a ``ReasoningGym``; may be shared, each ``collect`` consumes the next batch.

    Args:
        env: The environment. Its next training batch is drawn at once.
    """

    def __init__(self, env: SingleTurnEnv) -> None:
        self.env = env
        self._prompts = env.reset()

    @property
    def num_epochs(self) -> int:
        """Completed passes over the training rows."""
        return self.env.num_epochs

    def collect(self, agent: Agent) -> Experience:
        """Answer the pending batch of prompts with one group each, score it, draw the next batch.

        Args:
            agent: The agent that acts.

        Returns:
            The experience; ``rewards`` is ``(P, G)``.
        """
        prompts = self._prompts
        # Read before the step, which moves both on to the next batch.
        questions, answers = list(self.env.questions), list(self.env.answers)
        started = time.perf_counter()
        result = agent.get_action(prompts, training=True)
        generated = time.perf_counter()
        outcome = self.env.step(result.completion_ids)
        scored = time.perf_counter()
        # An environment built with return_raw_completions returns a third element.
        self._prompts, rewards = outcome[0], outcome[1]
        rewards = torch.as_tensor(rewards, dtype=torch.float32)
        return Experience(
            experiences=(result.completion_ids, result.action_masks, rewards),
            rewards=rewards.detach().cpu(),
            steps=len(prompts),
            generated_tokens=sum(int(mask.sum()) for mask in result.action_masks),
            generation_seconds=generated - started,
            environment_seconds=scored - generated,
            learn_arguments={"sampling_logps": result.sampling_logps},
            samples=_first_of_each_group(questions, answers, self.env.last_completions, rewards),
        )

    def evaluate(self, agent: Agent) -> np.ndarray:
        """Rewards of the agent on every row of the test split."""
        return agent.test(self.env)

    def state_dict(self) -> dict[str, Any]:
        """The environment's position in its data."""
        return self.env.state_dict()


def _first_of_each_group(
    questions: list[str], answers: list[Any], completions: list[list[str]], rewards: torch.Tensor
) -> list[Sample]:
    """The first completion of the first groups: batches are shuffled, so nothing is hand-picked."""
    groups = zip(questions, answers, completions, rewards.tolist(), strict=True)
    return [
        Sample(question=question, completion=group[0], answer=answer, reward=group_rewards[0])
        for question, answer, group, group_rewards in list(groups)[:SAMPLES_PER_ITERATION]
    ]
