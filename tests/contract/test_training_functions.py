"""Names, order and defaults of the training functions' arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from agilerl.llm_envs import TokenObservationWrapper
from agilerl.training.options import TrainingOptions
from agilerl.training.train_llm import finetune_llm_multiturn, finetune_llm_reasoning

OPTIONS = {
    "save_elite": None, "elite_path": None, "wb": False, "tensorboard": False,
    "tensorboard_log_dir": None, "evo_steps": None, "checkpoint_steps": None,
    "checkpoint_path": None, "tournament": None, "mutation": None, "wandb_api_key": None,
    "wandb_kwargs": None,
}  # fmt: skip
EMPTY = inspect.Parameter.empty
CONTRACT: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (
        finetune_llm_reasoning,
        {
            "pop": EMPTY, "env": None, "env_fn": None, "init_hp": None, **OPTIONS,
            "evaluation_interval": 10, "max_reward": None, "verbose": True, "accelerator": None,
            "max_steps": None, "num_epochs": None, "resume_from": None,
        },
    ),
    (
        finetune_llm_multiturn,
        {
            "pop": EMPTY, "max_turns": EMPTY, "env_factory": EMPTY, "env_config": None,
            "init_hp": None, "max_steps": 32768, **OPTIONS, "evaluation_interval": 50,
            "max_reward": None, "verbose": True, "accelerator": None, "num_epochs": None,
            "resume_from": None, "max_wall_seconds": None,
        },
    ),
    (
        TokenObservationWrapper,
        {
            "env": EMPTY, "tokenizer": EMPTY, "max_turns": EMPTY, "pad_id": None,
            "apply_chat_template": True, "max_model_len": None, "max_output_tokens": None,
            "enable_sliding_window": False,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("function", "expected"), CONTRACT)
def test_arguments(function: Callable[..., Any], expected: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(expected.items())
    # What is ours alone comes after, by keyword.
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    assert all(p.default is not EMPTY for p in parameters if p.kind is p.KEYWORD_ONLY)


OURS = {
    "keep_checkpoints": 2, "allow_appended_rows": False, "exit_code_on_sigterm": 143,
    "evaluation_samples": None, "callbacks": None, "completions_interval": None,
    "completions_shown": 4, "trackers": None, "zero_variance": "keep", "max_resamples": 3,
}  # fmt: skip
OURS_OF_EACH: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (finetune_llm_reasoning, {"max_wall_seconds": None, "evaluation_rows": None}),
    (
        finetune_llm_multiturn,
        {
            "groups_per_iteration": 8, "train_seeds": 1024, "evaluation_episodes": 64, "seed": 42,
            "max_workers": 16, "reset_workers": 1, "step_timeout": 60.0, "on_failure": "drop",
            "max_failure_share": 0.5, "failure_retries": 0,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("function", "own"), OURS_OF_EACH)
def test_our_own_arguments(function: Callable[..., Any], own: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    found = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert found == OURS | own


@pytest.mark.parametrize("function", [finetune_llm_reasoning, finetune_llm_multiturn])
def test_the_docstring_describes_every_argument_once(function: Callable[..., Any]) -> None:
    arguments = str(inspect.getdoc(function)).partition("Args:\n")[2].partition("\n\n")[0]
    described = re.findall(r"^    (\S[^:]*):", arguments, re.MULTILINE)
    assert sorted(described) == sorted(inspect.signature(function).parameters)


def test_every_option_of_the_record_is_an_argument() -> None:
    reasoning = inspect.signature(finetune_llm_reasoning).parameters
    multiturn = inspect.signature(finetune_llm_multiturn).parameters
    options = {option.name: option.default for option in fields(TrainingOptions)}
    assert {name: reasoning[name].default for name in options} == options
    # Seeds are no rows; evaluation_episodes says how many there are.
    assert {*options} - {*multiturn} == {"evaluation_rows"}
