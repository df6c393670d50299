"""The page's code runs from top to bottom and prints what the page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from documentation_page import run_page

from agilerl.llm_envs import ReasoningGym
from agilerl.rewards import batched_reward
from agilerl.testing import byte_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


@pytest.mark.process
def test_code_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(PAGE, blocks=8, shown=8)


ASKED = [{"role": "user", "content": "2+2?"}]
TEMPLATE = [{"role": "user", "content": "{question}"}]
BRIEF = {"role": "system", "content": "Be brief."}
EXTRA = {"index": 0, "split": "train"}


def of_answer(completion: str, answer: str) -> float:
    return float(completion == answer)


@batched_reward
def of_trl(prompts: Any, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
    pairs = zip(completions, solution, strict=True)
    return [float(completion == truth) for completion, truth in pairs]


def of_verl(data_source: str, completion: str, reward_model: Any, extra_info: Any) -> float:
    assert (data_source, extra_info) == ("sums", EXTRA)
    return float(completion == reward_model["ground_truth"])


def of_verifiers(prompt: Any, completion: str, answer: str, info: Any) -> float:
    assert (prompt, info) == (ASKED, {"level": 1})
    return float(completion == answer)


VERL = {
    "data_source": "sums",
    "prompt": ASKED,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": EXTRA,
}
COMING_FROM: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "question and answer": ({"question": "2+2?", "answer": "4"}, TEMPLATE, of_answer),
    "TRL, messages": ({"prompt": ASKED, "solution": "4"}, None, of_trl),
    "TRL, text": (
        {"prompt": "2+2?", "solution": "4"}, [{"role": "user", "content": "{prompt}"}], of_trl
    ),
    "OpenAI": ({"messages": ASKED, "answer": "4"}, None, of_answer),
    "verl": (VERL, None, of_verl),
    "verifiers, messages": (
        {"prompt": ASKED, "answer": "4", "info": {"level": 1}}, [BRIEF], of_verifiers
    ),
    "verifiers, question": ({"question": "2+2?", "answer": "4"}, [BRIEF, *TEMPLATE], of_answer),
}  # fmt: skip


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", COMING_FROM)
def test_datasets_of_other_libraries(name: str, listed: bool) -> None:
    row, template, reward = COMING_FROM[name]
    rows = [row] if listed else Dataset.from_list([row])
    env = ReasoningGym(rows, None, byte_tokenizer(), reward, template)
    (prompt,) = env.reset()
    assert "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n" in prompt["text"]
    assert ("Be brief." in prompt["text"]) == ("verifiers" in name)
    answers = [torch.tensor([[*prompt["input_ids"][0].tolist(), *text]]) for text in (b"4", b"5")]
    _, rewards = env.step([torch.cat(answers)])
    assert rewards.tolist() == [[1.0, 0.0]]
