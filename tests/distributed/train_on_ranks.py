"""Started by torchrun: both training functions on several processes, and a resumed run.

    torchrun --nproc_per_node 2 train_on_ranks.py FOLDER [ITERATIONS ...]

Trains to each number of iterations in turn, from the last checkpoint on; agents are made anew.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

from agilerl.algorithms import GRPO
from agilerl.llm_envs import ReasoningGym, TokenObservationWrapper
from agilerl.testing import byte_tokenizer, tiny_model
from agilerl.training.run_checkpoint import complete_checkpoints
from agilerl.training.train_llm import finetune_llm_multiturn, finetune_llm_reasoning
from agilerl.utils.llm_utils import create_llm_accelerator

TOKENIZER = byte_tokenizer()
FOLDER = Path(sys.argv[1])
RANK = os.environ.get("RANK", "0")


class Echo:
    """Two turns; pays the share of answers' bytes that are even."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return f"game {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        data = action.encode("utf-8", "replace")
        reward = sum(byte % 2 == 0 for byte in data) / max(len(data), 1)
        return "on", reward, self.turn == 2, False, {}


def sums(count: int) -> Dataset:
    questions = [f"{i}+{i}?" for i in range(count)]
    return Dataset.from_dict({"question": questions, "answer": [str(2 * i) for i in range(count)]})


def even_bytes(completion: str, answer: str, question: str) -> float:
    if complete_checkpoints(FOLDER / "reasoning") and os.environ.get("DIE_ON_RANK") == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    data = completion.encode("utf-8", "replace")
    return sum(byte % 2 == 0 for byte in data) / max(len(data), 1)


def make_agent(accelerator: Any) -> GRPO:
    return GRPO(
        actor_network=tiny_model(hidden_size=32, layers=1),
        pad_token_id=TOKENIZER.pad_token_id,
        pad_token=TOKENIZER.pad_token,
        batch_size=8,
        group_size=4,
        max_output_tokens=4,
        max_model_len=160,
        lr=1e-3,
        update_epochs=2,
        gradient_checkpointing=False,
        accelerator=accelerator,
    )


def reasoning(agent: GRPO, accelerator: Any, folder: Path, iterations: int) -> None:
    """7 rows over two processes: batches of 4 and 3."""
    env = ReasoningGym(
        train_dataset=sums(7),
        test_dataset=sums(3),
        tokenizer=TOKENIZER,
        reward_fn=even_bytes,
        conversation_template=[{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=2,
        accelerator=accelerator,
    )
    finetune_llm_reasoning(
        [agent], env=env, max_steps=14 * iterations // 4, **_options(folder, accelerator)
    )


def multi_turn(agent: GRPO, accelerator: Any, folder: Path, iterations: int) -> None:
    """4 groups of 4 episodes of 2 turns: 32 steps an iteration."""
    finetune_llm_multiturn(
        [agent],
        max_turns=2,
        env_factory=lambda: TokenObservationWrapper(Echo(), TOKENIZER, max_turns=2),
        max_steps=32 * iterations,
        groups_per_iteration=4,
        evaluation_episodes=3,
        **_options(folder, accelerator),
    )


def _options(folder: Path, accelerator: Any) -> dict[str, Any]:
    return {
        "evaluation_interval": 2,
        "checkpoint_steps": 1,
        "checkpoint_path": folder,
        "save_elite": True,
        "elite_path": folder.with_name(f"{folder.name}_elite"),
        "resume_from": folder if complete_checkpoints(folder) else None,
        "accelerator": accelerator,
        "verbose": False,
    }


def main() -> None:
    iterations = sys.argv[2:]
    accelerator = create_llm_accelerator()
    for name, train in (("reasoning", reasoning), ("multi_turn", multi_turn)):
        for count in iterations:
            agent = make_agent(accelerator)
            train(agent, accelerator, FOLDER / name, int(count))
        digest = {
            "weights": [p.double().sum().item() for p in agent.policy.parameters().values()],
            "fitness": agent.fitness,
            "scores": agent.scores,
            "steps": agent.steps,
        }
        (FOLDER / f"{name}_{RANK}.json").write_text(json.dumps(digest))


if __name__ == "__main__":
    main()
