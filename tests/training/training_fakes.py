"""A real, tiny environment and an agent that obeys the interface and learns nothing.

Row ``i`` of the environment asks ``"q<i>"`` and wants the token ``10 + i``, so that a completion of
that one token earns 1 and every other 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from agilerl.llm.checkpoint.checkpoint_files import ATTRIBUTES_FILE
from agilerl.llm.config import SamplingConfig
from agilerl.typing import Act, ActionResult, Evaluation

EOS, PAD = 1, 0


class FakeGym:
    """Obeys ``ReasoningGym``: batches in order, an unscored one is handed out again.

    An evaluation restores the training position.
    """

    def __init__(
        self,
        rows: int = 5,
        batch_size: int = 2,
        test_rows: int = 3,
        name: str = "digits",
        return_raw_completions: bool = False,
        reward: Callable[[str, str], float] = lambda completion, answer: float(
            completion == answer
        ),
    ) -> None:
        self.rows, self.batch_size, self.test_rows, self.name = rows, batch_size, test_rows, name
        self.return_raw_completions, self.reward = return_raw_completions, reward
        self.num_epochs = 0
        self.position = 0
        self.pending: list[int] = []
        self.last_completions: list[list[str]] = []
        self.seen: list[list[int]] = []
        self.evaluating = False

    def __len__(self) -> int:
        return self.rows

    @property
    def questions(self) -> list[str]:
        return [f"q{row}" for row in self.pending]

    @property
    def answers(self) -> list[str]:
        return [str(10 + row) for row in self.pending]

    def prompt_lengths(self) -> list[int]:
        return [1] * (self.rows + self.test_rows)

    def reset(self) -> list[dict[str, Any]]:
        if self.evaluating:
            self.pending = list(range(self.test_rows))
        elif not self.pending:
            self._draw()
        return self._prompts()

    def _draw(self) -> None:
        if self.position >= self.rows:
            self.position = 0
            self.num_epochs += 1
        self.pending = list(range(self.rows))[self.position : self.position + self.batch_size]
        self.position += self.batch_size
        self.seen.append(self.pending)

    def step(self, completion_ids: list[torch.Tensor]) -> tuple[Any, ...]:
        assert len(completion_ids) == len(self.pending)
        self.last_completions = [
            [" ".join(str(int(t)) for t in row[1:] if t not in (EOS, PAD)) for row in group]
            for group in completion_ids
        ]
        rewards = torch.tensor(
            [
                [self.reward(text, answer) for text in group]
                for group, answer in zip(self.last_completions, self.answers, strict=True)
            ]
        )
        following: list[dict[str, Any]] = []
        if self.evaluating:
            self.pending = []
        else:
            self._draw()
            following = self._prompts()
        if self.return_raw_completions:
            return following, rewards, self.last_completions
        return following, rewards

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
        kept, self.evaluating = self.pending, True
        rewards = [self.step(act(self.reset()).completion_ids)[1] for _ in range(loop)]
        self.pending, self.evaluating = kept, False
        return Evaluation(torch.cat(rewards).flatten())

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.num_epochs, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_epochs, self.position, self.pending = state["epoch"], state["position"], []

    def _prompts(self) -> list[dict[str, Any]]:
        return [
            {
                "input_ids": torch.tensor([[100 + row]]),
                "attention_mask": torch.ones(1, 1, dtype=torch.long),
                "text": f"q{row}",
            }
            for row in self.pending
        ]


class FakeAgent:
    """Answers row ``r`` of a group rightly while ``r < right_of_group``, else with the token 99.

    ``skill`` lists, evaluation by evaluation, how many test rows it answers rightly.
    """

    def __init__(
        self,
        index: int = 0,
        algo: str = "GSPO",
        group_size: int = 2,
        right_of_group: int = 1,
        skill: list[int] | None = None,
        on_learn: Callable[[FakeAgent], None] = lambda agent: None,
        on_save: Callable[[FakeAgent], None] = lambda agent: None,
    ) -> None:
        self.index, self.algo, self.group_size, self.seed = index, algo, group_size, 0
        self.right_of_group, self.skill = right_of_group, skill or [1]
        self.on_learn, self.on_save = on_learn, on_save
        self.fitness: list[float] = []
        self.scores: list[float] = []
        self.steps: list[int] = []
        self.total_steps = 0
        self.last_checkpoint: str | None = None
        self.accelerator, self.engine = None, SimpleNamespace(sharded=False)
        self.learned: list[dict[str, Any]] = []
        self.trackers: list[int] = []

    def sampling_config(self, training: bool = True) -> SamplingConfig:
        return SamplingConfig(
            max_new_tokens=2, max_model_len=64, eos_token_ids=(EOS,), pad_token_id=PAD
        )

    @contextmanager
    def rollout(self) -> Iterator[None]:
        yield

    def get_action(self, obs: list[dict[str, Any]], training: bool = True) -> ActionResult:
        ids, masks = [], []
        skill = self.skill[min(len(self.fitness), len(self.skill) - 1)]
        for position, prompt in enumerate(obs):
            token = int(prompt["input_ids"][0, 0])
            if training:
                right = [row < self.right_of_group for row in range(self.group_size)]
            else:
                right = [position < skill]
            rows = [[token, token - 90 if r else 99, EOS, PAD] for r in right]
            ids.append(torch.tensor(rows))
            masks.append(torch.tensor([[True, True, False]] * len(rows)))
        return ActionResult(ids, masks, sampling_logps=[torch.zeros(2)] * sum(map(len, ids)))

    def learn(
        self,
        experiences: Any,
        turn_ids: Any = None,
        sampling_logps: Any = None,
        *,
        sample_mask: Any = None,
    ) -> dict[str, float]:
        completion_ids, action_masks, rewards = experiences
        assert len(completion_ids) == len(action_masks) == len(rewards)
        self.on_learn(self)
        given = {"sampling_logps": sampling_logps, "sample_mask": sample_mask}
        self.learned.append({"completion_ids": completion_ids, "rewards": rewards, **given})
        return {"mean_loss": 0.5, "mean_kl": 0.25 * len(self.learned)}

    def test(self, env: FakeGym) -> np.ndarray:
        rewards = env.evaluate(lambda prompts: self.get_action(prompts, training=False)).rewards
        self.fitness.append(float(rewards.mean()))
        self.steps.append(self.total_steps)
        return rewards.numpy()

    def set_reference_policy(self, reference_update_tracker: int) -> None:
        self.trackers.append(reference_update_tracker)

    def saved_arguments(self) -> dict[str, Any]:
        return {"index": self.index, "group_size": self.group_size, "lr": 1e-4}

    def save_checkpoint(
        self, path: str | Path, lora_only: bool = True, save_optimizer: bool = True
    ) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        self.on_save(self)
        content = {"index": self.index, "learned": len(self.learned), "optimizer": save_optimizer}
        (Path(path) / "agent.json").write_text(json.dumps(content))
        (Path(path) / ATTRIBUTES_FILE).touch()
