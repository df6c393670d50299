"""The workloads of the benchmarks: model, LoRA, prompts, reward and settings."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import Qwen2ForCausalLM

LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Workload:
    """One model and one shape of a step; everything that is not a default of Qwen2 is a field."""

    name: str
    vocab_size: int
    hidden_size: int
    layers: int
    warmup_steps: int
    measured_steps: int
    """When ``--steps`` is not given."""
    intermediate_factor: int = 4
    heads: int = 4
    prompts: int = 8
    group_size: int = 8
    new_tokens: int = 64
    """Of the longest completion; all are as long unless ``mean_new_tokens`` is set."""
    shortest_completion: int = 4
    mean_new_tokens: int | None = None
    """Lengths are drawn from a geometric distribution with this mean, cut off at both ends."""
    optimizer_steps: int = 1
    """Per rollout, each over as many of its sequences."""
    defaults: bool = False
    """Whether each library runs with its own defaults in what is not shape, KL or learning rate."""
    shortest_prompt: int = 56
    longest_prompt: int = 64
    micro_batch_size: int = 16
    beta: float = 0.04
    lr: float = 1e-5
    max_grad_norm: float = 1.0
    lora_rank: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 42

    @property
    def sequences(self) -> int:
        """Completions of one step."""
        return self.prompts * self.group_size

    @property
    def batch_size(self) -> int:
        """Sequences of an optimizer step."""
        return self.sequences // self.optimizer_steps

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return self.longest_prompt + self.new_tokens


TINY = Workload("tiny", vocab_size=260, hidden_size=128, layers=4, warmup_steps=2, measured_steps=9)
_ALL = (
    TINY,
    Workload(
        "vocab32k", vocab_size=32768, hidden_size=256, layers=6, warmup_steps=1, measured_steps=5
    ),
    replace(TINY, name="long_prompts", shortest_prompt=512, longest_prompt=512, measured_steps=5),
    replace(TINY, name="uneven", new_tokens=256, mean_new_tokens=64),
    replace(TINY, name="two_updates", optimizer_steps=2, defaults=True),
)
WORKLOADS = {workload.name: workload for workload in _ALL}


def shrunk(workload: Workload) -> Workload:
    """Return the workload with a small model and a small step, to see that it runs."""
    return replace(
        workload,
        vocab_size=260,
        hidden_size=32,
        layers=1,
        warmup_steps=0,
        measured_steps=1,
        prompts=2,
        group_size=4,
        new_tokens=8,
        micro_batch_size=4,
    )


def build_model(workload: Workload) -> Qwen2ForCausalLM:
    """Make the workload's float32 model with the same random weights on both sides."""
    from agilerl.testing import tiny_model

    return tiny_model(
        vocab_size=workload.vocab_size,
        hidden_size=workload.hidden_size,
        layers=workload.layers,
        heads=workload.heads,
        key_value_heads=workload.heads,
        intermediate_size=workload.intermediate_factor * workload.hidden_size,
        initializer_range=0.02,
        seed=workload.seed,
    )


def lora_config(workload: Workload) -> LoraConfig:
    """Adapters on every linear layer but the head."""
    from peft import LoraConfig

    return LoraConfig(
        r=workload.lora_rank,
        lora_alpha=2 * workload.lora_rank,
        lora_dropout=0.0,
        target_modules=LINEAR_LAYERS,
        task_type="CAUSAL_LM",
    )


def agent_arguments(workload: Workload) -> dict[str, Any]:
    """The arguments of this library's agents, but for model, padding and seed."""
    shape = {
        "lora_config": lora_config(workload),
        "batch_size": workload.batch_size,
        "micro_batch_size_per_gpu": workload.micro_batch_size,
        "group_size": workload.group_size,
        "beta": workload.beta,
        "lr": workload.lr,
        "max_output_tokens": workload.new_tokens,
        "min_output_tokens": workload.new_tokens,
        "max_model_len": workload.max_model_len,
    }
    if workload.defaults:
        return shape
    return shape | {
        "max_grad_norm": workload.max_grad_norm,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "top_k": workload.top_k,
        "gradient_checkpointing": False,
    }


def step_prompts(workload: Workload, step: int) -> list[str]:
    """Return the texts of one step, new ones each step; a letter is one token.

    Args:
        workload: Gives the number of prompts and their lengths in tokens.
        step: Counted from 0, warm-up included.
    """
    # A string seeds the generator the same way in every process, unlike a hashed tuple.
    rng = random.Random(f"{workload.seed}/{step}")
    lengths = [
        rng.randint(workload.shortest_prompt, workload.longest_prompt)
        for _ in range(workload.prompts)
    ]
    return ["".join(rng.choices(string.ascii_letters, k=length)) for length in lengths]


def completion_lengths(workload: Workload, step: int) -> list[int]:
    """Return the tokens of each completion of a step, those of one prompt side by side."""
    if workload.mean_new_tokens is None:
        return [workload.new_tokens] * workload.sequences
    rng = random.Random(f"{workload.seed}/{step}/lengths")
    drawn = [
        1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / workload.mean_new_tokens))
        for _ in range(workload.sequences)
    ]
    return [min(max(n, workload.shortest_completion), workload.new_tokens) for n in drawn]


def reward(completion_ids: Sequence[int]) -> float:
    """Share of even token ids: cheap, and different for nearly every completion of a group."""
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
