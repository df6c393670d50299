"""What steps the adapters: which optimizer, and what is said about its settings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_helpers import lora, make_agent, randomise, small_model, train, weights

from agilerl import checks
from agilerl.algorithms import CISPO, GRPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.llm.checkpoint.schema import DamagedCheckpointError


def said(caplog: pytest.LogCaptureFixture, about: str) -> list[str]:
    return [message for message in caplog.messages if message.startswith(about)]


def test_a_rate_that_moves_no_adapter_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    model = small_model()
    make_agent(model=model, lr=1e-6)
    assert not said(caplog, "lr ")
    for rate in (5e-7, 9e-7):
        make_agent(model=model, lr=rate).clone()
    (message,) = said(caplog, "lr ")
    assert "Pass lr=1e-5 to 1e-4" in message


@pytest.mark.parametrize(
    ("cls", "settings", "band"),
    [
        (CISPO, {}, "[0.8, 1.2]"),
        (CISPO, {"clip_coef": 0.3}, "[0.7, 1.3]"),
        (GRPO, {"loss_type": "cispo"}, "[0.8, 1.2]"),
        (CISPO, {"clip_coef": (0.0, 5.0)}, None),
        (GRPO, {}, None),
    ],
)
def test_cispo_with_a_clip_coefficient_of_ppo_says_its_band(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    cls: type[GRPO],
    settings: dict[str, Any],
    band: str | None,
) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    make_agent(cls, **settings)
    messages = said(caplog, "clip_coef ")
    assert len(messages) == (band is not None)
    assert band is None or (band in messages[0] and "clip_coef=(0.0, 5.0)" in messages[0])


def momentum(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr, momentum=0.9)


class RunningSum(torch.optim.SGD):
    """Its parameter groups hold a number that grows, as Prodigy's do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data -= group["lr"] * group["steps"] * parameter.grad


OPTIMIZERS: list[Any] = [
    "adamw",
    momentum,
    torch.optim.SGD,
    torch.optim.Adagrad,
    RunningSum,
    pytest.param("adamw_8bit", marks=pytest.mark.needs("bitsandbytes")),
]


