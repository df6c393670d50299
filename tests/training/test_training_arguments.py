"""Every mistake is an immediate error that names the argument; nothing is written before it."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from resume_helpers import make_agents
from training_fakes import FakeAgent, FakeGym

from agilerl.training.collectors.reasoning_collector import ReasoningCollector
from agilerl.training.train_llm import finetune_llm_reasoning

OBJECT = object()


def call(**options: Any) -> Any:
    arguments = {"pop": [FakeAgent()], "env": FakeGym(), "max_steps": 2, "verbose": False}
    return finetune_llm_reasoning(**{**arguments, **options})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pop": []}, ValueError, "pop is empty"),
        ({"pop": FakeAgent()}, ValueError, r"not FakeAgent: pass \[agent\]"),
        ({"pop": [FakeAgent(), "GRPO"]}, ValueError, r"pop\[1\] is a str"),
        ({"pop": [FakeAgent(), FakeAgent()]}, ValueError, r"same index, \[0, 0\]"),
        ({"env": None}, ValueError, "env and env_fn is needed, neither"),
        ({"env_fn": FakeGym}, ValueError, "env and env_fn is needed, both"),
        ({"env": None, "env_fn": 3}, TypeError, "env_fn=3 cannot be called"),
        ({"env": [1, 2]}, TypeError, "env is a list, which lacks name, num_epochs"),
        ({"env": None, "env_fn": dict}, TypeError, r"env_fn\(\) is a dict, which lacks"),
        ({"max_wall_seconds": 0}, ValueError, "max_wall_seconds is 0; it must be above 0"),
        ({"exit_code_on_sigterm": 256}, ValueError, "exit_code_on_sigterm is 256"),
        ({"exit_code_on_sigterm": "0"}, TypeError, "exit_code_on_sigterm is '0'"),
        ({"max_steps": 0}, ValueError, "max_steps is 0; it must be at least 1"),
        ({"max_steps": 2.0}, TypeError, "max_steps is 2.0; it must be an integer"),
        ({"max_steps": True}, TypeError, "max_steps is True; it must be an integer"),
        ({"num_epochs": -1}, ValueError, "num_epochs is -1"),
        ({"evaluation_interval": 0}, ValueError, "evaluation_interval is 0"),
        ({"evaluation_interval": None}, TypeError, "evaluation_interval is None"),
        ({"checkpoint_steps": 0, "checkpoint_path": "c"}, ValueError, "checkpoint_steps is 0"),
        ({"checkpoint_steps": 5}, ValueError, "checkpoint_steps=5 needs checkpoint_path"),
        ({"checkpoint_path": 7}, TypeError, "checkpoint_path is 7; it must be a str or Path"),
        ({"checkpoint_path": ""}, ValueError, "checkpoint_path is empty"),
        ({"checkpoint_path": __file__}, ValueError, "checkpoint_path=.* is a file"),
        ({"save_elite": True}, ValueError, "save_elite=True needs elite_path"),
        ({"elite_path": "e"}, ValueError, "elite_path='e' was given without save_elite=True"),
        ({"save_elite": "yes"}, TypeError, "save_elite is 'yes'; it must be True, False or None"),
        ({"max_reward": "1"}, TypeError, "max_reward is '1'; it must be a number"),
        ({"max_reward": float("nan")}, ValueError, "max_reward is nan; it must be finite"),
        ({"verbose": 1}, TypeError, "verbose is 1; it must be True or False"),
        ({"tensorboard": "logs"}, TypeError, "tensorboard is 'logs'"),
        ({"wb": None}, TypeError, "wb is None"),
        ({"init_hp": [1]}, TypeError, r"init_hp is \[1\]; it must be a dict"),
        ({"wandb_kwargs": "p"}, TypeError, "wandb_kwargs is 'p'; it must be a dict"),
        ({"wandb_api_key": 1234}, TypeError, "wandb_api_key is of type int; it must be a str"),
        ({"accelerator": OBJECT}, TypeError, "must be an accelerate.Accelerator"),
        ({"keep_checkpoints": 0}, ValueError, "keep_checkpoints is 0; it must be at least 1"),
        ({"keep_checkpoints": None}, TypeError, "keep_checkpoints is None; it must be an integer"),
        ({"resume_from": 7}, TypeError, "resume_from is 7; it must be a str or Path"),
        ({"resume_from": "x"}, FileNotFoundError, "resume_from='x' holds no complete run"),
    ],
)
def test_bad_input(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        call(**options)
    assert not list(tmp_path.iterdir())


def test_several_launched_processes_without_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"one of 2 processes .*create_llm_accelerator\(\)"):
        call()
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("WORLD_SIZE", "1")
    call()


def test_a_ratio_per_turn_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    (agent,) = make_agents(1, importance_sampling_level="turn")
    with pytest.raises(ValueError, match="agent 0 has importance_sampling_level='turn', but fin"):
        call(pop=[agent])
    assert not list(tmp_path.iterdir())


def test_an_agent_whose_padding_the_environment_takes_for_text() -> None:
    class Gym(FakeGym):
        tokenizer = SimpleNamespace(pad_token_id=5, all_special_ids=[5, 6])

    with pytest.raises(ValueError, match=r"agent 0 has pad_token_id=0, .* tokenizer has 5"):
        call(env=Gym())
    Gym.tokenizer.all_special_ids.append(0)
    call(env=Gym())


@pytest.mark.parametrize(
    ("elite", "checkpoints"), [("c", "c"), (".", "c"), ("c", "c/inner"), ("runs", None)]
)
def test_an_elite_that_would_replace_the_run_directory_is_refused(
    elite: str, checkpoints: str | None, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"elite_path=.* holds the run directory"):
        call(save_elite=True, elite_path=elite, checkpoint_path=checkpoints)
    assert not list(tmp_path.iterdir())


def test_an_elite_inside_the_run_directory_is_fine(tmp_path: Path) -> None:
    call(save_elite=True, elite_path="c/elite", checkpoint_path="c")
    assert (tmp_path / "c" / "elite" / "agent.json").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensorboard_log_dir": "t"},
            "tensorboard_log_dir has no effect without tensorboard=True",
        ),
        ({"wandb_kwargs": {"project": "p"}}, "wandb_kwargs has no effect without wb=True"),
        ({"wandb_api_key": "secret"}, "wandb_api_key has no effect without wb=True"),
    ],
)
def test_settings_without_effect_warn(options: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message) as caught:
        call(**options)
    # The warning points at the user's call, and shows no secret.
    assert caught[0].filename == __file__
    assert "secret" not in str(caught[0].message)


def test_good_input_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


def test_a_wrapper_that_delegates_is_an_environment() -> None:
    """Its members, the optional ones too, are known only to ``__getattr__``."""

    class Fingerprinted(FakeGym):
        def fingerprint(self) -> str:
            return "of the data"

    class Wrapper:
        def __init__(self, env: FakeGym) -> None:
            self.wrapped = env

        def __getattr__(self, name: str) -> Any:
            return getattr(self.wrapped, name)

        def __len__(self) -> int:
            return len(self.wrapped)

    (agent,) = call(env=Wrapper(Fingerprinted()))
    assert len(agent.learned) == 1
    state = ReasoningCollector(Wrapper(Fingerprinted())).state_dict()
    assert state["questions_and_answers"] == "of the data"
