"""The loop on the real ``ReasoningGym``: every row once an epoch, evaluations in between."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from training_fakes import FakeAgent

from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.llm.config import SamplingConfig
from agilerl.llm_envs import ReasoningGym
from agilerl.testing import byte_tokenizer, tiny_model
from agilerl.training.train_llm import finetune_llm_reasoning
from agilerl.typing import ActionResult

TOKENIZER = byte_tokenizer()


class WritingAgent(FakeAgent):
    """Writes ``yes`` and ``no`` to every prompt in training, ``yes`` in evaluation."""

    def sampling_config(self, training: bool = True) -> SamplingConfig:
        return replace(super().sampling_config(training), pad_token_id=TOKENIZER.pad_token_id)

    def get_action(self, obs: list[dict[str, Any]], training: bool = True) -> ActionResult:
        ids, masks = [], []
        for prompt in obs:
            start = prompt["input_ids"][0].tolist()
            texts = [TOKENIZER.encode("yes"), TOKENIZER.encode("no")][: 2 if training else 1]
            rows = [start + text + [TOKENIZER.pad_token_id] * (3 - len(text)) for text in texts]
            ids.append(torch.tensor(rows))
            generated = [
                [False] * (len(start) - 1) + [i < len(text) for i in range(3)] for text in texts
            ]
            masks.append(torch.tensor(generated))
        return ActionResult(ids, masks)

    def test(self, env: ReasoningGym) -> np.ndarray:
        rewards = env.evaluate(lambda prompts: self.get_action(prompts, training=False)).rewards
        self.fitness.append(float(rewards.mean()))
        self.steps.append(self.total_steps)
        return rewards.numpy()


def rows(prefix: str, answers: list[str]) -> Dataset:
    return Dataset.from_list(
        [{"question": f"{prefix}{i}?", "answer": answer} for i, answer in enumerate(answers)]
    )


@pytest.mark.parametrize("raw", [False, True])
def test_two_epochs_with_evaluations_in_between(raw: bool, tmp_path: Path) -> None:
    scored: list[str] = []

    def reward_fn(completion: str, answer: str, question: str) -> float:
        scored.append(question)
        return float(completion == answer)

    def make_env() -> ReasoningGym:
        return ReasoningGym(
            rows("train", ["yes", "no", "yes", "maybe", "no"]),
            rows("test", ["yes", "no", "yes", "yes"]),
            TOKENIZER,
            reward_fn,
            [{"role": "user", "content": "{question}"}],
            data_batch_size_per_gpu=2,
            eval_batch_size=3,
            return_raw_completions=raw,
        )

    env, agent = make_env(), WritingAgent()
    finetune_llm_reasoning(
        [agent],
        env,
        num_epochs=2,
        evaluation_interval=2,
        checkpoint_steps=4,
        checkpoint_path=tmp_path,
        verbose=False,
    )
    # Three batches an epoch; evaluated before and after iterations 2, 4 and 6.
    assert agent.fitness == [0.75] * 4
    assert agent.steps == [0, 4, 7, 10]
    counts = {question: scored.count(question) for question in scored}
    assert counts == {f"train{i}?": 2 * 2 for i in range(5)} | {f"test{i}?": 4 for i in range(4)}

    lines = (tmp_path / "completions.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 10
    for sample in samples:
        assert sample["completion"] == "yes"
        assert sample["reward"] == float(sample["answer"] == "yes")

    state = json.loads((tmp_path / "iteration_00000004" / "run_state.json").read_text())
    restored = make_env()
    restored.load_state_dict(state["environments"][0]["position"])
    restored.reset()
    assert restored.questions == [sample["question"] for sample in samples[7:9]]


@pytest.mark.parametrize("algorithm", [GSPO, CISPO])
def test_real_agents_train_and_their_elite_loads(algorithm: type[GRPO], tmp_path: Path) -> None:
    env = ReasoningGym(
        rows("train", ["a"] * 6),
        rows("test", ["a"] * 3),
        TOKENIZER,
        lambda completion, answer, question: len(set(completion)) / 8,
        [{"role": "user", "content": "{question}"}],
        data_batch_size_per_gpu=2,
    )
    model = tiny_model(hidden_size=32, layers=1)
    pop = algorithm.population(
        2,
        pad_token_id=TOKENIZER.pad_token_id,
        pad_token=TOKENIZER.pad_token,
        actor_network=model,
        group_size=4,
        batch_size=8,
        max_output_tokens=6,
        lr=1e-3,
    )
    finetune_llm_reasoning(
        pop,
        env,
        max_steps=4,
        evaluation_interval=1,
        checkpoint_steps=2,
        checkpoint_path=tmp_path,
        save_elite=True,
        elite_path=tmp_path / "elite",
        verbose=False,
    )
    assert [agent.steps for agent in pop] == [[0, 2, 4]] * 2
    assert all(len(agent.fitness) == 3 and len(agent.scores) == 2 for agent in pop)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    assert 1 <= float(last["completion_length"]) <= 6
    assert float(last["grad_norm"]) > 0
    for folder in (tmp_path / "elite", tmp_path / "iteration_00000002" / "agent_1"):
        pop[0].load_checkpoint(folder)
        assert PeftModel.from_pretrained(tiny_model(hidden_size=32, layers=1), folder / "actor")


def gym(train: list[str], test: list[str]) -> ReasoningGym:
    """An environment of questions as they are: a prompt has their length and 21 tokens more."""
    splits = [
        Dataset.from_list([{"question": question, "answer": ""} for question in questions])
        for questions in (train, test)
    ]
    return ReasoningGym(
        *splits,
        TOKENIZER,
        lambda completion, answer, question: 0.0,
        [{"role": "user", "content": "{question}"}],
    )


@pytest.mark.parametrize(
    ("max_model_len", "context"), [(40, 2048), (None, 40)], ids=["argument", "model"]
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_prompt_too_long_for_an_agent_is_refused_at_the_start(
    max_model_len: int | None, context: int, split: str, tmp_path: Path
) -> None:
    model = tiny_model(hidden_size=32, layers=1)
    model.config.max_position_embeddings = context
    arguments = {
        "pad_token_id": TOKENIZER.pad_token_id,
        "pad_token": TOKENIZER.pad_token,
        "actor_network": model,
        "max_output_tokens": 2,
    }
    template = len(TOKENIZER.apply_chat_template(
        [{"role": "user", "content": ""}], tokenize=True, add_generation_prompt=True
    )["input_ids"])  # fmt: skip
    short, fits, long = "x", "x" * (39 - template), "x" * (40 - template)
    questions = {"train": [short, fits], "test": [short]}
    pop = [
        GRPO(**arguments, max_model_len=200),
        GRPO(**arguments, index=1, max_model_len=max_model_len),
    ]
    arguments_of_run = {"max_steps": 1, "checkpoint_path": tmp_path / "run", "verbose": False}
    with pytest.raises(ValueError, match=r"40 tokens.* agent 1 has max_model_len=40.*1 of 4") as e:
        finetune_llm_reasoning(
            pop, gym(**(questions | {split: [*questions[split], long]})), **arguments_of_run
        )
    assert "max_context_length of ReasoningGym (at most 39)" in str(e.value)
    assert not list(tmp_path.iterdir())
    finetune_llm_reasoning(pop[1:], gym(**questions), **arguments_of_run)


@pytest.mark.parametrize("bounds", [{"num_epochs": 1}, {"max_steps": 1}])
def test_two_calls_consume_what_a_longer_one_would(
    bounds: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def trained_on(calls: list[dict[str, int]]) -> list[str]:
        scored: list[str] = []
        env = ReasoningGym(
            rows("train", [""] * 5),
            rows("test", [""]),
            TOKENIZER,
            lambda completion, answer, question: scored.append(question) or 0.0,
            [{"role": "user", "content": "{question}"}],
            data_batch_size_per_gpu=2,
            reward_workers=1,
        )
        for call in calls:
            finetune_llm_reasoning([WritingAgent()], env, **call, verbose=False)
        return [question for question in scored if question.startswith("train")]

    once = {name: 2 * bound + (name == "max_steps") for name, bound in bounds.items()}
    assert trained_on([bounds, bounds]) == trained_on([once])