def test_a_step_of_sgd_is_the_clipped_gradient_times_the_rate() -> None:
    agent = randomise(make_agent(optimizer=torch.optim.SGD, lr=0.5, update_epochs=1, batch_size=8))
    before = weights(agent)
    norm = train(agent)["grad_norm"]
    assert isinstance(agent.optimizer, torch.optim.SGD)
    moved = (weights(agent) - before).norm().item()
    assert moved == pytest.approx(0.5 * min(norm, agent.max_grad_norm), rel=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saved_agents_and_clones_go_on_as_if_never_interrupted(
    optimizer: Any, tmp_path: Path
) -> None:
    model = small_model()
    # bitsandbytes keeps moments of 4,096 elements or more in 8 bits, of v_proj's lora_B in 32.
    settings: dict[str, Any] = {"model": model, "optimizer": optimizer, "lora_config": lora(r=128)}
    settings |= {"lr_schedule": "linear", "lr_schedule_steps": 5, "seed": 7}
    agent = randomise(make_agent(**settings))
    train(agent)
    agent.save_checkpoint(tmp_path / "saved")
    twin, live = agent.clone(), make_agent(**settings)
    live.load_checkpoint(tmp_path / "saved", load_optimizer=True)
    given = optimizer if callable(optimizer) else None
    loaded = GRPO.load(tmp_path / "saved", actor_network=model, optimizer=given)
    live.rng.set_state(agent.rng.get_state())
    for _ in range(2):
        rate = train(agent)["lr"]
        for other in (twin, live, loaded):
            assert train(other)["lr"] == rate
            assert type(other.optimizer) is type(agent.optimizer)
            assert torch.equal(weights(other), weights(agent))
    if optimizer == "adamw_8bit":
        for each in (agent, twin, live, loaded):
            kinds = {of_tensor["state1"].dtype for of_tensor in each.optimizer.state.values()}
            assert kinds == {torch.uint8, torch.float32}


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    agent = randomise(make_agent(optimizer=momentum))
    train(agent)
    agent.save_checkpoint(tmp_path / "saved")
    other = make_agent()
    with pytest.raises(
        ValueError,
        match=r"that of optimizer=a function that makes SGD, but the agent's is "
        "optimizer='adamw'",
    ):
        other.load_checkpoint(tmp_path / "saved", load_optimizer=True)
    other.load_checkpoint(tmp_path / "saved")
    assert torch.equal(weights(other), weights(agent))


def test_a_function_that_makes_adamw_is_not_the_adamw_of_that_name(tmp_path: Path) -> None:
    model = small_model()
    agent = make_agent(model=model)
    train(agent)
    agent.save_checkpoint(tmp_path / "saved")
    other = make_agent(model=model, optimizer=torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"of optimizer='adamw', but .*=a function that makes Ad"):
        other.load_checkpoint(tmp_path / "saved", load_optimizer=True)


@pytest.mark.parametrize("name", ["entropy_coef", "weight_decay"])
def test_a_search_that_starts_from_zero_is_warned_of(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    def made(value: float, least: float) -> list[str]:
        search = HyperparameterConfig(**{name: RLParameter(least, 0.1)})
        make_agent(hp_config=search, **{name: value}).clone()
        said = [str(warning.message) for warning in recwarn]
        recwarn.clear()
        return [each for each in said if "hp_config names" in each]

    (warning,) = made(0.0, 0.0)
    assert f"hp_config names '{name}', which is 0.0, and mutations multiply" in warning
    assert made(0.01, 0.0) == made(0.0, 0.001) == []


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.ones(1).expand(9), "the file does not hold every element"),
        ({"inner": {"deep": 1.0}}, "deep"),
        ([1.0], "should be"),
    ],
)
def test_a_damaged_state_of_another_optimizer_is_named(
    value: Any, says: str, tmp_path: Path
) -> None:
    agent = randomise(make_agent(optimizer=momentum))
    train(agent)
    agent.save_checkpoint(tmp_path / "saved")
    file = tmp_path / "saved/attributes.pt"
    content = torch.load(file, weights_only=True)
    content["optimizer"]["optimizer"]["state"][0]["momentum_buffer"] = value
    torch.save(content, file)
    with pytest.raises(DamagedCheckpointError, match=rf"(?s)momentum_buffer.*{says}"):
        agent.load_checkpoint(tmp_path / "saved", load_optimizer=True)


class Remembering(torch.optim.SGD):
    """Keeps what no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.state[group["params"][0]]["past"] = [1.0, 2.0]


def over_copies(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(p.data.clone()) for p in groups[0]["params"]], lr)


@pytest.mark.parametrize(
    ("optimizer", "error", "says"),
    [
        (lambda groups, lr: lr, TypeError, r"optimizer returned 0.01 of type float; it must be"),
        (over_copies, ValueError, "optimizer returned one over other parameters"),
        (Remembering, TypeError, r"state of optimizer holds 'past', which is \[1.0, 2.0\]"),
    ],
)
def test_functions_that_make_no_usable_optimizer(
    optimizer: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        train(make_agent(optimizer=optimizer))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"weight_decay": 0.1}, "weight_decay is 0.1, but optimizer is a function"),
        ({"adam_betas": (0.5, 0.9)}, "adam_betas is .* optimizer is a function"),
        (
            {"hp_config": HyperparameterConfig(weight_decay=RLParameter(0.0, 0.1))},
            "weight_decay is 0.0, and in hp_config, but optimizer is a function",
        ),
    ],
)
def test_settings_of_adamw_are_refused_for_another(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_agent(optimizer=torch.optim.SGD, **given)


def test_eight_bits_need_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"'adamw_8bit'.*agilerl\[quantization\]"):
        make_agent(optimizer="adamw_8bit")
