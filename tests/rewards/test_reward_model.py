"""A tiny reward model with random weights, saved and loaded as a real one would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from agilerl.llm_envs import ReasoningGym
from agilerl.rewards import RewardModel
from agilerl.testing import byte_tokenizer

QUESTIONS = ["2+2?", "Name a fruit.", "Why?", ""]
COMPLETIONS = ["4", "A pear, or perhaps a fig, but never a potato.", "", "b"]


def save(path: Path, tokenizer: PreTrainedTokenizerFast | None = None, **config: Any) -> str:
    torch.manual_seed(0)
    settings = {
        "vocab_size": 260,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "num_labels": 1,
        "initializer_range": 0.5,
        "pad_token_id": None,
    }
    Qwen2ForSequenceClassification(Qwen2Config(**(settings | config))).save_pretrained(path)
    (byte_tokenizer() if tokenizer is None else tokenizer).save_pretrained(path)
    return str(path)


def score_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits of one text without padding: the head on the last hidden state."""
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state
        return model.score(hidden[0, -1])


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_each_conversation_gets_the_score_it_has_alone(
    tmp_path: Path, batch_size: int, padding_side: str
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = padding_side
    reward = RewardModel.from_pretrained(save(tmp_path, tokenizer), batch_size=batch_size)
    expected = []
    for question, completion in zip(QUESTIONS, COMPLETIONS, strict=True):
        text = (
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{completion}<|im_end|>"
        )
        ids = tokenizer.encode(text + "\n")
        expected.append(float(score_of(reward.model, ids)))
    scores = reward(completion=COMPLETIONS, question=QUESTIONS)
    assert scores == pytest.approx(expected, abs=1e-4)
    assert len({round(score, 2) for score in scores}) == 4


def test_plain_text_is_a_pair(tmp_path: Path) -> None:
    reward = RewardModel.from_pretrained(save(tmp_path), use_chat_template=False)
    expected = float(score_of(reward.model, reward.tokenizer.encode("2+2?4")))
    assert reward(["4"], ["2+2?"]) == [pytest.approx(expected, abs=1e-4)]


def test_an_encoder_gets_the_two_segments() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=260, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    reward = RewardModel(BertForSequenceClassification(config), tokenizer)
    assert reward.max_length == 64
    alone = [reward([c], [q])[0] for q, c in zip(QUESTIONS[:3], COMPLETIONS[:3], strict=True)]
    assert reward(COMPLETIONS[:3], QUESTIONS[:3]) == pytest.approx(alone, abs=1e-4)


def test_long_texts_are_cut(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert RewardModel.from_pretrained(path).max_length == 256
    reward = RewardModel.from_pretrained(path, max_length=8, use_chat_template=False)
    assert reward(["x" * 5000], ["abc"]) == reward(["xxxxx"], ["abc"])


def test_several_labels(tmp_path: Path) -> None:
    path = save(tmp_path, num_labels=3)
    with pytest.raises(ValueError, match="the model has 3 labels; pass label=0 to 2"):
        RewardModel.from_pretrained(path)
    rewards = [
        RewardModel.from_pretrained(path, label=label)(COMPLETIONS, QUESTIONS) for label in range(3)
    ]
    assert torch.tensor(rewards).sum(0).tolist() == pytest.approx([1.0] * 4, abs=1e-5)
    with pytest.raises(ValueError, match="label is 3; it must be at least 0 and at most 2"):
        RewardModel.from_pretrained(path, label=3)


def test_dtype_and_device(tmp_path: Path) -> None:
    path = save(tmp_path)
    reward = RewardModel.from_pretrained(path, dtype=torch.bfloat16, device="cpu")
    assert reward.model.dtype == torch.bfloat16
    assert not reward.model.training
    assert reward(["4"], ["2+2?"]) == pytest.approx(
        RewardModel.from_pretrained(path)(["4"], ["2+2?"]), abs=0.2
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path: Path) -> None:
    path = save(tmp_path)
    expected = RewardModel.from_pretrained(path)(COMPLETIONS, QUESTIONS)
    reward = RewardModel.from_pretrained(path, device="cuda")
    assert reward(COMPLETIONS, QUESTIONS) == pytest.approx(expected, abs=1e-2)


def test_it_runs_once_per_step(tmp_path: Path) -> None:
    reward = RewardModel.from_pretrained(save(tmp_path))
    batches: list[int] = []
    reward.model.register_forward_pre_hook(
        lambda module, args, kwargs: batches.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    rows = Dataset.from_dict({"question": QUESTIONS[:3], "answer": [""] * 3})
    template = [{"role": "user", "content": "{question}"}]
    env = ReasoningGym(rows, rows, byte_tokenizer(), [reward], template)
    prompts = env.reset()
    texts = ["4", "A pear"]
    ids = [
        torch.cat([p["input_ids"].repeat(2, 1), torch.tensor([[*b"4     "], [*b"A pear"]])], 1)
        for p in prompts
    ]
    _, rewards = env.step(ids)
    assert batches == [6]
    expected = [reward(texts, [question] * 2) for question in env.last_questions]
    assert env.last_completions == [["4     ", "A pear"]] * 3
    assert rewards[:, 1].tolist() == pytest.approx([pair[1] for pair in expected], abs=1e-4)
    assert list(env.last_rewards) == ["RewardModel"]


def test_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    model = RewardModel.from_pretrained(path).model
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        RewardModel(model, tokenizer, use_chat_template=True)
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="tokenizer has no pad token"):
        RewardModel(model, tokenizer)
    with pytest.raises(ValueError, match="batch_size is 0"):
        RewardModel.from_pretrained(path, batch_size=0)
    with pytest.raises(ValueError, match="max_length is 0"):
        RewardModel.from_pretrained(path, max_length=0)
    with pytest.raises(OSError, match="no-such-folder"):
        RewardModel.from_pretrained(str(tmp_path / "no-such-folder"))
