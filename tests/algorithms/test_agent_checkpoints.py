"""Agents to disk and back: the four cells, what is restored, other LoRA configs."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent_helpers import (
    fixed_rollouts,
    lora,
    make_agent,
    prompts,
    randomise,
    small_model,
    train,
    weights,
)
from peft import PeftModel, get_peft_model

from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.llm.config import CosineLRScheduleConfig

CELLS = list(itertools.product([True, False], [True, False]))


def trained_agent(cls: type[GRPO] = GRPO, **changes: Any) -> GRPO:
    schedule = CosineLRScheduleConfig(20, warmup_proportion=0.25)
    agent = make_agent(cls, **({"cosine_lr_schedule_config": schedule} | changes))
    for seed, role in enumerate(agent.policy.roles):
        randomise(agent, role, seed)
    train(agent)
    return agent


def greedy(agent: GRPO) -> torch.Tensor:
    return agent.get_action(prompts("hello"), training=False).completion_ids[0]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=fixed_rollouts()[0]).logits


def actor_logits(agent: GRPO, role: str = "actor") -> torch.Tensor:
    with agent.select_adapter(role):
        return logits(agent.actor)


@pytest.mark.parametrize(("lora_only", "save_optimizer"), CELLS)
def test_round_trip_with_load_checkpoint(
    lora_only: bool, save_optimizer: bool, tmp_path: Path
) -> None:
    agent = trained_agent()
    agent.save_checkpoint(tmp_path / "run", lora_only, save_optimizer)
    other = make_agent(cosine_lr_schedule_config=agent.cosine_lr_schedule_config)
    if save_optimizer:
        other.load_checkpoint(str(tmp_path / "run"), load_optimizer=True)
    else:
        with pytest.warns(UserWarning, match="it holds none; the optimizer starts afresh"):
            other.load_checkpoint(tmp_path / "run", load_optimizer=True)
        agent.reinit_optimizers()
    assert torch.equal(greedy(other), greedy(agent))
    other.rng.set_state(agent.rng.get_state())
    assert train(other) == train(agent)
    for role in ("actor", "reference"):
        assert torch.equal(weights(other, role), weights(agent, role))


@pytest.mark.parametrize(("lora_only", "save_optimizer"), CELLS)
@pytest.mark.parametrize("cls", [GRPO, GSPO])
def test_round_trip_with_load(
    cls: type[GRPO], lora_only: bool, save_optimizer: bool, tmp_path: Path
) -> None:
    search = HyperparameterConfig(lr=RLParameter(min=1e-6, max=1.0))
    model = small_model()
    model.generation_config.eos_token_id = [7, 258]
    agent = trained_agent(cls, model=model, index=3, clip_coef=(0.5, 2.0), hp_config=search)
    agent.lr, agent.fitness, agent.mut = 2e-2, [np.float32(0.5)], "lr"
    agent.total_steps = 7
    agent.save_checkpoint(tmp_path / "run", lora_only, save_optimizer)
    given: dict[str, Any] = {}
    if lora_only:
        with pytest.raises(ValueError, match=r"recorded no model name.*actor_network"):
            cls.load(tmp_path / "run")
        given = {"actor_network": small_model()}
        given["actor_network"].generation_config.eos_token_id = [7, 258]
    loaded = cls.load(tmp_path / "run", **given)
    assert type(loaded) is cls
    assert (loaded.index, loaded.lr, loaded.clip_coef) == (3, 2e-2, (0.5, 2.0))
    assert (loaded.fitness, loaded.mut, loaded.total_steps) == ([0.5], "lr", 7)
    assert loaded.sampling_config() == agent.sampling_config()
    assert loaded.hp_config is not None and loaded.hp_config["lr"].min == 1e-6
    assert torch.equal(greedy(loaded), greedy(agent))
    (one,), (two,) = (a.get_action(prompts("hello")).completion_ids for a in (loaded, agent))
    assert torch.equal(one, two), "the random stream goes on"
    if save_optimizer:
        assert train(loaded) == train(agent)
        assert torch.equal(weights(loaded), weights(agent))


@pytest.mark.parametrize("by_name", [True, False])
def test_load_finds_the_base_by_its_path(by_name: bool, tmp_path: Path) -> None:
    small_model().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    if by_name:
        settings: dict[str, Any] = {"model_config": {"dtype": torch.float32}}
        agent = make_agent(model_name=str(tmp_path / "base"), **settings)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        agent = make_agent(model=model)
    train(agent)
    agent.save_checkpoint(tmp_path / "run")
    one, two = GRPO.load(tmp_path / "run"), GRPO.load(tmp_path / "run")
    assert one.policy.base.model.dtype == torch.float32
    assert one.policy.base is two.policy.base
    assert torch.equal(greedy(one), greedy(agent))


def test_load_of_another_algorithm(tmp_path: Path) -> None:
    make_agent(CISPO).save_checkpoint(tmp_path / "run")
    with pytest.raises(ValueError, match=r"checkpoint of CISPO, not GRPO; use CISPO.load"):
        GRPO.load(tmp_path / "run", actor_network=small_model())


def test_live_hyperparameters_are_kept(tmp_path: Path) -> None:
    trained_agent(lr=1e-2, beta=0.1).save_checkpoint(tmp_path / "run")
    agent = make_agent(lr=3e-3, beta=0.2)
    agent.fitness = [1.0]
    agent.load_checkpoint(tmp_path / "run", load_optimizer=True)
    assert (agent.lr, agent.beta, agent.fitness) == (3e-3, 0.2, [1.0])
    assert agent.optimizer.param_groups[0]["lr"] == 3e-3


def test_the_optimizer_is_left_alone_unless_asked(tmp_path: Path) -> None:
    trained_agent().save_checkpoint(tmp_path / "run")
    agent = make_agent()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agent.load_checkpoint(tmp_path / "run")
    assert agent.optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("lora_only", [True, False])
def test_what_becomes_the_reference(lora_only: bool, tmp_path: Path) -> None:
    agent = trained_agent()
    agent.save_checkpoint(tmp_path / "both", lora_only)
    other = make_agent()
    other.load_checkpoint(tmp_path / "both")
    assert torch.equal(weights(other, "reference"), weights(agent, "reference"))
    other.load_checkpoint(tmp_path / "both", overwrite_reference_adapter=True)
    assert torch.equal(weights(other, "reference"), weights(agent))
    trained_agent(use_separate_reference_adapter=False).save_checkpoint(tmp_path / "one", lora_only)
    other = make_agent()
    other.load_checkpoint(tmp_path / "one")
    assert torch.equal(weights(other, "reference"), weights(other)), "no reference saved: the actor"
    alone = make_agent(use_separate_reference_adapter=False)
    alone.load_checkpoint(tmp_path / "both")
    assert alone.policy.roles == ["actor"] and torch.equal(weights(alone), weights(agent))


def test_peft_reads_the_directory_and_gives_the_same_logits(tmp_path: Path) -> None:
    agent = trained_agent()
    agent.save_checkpoint(tmp_path / "run")
    for role in ("actor", "reference"):
        model = PeftModel.from_pretrained(small_model(), tmp_path / "run" / role)
        assert torch.allclose(logits(model), actor_logits(agent, role), atol=1e-5)


def test_a_plain_peft_directory_becomes_the_actor(tmp_path: Path) -> None:
    model = get_peft_model(small_model(), lora(init_lora_weights=False))
    model.save_pretrained(tmp_path)
    agent = make_agent(lora_config=lora())
    agent.load_checkpoint(tmp_path)
    for role in ("actor", "reference"):
        assert torch.allclose(actor_logits(agent, role), logits(model), atol=1e-5)
    with pytest.warns(UserWarning, match="it holds none"):
        agent.load_checkpoint(tmp_path, load_optimizer=True)


def test_the_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    agent = trained_agent()
    agent.save_checkpoint("~/run")
    for path in ("~/run", "~/run/actor"):
        other = make_agent()
        other.load_checkpoint(path)
        assert torch.equal(weights(other), weights(agent))


def test_targets_may_be_written_otherwise(tmp_path: Path) -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(small_model(), lora(target_modules=names, init_lora_weights=False))
    model.save_pretrained(tmp_path)
    agent = make_agent(lora_config=lora(target_modules="all-linear"))
    targets = agent.lora_config.target_modules if agent.lora_config else None
    agent.load_checkpoint(tmp_path)
    assert torch.allclose(actor_logits(agent), logits(model), atol=1e-5)
    assert agent.lora_config is not None and agent.lora_config.target_modules == targets


def test_lora_mismatch_lists_each_field(tmp_path: Path) -> None:
    make_agent(lora_config=lora(r=2, lora_alpha=4)).save_checkpoint(tmp_path / "run")
    agent = make_agent(lora_config=lora(target_modules=["q_proj"]))
    before = weights(agent)
    with pytest.raises(ValueError, match="merge_lora_configs=True") as caught:
        agent.load_checkpoint(tmp_path / "run")
    for said in ("lora_alpha: agent has 8, checkpoint 4", "r: agent has 4, checkpoint 2", "v_proj"):
        assert said in str(caught.value)
    assert torch.equal(weights(agent), before)


@pytest.mark.parametrize("lora_only", [True, False])
@pytest.mark.parametrize(
    ("live", "saved"),
    [
        ({"r": 8}, {"r": 4}),
        ({"r": 4}, {"r": 8, "lora_alpha": 32}),
        ({"target_modules": ["q_proj"]}, {"target_modules": ["down_proj"], "r": 3}),
        ({"use_rslora": True}, {"r": 9}),
        ({"use_dora": True}, {}),
        ({"r": 2}, {"use_dora": True}),
        ({"alpha_pattern": {"q_proj": 3}}, {"alpha_pattern": {"q_proj": 3}}),
    ],
    ids=str,
)
def test_merging_configs_leaves_the_function_unchanged(
    live: dict[str, Any], saved: dict[str, Any], lora_only: bool, tmp_path: Path
) -> None:
    agent = randomise(randomise(make_agent(lora_config=lora(**saved))), "reference", seed=2)
    agent.save_checkpoint(tmp_path / "run", lora_only)
    other = randomise(make_agent(lora_config=lora(**live)), seed=3)
    other.load_checkpoint(tmp_path / "run", merge_lora_configs=True)
    for role in ("actor", "reference"):
        assert torch.allclose(actor_logits(other, role), actor_logits(agent, role), atol=1e-4)
    merged = other.lora_config
    assert merged is not None
    assert merged.r == max(lora(**live).r, lora(**saved).r)
    assert merged.lora_alpha == 8 and set(merged.target_modules) == {
        *lora(**live).target_modules, *lora(**saved).target_modules,
    }  # fmt: skip
    train(other)
    other.save_checkpoint(tmp_path / "again", lora_only)
    other.clone().load_checkpoint(tmp_path / "again")


def test_merging_says_what_starts_afresh_and_which_value_wins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained_agent(lora_config=lora(lora_alpha=32)).save_checkpoint(tmp_path / "run")
    agent = make_agent(lora_config=lora(r=2))
    with pytest.warns(UserWarning, match="LoRA config was merged"):
        agent.load_checkpoint(tmp_path / "run", load_optimizer=True, merge_lora_configs=True)
    assert "lora_alpha: the agent's 8 is kept, not the checkpoint's 32" in caplog.text


def test_a_full_checkpoint_of_another_base_overwrites_the_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = trained_agent(model=small_model(seed=5), lora_config=lora())
    agent.save_checkpoint(tmp_path / "run", lora_only=False)
    other = make_agent(lora_config=lora())
    other.load_checkpoint(tmp_path / "run")
    assert "overwritten from the checkpoint" in caplog.text
    assert torch.equal(greedy(other), greedy(agent))
    with pytest.raises(ValueError, match="another one than the agent's"):
        make_agent(model=small_model(layers=1), lora_config=lora()).load_checkpoint(
            tmp_path / "run"
        )
    with pytest.raises(ValueError, match="another one than the agent's"):
        make_agent(model=small_model(hidden_size=64), lora_config=lora()).load_checkpoint(
            tmp_path / "run"
        )


def test_adapters_on_another_base_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = trained_agent(lora_config=lora())
    agent.save_checkpoint(tmp_path / "run")
    make_agent(lora_config=lora()).load_checkpoint(tmp_path / "run")
    assert "base weights" not in caplog.text
    make_agent(model=small_model(seed=5), lora_config=lora()).load_checkpoint(tmp_path / "run")
    assert "run were trained on other base weights" in caplog.text


def test_an_agent_without_a_reference_adapter_says_that_it_loads_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained_agent().save_checkpoint(tmp_path / "both")
    agent = make_agent(use_separate_reference_adapter=False)
    agent.save_checkpoint(tmp_path / "one")
    agent.load_checkpoint(tmp_path / "one")
    assert "reference" not in caplog.text
    agent.load_checkpoint(tmp_path / "both")
    agent.load_checkpoint(tmp_path / "one", overwrite_reference_adapter=True)
    assert caplog.text.count("it stays the base model") == 2


def test_saving_again_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    agent = trained_agent()
    agent.save_checkpoint(tmp_path / "run")
    train(agent)
    agent.save_checkpoint(tmp_path / "run", save_optimizer=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    config = json.loads((tmp_path / "run" / "actor" / "adapter_config.json").read_text())
    assert config["r"] == 16
    other = make_agent()
    other.load_checkpoint(tmp_path / "run")
    assert torch.equal(weights(other), weights(agent))
