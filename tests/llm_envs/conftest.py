"""A small environment and completions made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sums_data import TEMPLATE, sums
from transformers import PreTrainedTokenizerFast

from agilerl.llm_envs import ReasoningGym
from agilerl.testing import byte_tokenizer
from agilerl.typing import ReasoningPrompts


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def make_env(tokenizer: PreTrainedTokenizerFast) -> Callable[..., ReasoningGym]:
    """``make_env(train=7, test=5, **kwargs)``: sums, reward 1 where the answer is in the text."""

    def make(train: int = 7, test: int = 5, **kwargs: Any) -> ReasoningGym:
        arguments: dict[str, Any] = {
            "train_dataset": sums(0, train),
            "test_dataset": sums(100, test),
            "tokenizer": tokenizer,
            "reward_fn": lambda completion, answer, question: float(answer in completion),
            "conversation_template": TEMPLATE,
            "data_batch_size_per_gpu": 3,
        }
        return ReasoningGym(**{**arguments, **kwargs})

    return make


@pytest.fixture
def complete(tokenizer: PreTrainedTokenizerFast) -> Callable[..., list[torch.Tensor]]:
    """``complete(prompts, [[text, ...], ...])``: completion ids as ``get_action`` returns them."""

    def make(prompts: list[ReasoningPrompts], texts: list[list[str]]) -> list[torch.Tensor]:
        return [
            _group(tokenizer, prompt["input_ids"][0].tolist(), group)
            for prompt, group in zip(prompts, texts, strict=True)
        ]

    return make


def _group(tokenizer: PreTrainedTokenizerFast, prompt: list[int], texts: list[str]) -> torch.Tensor:
    rows = [prompt + tokenizer.encode(text) + [tokenizer.eos_token_id] for text in texts]
    width = max(map(len, rows))
    return torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
