"""Agents on a tiny model, and batches of rollouts that can be cut into the parts of two ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.llm.config import CosineLRScheduleConfig, OptimizerSettings
from agilerl.testing import byte_tokenizer, tiny_model

TOKENIZER = byte_tokenizer()
GROUP = 4
# Rank 0 has one prompt, rank 1 two: other numbers of rows, lengths and micro-batches.
PROMPTS_OF_RANK = ([0], [1, 2])
LENGTHS = ((3, 1, 6, 2), (5, 5, 2, 4), (1, 7, 3, 3))
PROMPT_LENGTHS = (4, 7, 5)

SETTINGS: dict[str, Any] = {
    "pad_token_id": TOKENIZER.pad_token_id,
    "pad_token": TOKENIZER.pad_token,
    "max_output_tokens": 8,
    "max_model_len": 64,
    "group_size": GROUP,
    "batch_size": 16,
    "micro_batch_size_per_gpu": 3,
    "beta": 0.1,
    "lr": 1e-3,
    "max_grad_norm": 0.1,
    "gradient_checkpointing": False,
    "lora_config": LoraConfig(
        r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM"
    ),
}
CREDIT = {
    "beta": 0.0,
    "importance_sampling_level": "turn",
    "whiten_advantages": True,
    "loss_reduction": "token",
}
OPTIONS = {
    "beta": 0.0,
    "advantage_baseline": "leave_one_out",
    "adv_norm": "batch_std",
    "advantage_granularity": "turn",
    "loss_reduction": "prompt",
    "entropy_coef": 0.02,
    "top_entropy_quantile": 0.6,
    "importance_correction": "geometric_mask",
    "importance_floor": 0.9,
}
AGAINST_SAMPLER = {
    "beta": 0.0,
    "loss_type": "cispo",
    "clip_coef": (0.0, 5.0),
    "importance_anchor": "sampler",
    "batch_size": 16,
}
# Rows without an advantage count in the quantile, and masked ones in the denominator.
MASKED = {
    "beta": 0.0,
    "mask_truncated_completions": True,
    "loss_reduction": "token",
    "top_entropy_quantile": 0.4,
}
# Two steps in each of two epochs, of ranks with unevenly many tokens; without an advantage, rows
# are not run or only count in the quantile.
UNEVEN = {"batch_size": 8, "update_epochs": 2, "lr": 1e-2}
UNEVEN_QUANTILE = UNEVEN | MASKED | {"mask_truncated_completions": False}
# The trajectories that ``sample_mask`` keeps: some of one prompt, one and all of the others.
LEFT = torch.tensor([[True, False, True, True], [False, False, True, False], [True] * GROUP])
DECAY = OptimizerSettings(weight_decay=0.2, betas=(0.8, 0.95))
COSINE = CosineLRScheduleConfig(num_epochs=10, warmup_proportion=0.3)


@dataclass(frozen=True)
class Data:
    """What ``learn`` takes, one entry per prompt."""

    ids: list[torch.Tensor]
    """``(G, T)`` long."""
    masks: list[torch.Tensor]
    """``(G, T - 1)`` bool."""
    rewards: torch.Tensor
    """``(P, G, U)`` per turn."""
    turns: list[torch.Tensor]
    """``(G, T - 1)`` long, two tokens a turn, -1 outside actions."""

    def of(self, prompts: list[int]) -> Data:
        """Those of some prompts."""
        return Data(
            [self.ids[p] for p in prompts],
            [self.masks[p] for p in prompts],
            self.rewards[prompts],
            [self.turns[p] for p in prompts],
        )

    def sampling_logps(self) -> list[torch.Tensor]:
        """Of a sampler that is not the trainer; a row has the same ones in every part."""
        rows = [(ids[0], m) for ids, mask in zip(self.ids, self.masks, strict=True) for m in mask]
        return [-5.5 + 0.5 * torch.sin(torch.arange(int(m.sum())) + ids.sum()) for ids, m in rows]

    def with_longer_episodes(self, other: Data) -> tuple[Data, list[int]]:
        """With second rows for the last two trajectories, and the trajectory of each row."""
        ids, masks = (given[-1][:2] for given in (other.ids, other.masks))
        turns = [*self.turns, other.turns[-1][:2]]
        rows = [*range(GROUP * len(self.ids))]
        longer = Data([*self.ids, ids], [*self.masks, masks], self.rewards, turns)
        return longer, [*rows, *rows[-2:]]

    def experiences(self) -> tuple[Any, Any, Any]:
        return self.ids, self.masks, self.rewards.sum(-1)

    def learned_by(self, agent: GRPO, *, per_turn: bool = False, **extra: Any) -> dict[str, float]:
        if not per_turn:
            return agent.learn(self.experiences(), **extra)
        width = max(turns.shape[1] for turns in self.turns)
        pad = torch.nn.functional.pad
        turns = torch.cat([pad(t, (0, width - t.shape[1]), value=-1) for t in self.turns])
        experiences = self.ids, self.masks, self.rewards.flatten(0, 1)
        return agent.learn(experiences, turn_ids=turns, **extra)


def data(seed: int = 0, stretch: int = 1) -> Data:
    """Three prompts, four completions each; ragged, and so many times as long."""
    rng = torch.Generator().manual_seed(seed)
    ids, masks, turns = [], [], []
    for prompt_length, given in zip(PROMPT_LENGTHS, LENGTHS, strict=True):
        lengths = [stretch * length for length in given]
        width = prompt_length + max(lengths)
        prompt = torch.randint(97, 123, (1, prompt_length), generator=rng).expand(GROUP, -1)
        rest = torch.randint(97, 123, (GROUP, max(lengths)), generator=rng)
        place = torch.arange(width - 1) - (prompt_length - 1)
        mask = (place >= 0) & (place < torch.tensor(lengths)[:, None])
        ids.append(torch.cat([prompt, rest], dim=1))
        masks.append(mask)
        turns.append(torch.where(mask, place // 2, -1))
    rewards = torch.rand(3, GROUP, 4, generator=rng)
    played = torch.arange(4) < (torch.tensor(LENGTHS)[:, :, None] + 1) // 2
    return Data(ids, masks, rewards * played, turns)


def make_agent(accelerator: Any = None, **changes: Any) -> GRPO:
    """An agent whose actor and reference have moved from the base already."""
    model = tiny_model(hidden_size=32, layers=1)
    agent = GRPO(**(SETTINGS | {"actor_network": model, "accelerator": accelerator} | changes))
    for seed, role in enumerate(agent.policy.roles):
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in agent.policy.parameters(role).values():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=rng))
    return agent


def weights(agent: GRPO) -> torch.Tensor:
    """All weights of the actor's adapter in one vector."""
    return torch.cat([p.detach().flatten() for p in agent.policy.parameters().values()]).clone()


def every_weight(agent: GRPO) -> torch.Tensor:
    """All weights of all its adapters in one vector."""
    roles = [agent.policy.parameters(role) for role in agent.policy.roles]
    return torch.cat([p.detach().flatten() for role in roles for p in role.values()]).clone()


def moments(agent: GRPO) -> torch.Tensor:
    """All of AdamW's moments in one vector; collective."""
    state = agent.engine.state_dict()["optimizer"]["state"]
    names = ("exp_avg", "exp_avg_sq")
    return torch.cat([state[i][name].flatten() for i in sorted(state) for name in names])
