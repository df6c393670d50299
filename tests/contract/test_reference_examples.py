"""The example code of the reference pages runs, with another model and fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import agilerl.algorithms
from agilerl.llm_envs import ReasoningGym, TokenObservationWrapper
from agilerl.testing import byte_tokenizer, tiny_model
from agilerl.training.train_llm import finetune_llm_multiturn, finetune_llm_reasoning
from agilerl.utils.utils import save_llm_checkpoint


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(hidden_size=32, layers=1).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def reward_fn(completion: str, answer: str, question: str) -> float:
    del question
    return float(answer.lower() in completion.lower())


@pytest.mark.parametrize("name", ["CISPO", "GSPO", "GRPO"])
def test_example(name: str, model_path: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    algorithm = getattr(agilerl.algorithms, name)
    model = AutoModelForCausalLM.from_pretrained(
        model_path,
        torch_dtype=torch.float32,
        device_map="auto",
    )
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    agent = algorithm(
        actor_network=model,
        pad_token_id=tokenizer.eos_token_id,
        pad_token=tokenizer.eos_token,
        device="cuda" if torch.cuda.is_available() else "cpu",
        batch_size=8,
        group_size=8,
        max_model_len=48,  # the page leaves 1024, a minute of random bytes
    )
    train_ds = Dataset.from_dict(
        {"question": ["2+2?", "Capital of France?"], "answer": ["4", "Paris"]}
    )
    test_ds = Dataset.from_dict({"question": ["3+3?"], "answer": ["6"]})
    reasoning_env = ReasoningGym(
        train_dataset=train_ds,
        test_dataset=test_ds,
        tokenizer=tokenizer,
        reward_fn=reward_fn,
        conversation_template=[{"role": "user", "content": "Q: {question}\nA:"}],
        data_batch_size_per_gpu=2,
    )
    trained_pop = finetune_llm_reasoning(
        pop=[agent],
        env=reasoning_env,
        max_steps=4,
        evaluation_interval=50,
    )
    assert trained_pop == [agent] and len(agent.scores) == 2 and agent.fitness

    checkpoint_path = "path/to/checkpoint"
    save_llm_checkpoint(agent, checkpoint_path)
    base_model = AutoModelForCausalLM.from_pretrained(
        model_path, torch_dtype=torch.float32, device_map="auto"
    )
    trained = PeftModel.from_pretrained(base_model, f"{checkpoint_path}/actor")
    ids = tokenizer("2+2?", return_tensors="pt").input_ids.to(trained.device)
    with torch.no_grad(), agent.select_adapter("actor"):
        assert torch.allclose(
            trained(input_ids=ids).logits, agent.actor(input_ids=ids).logits, atol=1e-5
        )


@pytest.mark.parametrize("name", ["CISPO", "GSPO", "GRPO"])
def test_multi_turn_example(name: str, model_path: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    agent = getattr(agilerl.algorithms, name)(
        actor_network=AutoModelForCausalLM.from_pretrained(model_path),
        pad_token_id=tokenizer.eos_token_id,
        pad_token=tokenizer.eos_token,
        batch_size=8,
        group_size=8,
        max_output_tokens=8,  # the page leaves it open
    )

    class ToyMultiTurnEnv:
        def reset(self, seed=None):
            del seed
            return "Start: What is 2+2?", {}

        def step(self, action: str):
            reward = 1.0 if "4" in action else 0.0
            return "Done.", reward, True, False, {"correct": bool(reward)}

    def env_factory():
        return TokenObservationWrapper(
            env=ToyMultiTurnEnv(),
            tokenizer=tokenizer,
            max_turns=4,
            pad_id=tokenizer.eos_token_id,
            max_model_len=1024,
            max_output_tokens=128,
        )

    trained_pop = finetune_llm_multiturn(
        pop=[agent],
        max_turns=4,
        env_factory=env_factory,
        max_steps=100,  # 2000 on the page; one turn is one step
        evaluation_interval=50,
    )
    assert trained_pop == [agent]
    assert agent.steps[-1] == 128 and len(agent.scores) == 2 and agent.fitness
