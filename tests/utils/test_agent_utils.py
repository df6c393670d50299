"""Saving agents and making populations from a table of hyperparameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agilerl.algorithms import CISPO, GRPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.llm.config import CosineLRScheduleConfig as Defined
from agilerl.testing import tiny_model
from agilerl.utils.algo_utils import CosineLRScheduleConfig
from agilerl.utils.utils import create_population, save_llm_checkpoint

TOKENS: dict[str, Any] = {"pad_token_id": 256, "pad_token": "<|pad|>"}


def small() -> Any:
    return tiny_model(hidden_size=32, layers=1)


def test_a_population_from_a_table() -> None:
    search = HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3))
    agents = create_population(
        "cispo",
        INIT_HP={
            "POP_SIZE": 3,
            "BATCH_SIZE": 4,
            "GROUP_SIZE": 2,
            "LR": 1.0,
            "clip_coef": (0.0, 5.0),
        },
        hp_config=search,
        actor_network=small(),
        **TOKENS,
    )
    assert [type(agent) for agent in agents] == [CISPO] * 3
    assert [(a.index, a.batch_size, a.group_size) for a in agents] == [(i, 4, 2) for i in range(3)]
    assert all(agent.lr <= 1e-3 and agent.clip_coef == (0.0, 5.0) for agent in agents)
    assert len({id(agent.policy.base) for agent in agents}) == 1


@pytest.mark.parametrize(
    ("algo", "init_hp", "says"),
    [
        ("PPO", {}, "algo is 'PPO'.*GRPO, GSPO, CISPO"),
        (GRPO, {}, "algo is .*GRPO, GSPO, CISPO"),
        ("GRPO", {"BATCHSIZE": 4}, "GRPO has no 'BATCHSIZE'. Did you mean 'batch_size'?"),
        ("GSPO", {"LOSS_TYPE": "grpo"}, "GSPO has no 'LOSS_TYPE'"),
        ("GRPO", {"PAD_TOKEN": "x"}, "'PAD_TOKEN', but pad_token is given already"),
        ("GRPO", {"LR": -1.0}, "lr is -1.0"),
    ],
)
def test_bad_tables(algo: Any, init_hp: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        create_population(algo, None, init_hp, actor_network=small(), **TOKENS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"net_config": {"arch": "mlp"}}, "net_config is .*must be None"),
        ({"population_size": 3, "INIT_HP": {"POP_SIZE": 2}}, "says 2 agents, .*is 3"),
        ({"betta": 0.1}, "GRPO has no betta. Did you mean 'beta'?"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        create_population("GRPO", actor_network=small(), **TOKENS, **arguments)


def test_save_and_load(tmp_path: Path) -> None:
    (agent,) = create_population("GRPO", actor_network=small(), **TOKENS)
    save_llm_checkpoint(agent, str(tmp_path / "run"), lora_only=False, save_optimizer=False)
    assert GRPO.load(tmp_path / "run").lr == agent.lr
    with pytest.raises(TypeError, match="agent is of type str"):
        save_llm_checkpoint("agent", tmp_path / "run")  # type: ignore[arg-type]


def test_the_schedule_config_is_the_one_agents_take() -> None:
    assert CosineLRScheduleConfig is Defined
