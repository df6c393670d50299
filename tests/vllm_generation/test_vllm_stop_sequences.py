"""Completions with stop sequences end at the same token with vLLM and without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_agents import CONFIG

from agilerl.algorithms import GRPO
from agilerl.testing import byte_tokenizer

MakeAgent = Callable[..., GRPO]
TOKENIZER = byte_tokenizer()
ANSWERS = {
    "bawn": "nwab<|im_end|>",
    "flawed": "dewalf<|im_end|>",
    "pyrrol": "lorryp<|im_end|>",
    "gruine": "eniurg<|im_end|>",
    "wud": "duw<|im_end|>",
}
"""Of the bundled model, greedily."""


def prompt(word: str) -> dict[str, Any]:
    question = f"Spell this word backward (example: sun -> nus): {word}"
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return dict(TOKENIZER(text, return_tensors="pt"))


PROMPTS = [prompt(word) for word in ANSWERS]


def answers(agent: GRPO) -> list[str]:
    """Greedy completions."""
    action = agent.get_action(PROMPTS, training=False)
    return [
        TOKENIZER.decode(row[0, 1:][mask[0]])
        for row, mask in zip(action.completion_ids, action.action_masks, strict=True)
    ]


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({}, {}),
        ({"stop_sequences": ["w"]}, {"bawn": "nw", "flawed": "dew", "wud": "duw"}),
        ({"stop_sequences": ["iur", "ryp"]}, {"gruine": "eniur", "pyrrol": "lorryp"}),
        ({"stop_sequences": ("d", "ew", "u")}, {"flawed": "d", "wud": "d", "gruine": "eniu"}),
        # "d" too early, and "w" only later; an end of sequence has its least length too.
        (
            {"stop_sequences": ["d", "w"], "min_output_tokens": 2},
            {"flawed": "dew", "wud": "duw"},
        ),
        ({"stop_sequences": "<|im_end|>"}, {}),
        ({"stop_sequences": "b<|im"}, {}),
        ({"stop_sequences": ["sun", "\n", "user"]}, {}),  # of the prompt only
    ],
    ids=str,
)
@pytest.mark.parametrize("use_vllm", [True, False])
def test_greedy_answers(
    make_agent: MakeAgent, use_vllm: bool, settings: dict[str, Any], changed: dict[str, str]
) -> None:
    agent = make_agent(use_vllm=use_vllm, **settings)
    assert answers(agent) == list((ANSWERS | changed).values())


@pytest.mark.parametrize("use_vllm", [True, False])
def test_special_tokens_are_text(
    make_agent: MakeAgent, use_vllm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make_agent(use_vllm=use_vllm, stop_sequences=["<|im_end|>"])
    monkeypatch.setattr(agent.policy.base.model.generation_config, "eos_token_id", 0)
    assert answers(agent) == list(ANSWERS.values())


def test_those_of_the_config_are_added_for_vllm_only(make_agent: MakeAgent) -> None:
    settings: dict[str, Any] = {
        "stop_sequences": "rr",
        "vllm_config": replace(CONFIG, stop_sequences=("w",)),
    }
    changed = {"bawn": "nw", "flawed": "dew", "wud": "duw", "pyrrol": "lorr"}
    assert answers(make_agent(**settings)) == list((ANSWERS | changed).values())
    without = list((ANSWERS | {"pyrrol": "lorr"}).values())
    assert answers(make_agent(use_vllm=False, **settings)) == without


def test_samples_stop_too_with_a_log_prob_for_each_token(make_agent: MakeAgent) -> None:
    agent = make_agent(stop_sequences=["w", "r", "u"], temperature=1.5, group_size=8)
    action = agent.get_action(PROMPTS)
    assert action.sampling_logps is not None
    rows = [
        TOKENIZER.decode(row[1:][kept])
        for rows, masks in zip(action.completion_ids, action.action_masks, strict=True)
        for row, kept in zip(rows, masks, strict=True)
    ]
    kept = [int(mask.sum()) for masks in action.action_masks for mask in masks]
    assert kept == [len(row) for row in action.sampling_logps]
    assert sum(row[-1] in "wru" for row in rows) > 10
    assert not any(set("wru") & set(row[:-1].removesuffix("<|im_end|")) for row in rows)


def test_bytes_that_are_no_characters_are_read_alike(make_agent: MakeAgent) -> None:
    def pair(stops: list[str] | None) -> list[list[str]]:
        settings = {"max_output_tokens": 40, "stop_sequences": stops}
        agents = [make_agent(use_vllm=use_vllm, **settings) for use_vllm in (True, False)]
        return [answers(with_noise(agent)) for agent in agents]

    free = pair(None)
    stopped = pair(["\ufffd\ufffd", "q", "\ufffdm", "deme"])
    assert free[0] == free[1]
    assert stopped[0] == stopped[1]
    shorter = [len(a) < len(b) for a, b in zip(stopped[0], free[0], strict=True)]
    assert sum(shorter) >= 3, stopped[0]


@torch.no_grad()
def with_noise(agent: GRPO) -> GRPO:
    """An adapter so large that the model answers with noise."""
    rng = torch.Generator().manual_seed(0)
    for parameter in agent.policy.parameters("actor").values():
        parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.1)
    return agent


def test_any_stream_of_tokens_stops_where_vllms_detokenizer_does() -> None:
    script = Path(__file__).parent / "compare_stops.py"
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    stopped = int(ran.stdout.splitlines()[-1].split()[0])
    assert 200 < stopped < 800


def test_turns_go_on_after_a_text(make_agent: MakeAgent) -> None:
    after = prompt("drawl")["input_ids"]

    def two_turns(agent: GRPO) -> list[str]:
        with agent.rollout():
            first = agent.get_action(PROMPTS, training=False).completion_ids
            longer = [torch.cat([row, after], dim=1) for row in first]
            obs = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in longer]
            second = agent.get_action(obs, training=False)
        return [
            TOKENIZER.decode(row[0, ids.shape[1] :])
            for row, ids in zip(second.completion_ids, longer, strict=True)
        ]

    settings = {"stop_sequences": ["w", "ar"], "max_model_len": 256}
    expected = two_turns(make_agent(use_vllm=False, **settings))
    assert two_turns(make_agent(**settings)) == expected
    assert any(text.endswith(("w", "ar")) for text in expected)
