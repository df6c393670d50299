"""What is trained is what was seen and sampled: positions and log-probs, for every template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from chat_tokenizers import STYLES, VOCAB_SIZE, chat_tokenizer, turn_end
from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.algorithms.core.learn_inputs import add_sampling_logps
from agilerl.llm.batch import make_batch
from agilerl.llm.config import SamplingConfig
from agilerl.llm_envs import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.testing import tiny_model
from agilerl.typing import ActionResult, ReasoningPrompts

MAX_TURNS = 5
WINDOWS = {
    "chatml": 100,
    "llama3": 100,
    "gemma": 90,
    "phi": 80,
    "mistral": 50,
    "hermes": 100,
    "strict": 50,
    "reasoning": 100,
    "added": 100,
    None: 50,
}


class Reporting(GRPO):
    """Reports the sampler's log-probs."""

    def sampling_config(self, training: bool = True) -> SamplingConfig:
        return replace(super().sampling_config(training), return_logps=True)


class Talk:
    """Observations of different lengths; episodes of different lengths."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.seed, self.turn = seed, 0
        return "Go " * (seed % 3 + 1), {"suffix": "!"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return "on" * self.turn, 1.0, self.turn > self.seed % 5, False, {}


def make_agent(end_id: int) -> Reporting:
    model = tiny_model(vocab_size=VOCAB_SIZE, hidden_size=32)
    model.config.eos_token_id = model.generation_config.eos_token_id = end_id
    agent = Reporting(
        actor_network=model,
        pad_token_id=256,
        pad_token="<pad>",
        max_output_tokens=6,
        max_model_len=230,
        group_size=2,
        temperature=0.8,
        lora_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    rng = torch.Generator().manual_seed(0)
    for parameter in agent.policy.parameters().values():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=rng)
    return agent


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("style", [*STYLES, None])
def test_rows_are_what_was_seen_and_sampled(style: str | None, window: bool) -> None:
    tokenizer = chat_tokenizer(style or "chatml")
    agent = make_agent(turn_end(style or "chatml", tokenizer))

    def make_env() -> TokenObservationWrapper:
        return TokenObservationWrapper(
            Talk(),
            tokenizer,
            MAX_TURNS,
            apply_chat_template=style is not None,
            # The window holds about two turns of the longest conversations.
            max_model_len=WINDOWS[style] if window else 230,
            max_output_tokens=6,
            enable_sliding_window=window,
        )

    env = SyncMultiTurnVecEnv(make_env, batch_size=5, group_size=2)
    seen: list[tuple[list[int], list[int]]] = []

    def act(prompts: Sequence[ReasoningPrompts]) -> ActionResult:
        result = agent.get_action(prompts, repeat_prompts=False)
        for prompt, ids in zip(prompts, result.completion_ids, strict=True):
            length = prompt["input_ids"].shape[1]
            seen.append((ids[0, :length].tolist(), ids[0, length:].tolist()))
        return result

    with agent.rollout():
        episodes = env.play(act, [10, 11, 12, 13, 14])

    batch = make_batch(episodes.token_ids, episodes.action_masks, episodes.turn_ids)
    assert batch.turn_ids is not None
    trained = []
    for row in range(len(batch)):
        for turn in batch.turn_ids[row].unique().tolist():
            if turn >= 0:
                at = (batch.turn_ids[row] == turn).nonzero().squeeze(1) + 1
                assert at.tolist() == list(range(int(at[0]), int(at[-1]) + 1))
                ids = batch.token_ids[row].tolist()
                trained.append((ids[: int(at[0])], ids[int(at[0]) : int(at[-1]) + 1]))
    assert sorted(trained) == sorted(seen)
    assert int(episodes.turns.max()) >= 4
    if window:
        assert len(episodes.trajectory_ids) > len(episodes.turns)

    assert episodes.sampling_logps is not None
    sampled = add_sampling_logps(batch, episodes.sampling_logps).sampling_logp
    assert sampled is not None
    computed = agent.policy.frozen_logprobs(batch, "actor", agent.forward_config())
    assert (sampled - computed)[batch.action_mask].abs().max() < 1e-4
