"""Countdown: rows, and a tiny model that writes equations, most of them wrong ones."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from agilerl.checks import COUNT, require
from agilerl.testing.arithmetic import calculator
from agilerl.testing.tiny import tiny_model
from agilerl.testing.tokenizer import byte_tokenizer

COUNTDOWN_CONVERSATION = [{"role": "user", "content": "{nums} = {target}"}]
"""Conversation template of the tiny model's warm-up, as ``ReasoningGym`` takes it."""

_LARGEST_TARGET = 999
_TRIES_PER_ROW = 50
_ROWS = 64
_LR = 2e-3
_RAMP_STEPS = 20
_SOLVED = 0.3
"""Share of the warm-up's equations that are right."""


def countdown_rows(
    size: int, *, numbers: int = 3, largest: int = 9, operators: str = "+-", seed: int = 0
) -> list[dict[str, Any]]:
    """Draw tasks that differ from each other: numbers, and a target that can be made of them.

    Args:
        size: Number of rows.
        numbers: Numbers of a row, each 1 or more.
        largest: Largest of them.
        operators: What targets are made with, of ``+-*/``, from left to right without brackets.
        seed: Seed of the draws.

    Returns:
        Rows with the columns of the Countdown datasets on the Hub: ``nums`` (list of int) and
        ``target`` (int, 0 to 999).

    Raises:
        ValueError: A number below 1, another operator, or fewer than ``size`` different tasks were
            found.
    """
    for name, value in {"size": size, "numbers": numbers, "largest": largest}.items():
        COUNT(name, value)
    require(
        bool(operators) and set(operators) <= set("+-*/"),
        f"operators is {operators!r}; it must hold one or more of + - * /",
    )
    rng = Random(seed)
    rows: dict[Any, dict[str, Any]] = {}
    for _ in range(_TRIES_PER_ROW * size):
        nums = [rng.randint(1, largest) for _ in range(numbers)]
        target = calculator(_equation(nums, operators, rng))
        if isinstance(target, int) and 0 <= target <= _LARGEST_TARGET:
            rows.setdefault((*sorted(nums), target), {"nums": nums, "target": target})
        if len(rows) == size:
            return list(rows.values())
    raise ValueError(
        f"only {len(rows)} different tasks found of size={size}; ask for fewer, or for more "
        "numbers or operators"
    )


def countdown_model(
    steps: int = 250, seed: int = 0
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Train a tiny model to write ``<answer>`` and an equation; about a minute on a CPU.

    It learns to use each number once, with a plus or a minus between. Three in ten of the equations
    that it learns from are right, so it seldom gets more right than that: a start for
    reinforcement learning.

    Args:
        steps: Supervised steps of 64 rows.
        seed: Of weights and rows.

    Returns:
        Model (float32, CPU, eval mode) and tokenizer.
    """
    COUNT("steps", steps)
    tokenizer, rng = byte_tokenizer(), Random(seed)
    model = tiny_model(
        vocab_size=len(tokenizer), hidden_size=128, layers=4, seed=seed, initializer_range=0.08
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / _RAMP_STEPS, 0.5 * (1 + math.cos(math.pi * step / steps))),
    )
    for _ in range(steps):
        model(**_warm_up_batch(tokenizer, rng)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


def _warm_up_batch(tokenizer: PreTrainedTokenizerFast, rng: Random) -> dict[str, torch.Tensor]:
    """Rows with a loss on the equations."""
    texts, prompts = [], []
    (template,) = COUNTDOWN_CONVERSATION
    for _ in range(_ROWS):
        nums = [rng.randint(1, 9) for _ in range(3)]
        solution = _equation(nums, "+-", rng)
        shown = solution if rng.random() < _SOLVED else _equation(nums, "+-", rng)
        content = template["content"].format(nums=nums, target=calculator(solution))
        prompt = tokenizer.apply_chat_template(
            [{**template, "content": content}], add_generation_prompt=True, tokenize=False
        )
        prompts.append(prompt)
        texts.append(f"{prompt}<answer>{shown}</answer>{tokenizer.eos_token}")
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for row, prompt in zip(labels, tokenizer(prompts)["input_ids"], strict=True):
        row[: len(prompt)] = -100
    return {**batch, "labels": labels}


def _equation(nums: list[int], operators: str, rng: Random) -> str:
    """The numbers in any order with operators between."""
    first, *rest = rng.sample(nums, len(nums))
    return str(first) + "".join(f"{rng.choice(operators)}{number}" for number in rest)
