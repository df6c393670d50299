"""Tiny runs of both training functions, and all of them that a resumed run must repeat."""

from __future__ import annotations

import csv
import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.llm.config import CosineLRScheduleConfig
from agilerl.llm_envs import ReasoningGym, TokenObservationWrapper
from agilerl.testing import byte_tokenizer, tiny_model
from agilerl.training.train_llm import finetune_llm_multiturn, finetune_llm_reasoning

TOKENIZER = byte_tokenizer()
TIMES = ("wall_seconds", "tokens_per_second", "generation_seconds", "environment_seconds",
         "learning_seconds", "evaluation_seconds")  # fmt: skip
Hook = Callable[[], None]


def nothing() -> None:
    """No interruption."""


class After:
    """Sends this process a signal at the ``call``-th call."""

    def __init__(self, call: int, number: signal.Signals = signal.SIGINT) -> None:
        self.left, self.number = call, number

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)


def dataset(prefix: str, rows: int, answer: str = "a") -> Dataset:
    return Dataset.from_list([{"question": f"{prefix}{i}?", "answer": answer} for i in range(rows)])


def make_gym(
    hook: Hook = nothing,
    rows: int = 5,
    seed: int = 42,
    word: str = "train",
    answer: str = "a",
    failing: float = 0.0,
    evaluation_hook: Hook = nothing,
    **arguments: Any,
) -> ReasoningGym:
    """Five questions, two at a time; rewards have noise from all three global streams.

    ``hook`` is called when a training batch is scored, ``evaluation_hook`` when a test batch is. A
    share ``failing`` is dropped.
    """

    def reward(completion: str, answer: str, question: str) -> float:
        if random.random() < failing:
            raise ConnectionError("no judge")
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        return len(set(completion)) / 8 + 0.01 * noise

    class HookedGym(ReasoningGym):
        def step(self, completion_ids: Any) -> Any:
            (hook if self._test_offset is None else evaluation_hook)()
            return super().step(completion_ids)

    return HookedGym(
        dataset(word, rows, answer),
        dataset("test", 3),
        TOKENIZER,
        reward,
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=2,
        reward_workers=1,  # so that the noise comes in the same order
        seed=seed,
        on_failure="drop",
        **arguments,
    )


def make_agents(size: int = 2, **arguments: Any) -> list[GRPO]:
    """Agents on one tiny model; two epochs of two mini-batches, under a cosine schedule."""
    settings: dict[str, Any] = {
        "pad_token_id": TOKENIZER.pad_token_id,
        "pad_token": TOKENIZER.pad_token,
        "actor_network": tiny_model(hidden_size=16, layers=1, heads=2, key_value_heads=1),
        "group_size": 3,
        "batch_size": 3,
        "max_output_tokens": 4,
        "max_model_len": 160,
        "update_epochs": 2,
        "lr": 1e-2,
        "gradient_checkpointing": False,
        "lora_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
        "cosine_lr_schedule_config": CosineLRScheduleConfig(num_epochs=8, warmup_proportion=0.25),
    }
    return GRPO.population(size, **(settings | arguments))


class Dice:
    """Three turns; draws its hidden number from the global stream, when made as well."""

    def __init__(self, hook: Hook) -> None:
        self.hook, self.number = hook, random.random()

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.number, self.turn = random.random(), 0
        return f"game {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        if self.turn == 1:
            self.hook()
        reward = len(set(action)) / 8 + 0.1 * self.number + 0.01 * random.random()
        return f"turn {self.turn} {self.number:.3f}", reward, self.turn == 3, False, {}


def reseed() -> None:
    """A new process has its streams somewhere else."""
    random.seed(os.urandom(8))
    np.random.seed(int.from_bytes(os.urandom(4), "big"))
    torch.seed()


def seed_all() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def run_reasoning(
    path: Path, *, hook: Hook = nothing, pop: list[GRPO] | None = None, **options: Any
) -> list[GRPO]:
    """Four iterations of two agents that share an environment, evaluated every other one."""
    settings: dict[str, Any] = {
        "max_steps": 7,
        "evaluation_interval": 2,
        "checkpoint_steps": 1,
        "checkpoint_path": path,
        "save_elite": True,
        "elite_path": path / "elite",
        "verbose": False,
    }
    pop = make_agents() if pop is None else pop
    env = options.pop("env", None) or make_gym(hook)
    return finetune_llm_reasoning(pop, env, **(settings | options))


def run_multiturn(
    path: Path, *, hook: Hook = nothing, pop: list[GRPO] | None = None, **options: Any
) -> list[GRPO]:
    """Four iterations of two agents, one group of three episodes of three turns each."""

    def env_factory() -> TokenObservationWrapper:
        return TokenObservationWrapper(Dice(hook), TOKENIZER, max_turns=3)

    settings: dict[str, Any] = {
        "max_turns": 3,
        "env_factory": env_factory,
        "max_steps": 36,
        "evaluation_interval": 2,
        "evaluation_episodes": 2,
        "groups_per_iteration": 1,
        "train_seeds": 2,
        "checkpoint_steps": 1,
        "checkpoint_path": path,
        "save_elite": True,
        "elite_path": path / "elite",
        "verbose": False,
        "max_workers": 1,
    }
    pop = make_agents() if pop is None else pop
    return finetune_llm_multiturn(pop, **(settings | options))


RUNS: dict[str, Callable[..., Any]] = {"reasoning": run_reasoning, "multiturn": run_multiturn}


def rows_of(path: Path) -> list[dict[str, str]]:
    """``metrics.csv`` without what depends on the clock."""
    with (path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: v for name, v in row.items() if name not in TIMES} for row in rows]


def everything(path: Path, pop: list[GRPO]) -> dict[str, Any]:
    """All that must be the same bit for bit, by name."""
    facts: dict[str, Any] = {
        "rows": rows_of(path),
        "completions": (path / "completions.jsonl").read_text(),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
    }
    for agent in pop:
        optimizer = agent.engine.optimizer.state_dict()
        facts |= {
            f"{agent.index} history": (agent.fitness, agent.scores, agent.steps),
            f"{agent.index} reference tracker": agent.reference_update_tracker,
            f"{agent.index} rng": agent.rng.get_state().tolist(),
            f"{agent.index} weights": {
                f"{role} {name}": parameter.tolist()
                for role in agent.policy.slots
                for name, parameter in agent.policy.parameters(role).items()
            },
            f"{agent.index} groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in optimizer["param_groups"]
            ],
            f"{agent.index} moments": {
                f"{number} {name}": value.tolist()
                for number, moments in optimizer["state"].items()
                for name, value in moments.items()
            },
            f"{agent.index} schedule": str(agent.lr_scheduler.state_dict()),
        }
    elite = path / "elite"
    facts["elite"] = {
        file.relative_to(elite).as_posix(): file.read_bytes()
        for file in sorted(elite.rglob("*.safetensors"))
    }
    return facts


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Names of facts that differ."""
    return [name for name in first | second if first.get(name) != second.get(name)]


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """This process cannot make any file larger than ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def state_of(checkpoint: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((checkpoint / "run_state.json").read_text())
    return content


def checkpoints_in(path: Path) -> list[str]:
    return sorted(child.name for child in path.glob("iteration_*"))
