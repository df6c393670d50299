"""Random rollouts and policies with random adapters, for the tests of the functional core."""

from __future__ import annotations

import torch
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel

from agilerl.llm.batch import TrainBatch, make_batch
from agilerl.llm.config import ForwardConfig
from agilerl.llm.policy import Policy
from agilerl.llm.shared_base import SharedBase

# What two ways to compute the same may differ by, relative to the largest value.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
PLAIN = ForwardConfig(temperature=0.9, layout="padded")


def lora(**changes: object) -> LoraConfig:
    settings = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**(settings | changes))


def random_policy(
    model: PreTrainedModel,
    config: LoraConfig | None = None,
    *,
    separate_reference: bool = True,
    seed: int = 0,
    scale: float = 0.1,
) -> Policy:
    """A policy in the model's dtype whose actor and reference differ, from the base too."""
    roles = ("actor", "reference") if separate_reference else ("actor",)
    policy = Policy(SharedBase.of(model), dict.fromkeys(roles, config or lora()), seed=seed)
    randomise_all(policy, seed=seed, scale=scale)
    return policy


def randomise_all(policy: Policy, *, seed: int = 0, scale: float = 0.1) -> None:
    """Overwrite every adapter of a policy, always with the same numbers for the same seed."""
    dtype = next(policy.base.model.parameters()).dtype
    for number, role in enumerate(policy.roles):
        randomise(policy.parameters(role), seed=seed + number, scale=scale, dtype=dtype)


def randomise(
    parameters: dict[str, nn.Parameter], *, seed: int, scale: float = 0.1, dtype: torch.dtype
) -> None:
    """Overwrite an adapter, B included, which starts at zero."""
    rng = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        values = scale * torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        parameter.data = values.to(dtype)


def random_batch(
    prompts: tuple[int, ...] = (9, 5),
    completions: tuple[int, ...] = (6, 1, 4, 3),
    *,
    vocab: int = 60,
    seed: int = 0,
    padding: int = 0,
    turns: bool = False,
) -> TrainBatch:
    """Each prompt (by length) completed once per completion length; ragged, right-padded."""
    rng = torch.Generator().manual_seed(seed)
    ids, masks, turn_ids = [], [], []
    for prompt_length in prompts:
        prompt = torch.randint(vocab, (prompt_length,), generator=rng)
        for length in completions:
            completion = torch.randint(vocab, (length,), generator=rng)
            junk = torch.randint(vocab, (padding,), generator=rng)
            ids.append(torch.cat([prompt, completion, junk]))
            place = torch.arange(len(ids[-1]) - 1)
            masks.append((place >= prompt_length - 1) & (place < prompt_length - 1 + length))
            turn_ids.append(torch.where(masks[-1], (place - prompt_length + 1) // 2, -1))
    return make_batch(ids, masks, turn_ids if turns else None)


def gradients(policy: Policy, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of every actor parameter, by name."""
    parameters = policy.parameters()
    made = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), made, strict=True)
    }


def relative_difference(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest difference of two sets of tensors, relative to the largest value in them."""
    assert mine.keys() == theirs.keys()
    scale = max(float(tensor.abs().max()) for tensor in theirs.values())
    return max(float((mine[n] - theirs[n]).abs().max()) for n in mine) / scale
