"""Small runs of both training functions on ranks, their interruptions, and what came of them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from agilerl.algorithms import GRPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo import Mutations, TournamentSelection
from agilerl.llm_envs import ReasoningGym, TokenObservationWrapper
from agilerl.testing import byte_tokenizer, tiny_model
from agilerl.training.checkpoint.run_checkpoint import complete_checkpoints
from agilerl.training.train_llm import finetune_llm_multiturn, finetune_llm_reasoning

TOKENIZER = byte_tokenizer()
RANK = int(os.environ.get("RANK", "0"))
Hook = Callable[[int], None]


def nothing(iteration: int) -> None:
    """No interruption."""


class Pause:
    """In an iteration: says so, with the process's number, and waits until it may go on."""

    def __init__(self, folder: Path, iteration: int) -> None:
        self.folder, self.iteration = folder, iteration

    def __call__(self, iteration: int) -> None:
        if iteration != self.iteration:
            return
        partial = self.folder / f"partial_{RANK}"
        partial.write_text(str(os.getpid()))
        partial.rename(self.folder / f"paused_{RANK}")
        while not (self.folder / "go").exists():
            time.sleep(0.02)


class Die:
    """In an iteration rank 1 is killed, after a file ``died`` says when."""

    def __init__(self, folder: Path, iteration: int) -> None:
        self.folder, self.iteration = folder, iteration

    def __call__(self, iteration: int) -> None:
        if iteration == self.iteration and RANK == 1:
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class FullDisk:
    """From iteration 2 to 3 no file of rank 0 may grow as large as a checkpoint's."""

    def __init__(self, run: Path) -> None:
        self.run, self.before = run, resource.getrlimit(resource.RLIMIT_FSIZE)

    def __call__(self, iteration: int) -> None:
        if RANK == 0 and iteration == 2:
            saved = self.run / "iteration_00000001" / "agent_0" / "attributes.pt"
            limit = saved.stat().st_size - 100
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, self.before[1]))
        if iteration == 3:
            self.over()

    def over(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


class Echo:
    """Two turns; pays the share of answers' bytes that are even."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return f"game {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return "on", even_bytes(action, "", ""), self.turn == 2, False, {}


def even_bytes(completion: str, answer: str, question: str) -> float:
    """With noise from the global streams, which a resumed run has to go on with too."""
    data = completion.encode("utf-8", "replace")
    noise = random.random() + np.random.rand() + float(torch.rand(()))
    return sum(byte % 2 == 0 for byte in data) / max(len(data), 1) + 0.01 * noise


def sums(count: int) -> Dataset:
    questions = [f"{i}+{i}?" for i in range(count)]
    return Dataset.from_dict({"question": questions, "answer": [str(2 * i) for i in range(count)]})


def settings() -> dict[str, Any]:
    return {
        "actor_network": tiny_model(hidden_size=32, layers=1),
        "pad_token_id": TOKENIZER.pad_token_id,
        "pad_token": TOKENIZER.pad_token,
        "batch_size": 8,
        "group_size": 4,
        "max_output_tokens": 4,
        "max_model_len": 160,
        "lr": 1e-3,
        "update_epochs": 2,
        "gradient_checkpointing": False,
    }


def make_agent(accelerator: Any, hook: Hook) -> GRPO:
    """``hook`` is called with the number of the iteration, when its rollouts are there."""
    agent = GRPO(**settings(), accelerator=accelerator)
    learn = agent.learn

    def hooked(*arguments: Any, **options: Any) -> dict[str, float]:
        hook(len(agent.scores) + 1)
        return learn(*arguments, **options)

    agent.learn = hooked  # type: ignore[method-assign]
    return agent


def reasoning_gym(
    accelerator: Any, train: Any = None, reward: Callable[..., float] = even_bytes
) -> ReasoningGym:
    """7 rows over two processes: batches of 4 and 3."""
    return ReasoningGym(
        train_dataset=sums(7) if train is None else train,
        test_dataset=sums(3),
        tokenizer=TOKENIZER,
        reward_fn=reward,
        conversation_template=[{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=2,
        reward_workers=1,  # so that the noise comes in the same order
        max_context_length=100,
        accelerator=accelerator,
    )


def streamed(run: Path, accelerator: Any, iterations: int = 4) -> GRPO:
    """The same number of rows, from a stream with a shuffle buffer."""
    agent = make_agent(accelerator, nothing)
    stream = sums(7).to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=3)
    steps, options = 14 * iterations // 4, _options(run, accelerator)
    env = reasoning_gym(accelerator, stream)
    finetune_llm_reasoning([agent], env, max_steps=steps, **options)
    return agent


def reasoning(
    run: Path,
    accelerator: Any,
    iterations: int = 4,
    hook: Hook = nothing,
    rows: int = 7,
    **more: Any,
) -> GRPO:
    """Batches of 4 and 3."""
    agent = make_agent(accelerator, hook)
    steps, options = 14 * iterations // 4, _options(run, accelerator)
    env = reasoning_gym(accelerator, sums(rows))
    finetune_llm_reasoning([agent], env, max_steps=steps, **options, **more)
    return agent


def resampled(run: Path, accelerator: Any, iterations: int = 4) -> GRPO:
    """About every fourth group is flat; each iteration draws at least once more on all ranks."""
    agent = make_agent(accelerator, nothing)
    env = reasoning_gym(accelerator, reward=flat_on_rank_0)
    steps = 14 * iterations // 4 * 2
    options: dict[str, Any] = {"zero_variance": "resample", "max_resamples": 2}
    finetune_llm_reasoning([agent], env, max_steps=steps, **options, **_options(run, accelerator))
    return agent


def flat_on_rank_0(completion: str, answer: str, question: str) -> float:
    """Rank 0 finds no variance in the first batch of a pass, rank 1 always does."""
    if RANK == 0:
        return 0.0 if int(answer) < 6 else even_bytes(completion, answer, question)
    return even_bytes(completion, answer, question)


def evolution(run: Path, accelerator: Any, iterations: int = 4) -> list[GRPO]:
    """Two agents in turn, batches of 4 for the first and 3 for the other; a generation each."""
    search = HyperparameterConfig(
        lr=RLParameter(1e-4, 1e-2, scale="log"), batch_size=RLParameter(4, 16, dtype=int)
    )
    agents = GRPO.population(2, **settings(), accelerator=accelerator, hp_config=search)
    return finetune_llm_reasoning(
        agents,
        reasoning_gym(accelerator),
        max_steps=4 * iterations - 3,
        evo_steps=1,
        tournament=TournamentSelection(2, elitism=True, population_size=2),
        mutation=Mutations(0.2, 0, 0, 0, 0, 0.8),
        **(_options(run, accelerator) | {"verbose": True}),
    )


def multi_turn(run: Path, accelerator: Any, iterations: int = 4, hook: Hook = nothing) -> GRPO:
    """4 groups of 4 episodes of 2 turns: 32 steps an iteration."""
    agent = make_agent(accelerator, hook)
    finetune_llm_multiturn(
        [agent],
        max_turns=2,
        env_factory=lambda: TokenObservationWrapper(Echo(), TOKENIZER, max_turns=2),
        max_steps=32 * iterations,
        groups_per_iteration=4,
        evaluation_episodes=3,
        max_workers=1,
        **_options(run, accelerator),
    )
    return agent


class Coarse(Echo):
    """Pays 0 or 1 at its end, which comes a turn later on rank 1: groups are often flat."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        text, reward, *_ = super().step(action)
        over = self.turn == 1 + RANK
        return text, float(over and reward > 0.5), over, False, {}


def resampled_turns(run: Path, accelerator: Any, iterations: int = 4) -> GRPO:
    """Two agents side by side, which draw equally many further seeds on all ranks."""
    agents = GRPO.population(2, **settings(), accelerator=accelerator)
    finetune_llm_multiturn(
        agents,
        max_turns=2,
        env_factory=lambda: TokenObservationWrapper(Coarse(), TOKENIZER, max_turns=2),
        max_steps=40 * iterations,
        groups_per_iteration=4,
        train_seeds=11,
        evaluation_episodes=3,
        max_workers=1,
        zero_variance="resample",
        max_resamples=2,
        **_options(run, accelerator),
    )
    agents[1].clean_up()
    return agents[0]


RUNS: dict[str, Callable[..., GRPO]] = {
    "reasoning": reasoning, "multi_turn": multi_turn, "streamed": streamed, "resampled": resampled,
    "resampled_turns": resampled_turns,
}  # fmt: skip


def _options(run: Path, accelerator: Any) -> dict[str, Any]:
    return {
        "evaluation_interval": 2,
        "checkpoint_steps": 1,
        "exit_code_on_sigterm": int(os.environ.get("EXIT_CODE", "143")),
        "checkpoint_path": run,
        "save_elite": True,
        "elite_path": run.with_name(f"{run.name}_elite"),
        "resume_from": run if complete_checkpoints(run) else None,
        "accelerator": accelerator,
        "verbose": False,
    }


def seed_all(number: int) -> None:
    """Streams of this rank's own."""
    random.seed(number + RANK)
    np.random.seed(number + RANK)
    torch.manual_seed(number + RANK)


def write_result(run: Path, agent: GRPO, **more: Any) -> None:
    """All that a resumed run must repeat bit for bit, to ``<run>_<rank>.json``; collective."""
    result = {**result_of(agent), **more}
    run.with_name(f"{run.name}_{RANK}.json").write_text(json.dumps(result))


def result_of(agent: GRPO) -> dict[str, Any]:
    """What must be the same of an agent, on all ranks and on this one; collective."""
    streams = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    roles = {role: agent.policy.parameters(role) for role in agent.policy.roles}
    return {
        "of_all": {
            "weights": _digest(roles),
            "optimizer": _digest(agent.engine.state_dict()),
            "hyperparameters": agent.attributes(agent.hp_config or ()),
            "fitness": agent.fitness,
            "scores": agent.scores,
            "steps": agent.steps,
        },
        "own": {"generator": _digest(agent.rng.get_state()), "streams": _digest(streams)},
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """With lists in the place of tensors and arrays, whose own text leaves numbers out.

    Dictionaries are sorted: engines write theirs in different orders.
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
