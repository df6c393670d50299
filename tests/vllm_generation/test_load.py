"""Agents loaded from checkpoints generate with vLLM if they are asked to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from vllm_agents import CONFIG, prompts_of, train

from agilerl.algorithms import GRPO
from agilerl.utils.algo_utils import VLLMConfig

MakeAgent = Callable[..., GRPO]
PROMPTS = prompts_of(5, 12, 30)


def same_rows(agent: GRPO, other: GRPO, *, training: bool) -> bool:
    ours, theirs = (a.get_action(PROMPTS, training=training).completion_ids for a in (agent, other))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_loaded_agent_goes_on_as_the_saved_one(
    make_agent: MakeAgent, base: PreTrainedModel, tmp_path: Path
) -> None:
    agent = make_agent(temperature=1.5)
    train(agent, 3)
    agent.save_checkpoint(tmp_path / "saved")
    loaded = GRPO.load(tmp_path / "saved", actor_network=base, use_vllm=True, vllm_config=CONFIG)
    assert loaded.generator.engine is agent.generator.engine
    assert (loaded.use_vllm, loaded.vllm_config) == (True, CONFIG)
    assert same_rows(agent, loaded, training=False)
    assert same_rows(agent, loaded, training=True), "the same random stream"
    assert train(loaded, 2, seed=3) == train(agent, 2, seed=3)
    loaded.clean_up()


def test_without_being_asked_it_generates_without(
    make_agent: MakeAgent, base: PreTrainedModel, tmp_path: Path
) -> None:
    agent = make_agent()
    train(agent, 3)
    agent.save_checkpoint(tmp_path / "saved")
    loaded = GRPO.load(tmp_path / "saved", actor_network=base)
    assert (loaded.use_vllm, loaded.vllm_config) == (False, None)
    assert not loaded.generator.differs_from_trainer
    assert same_rows(agent, loaded, training=False)
    loaded.clean_up()


@pytest.mark.parametrize("lora_only", [True, False])
def test_from_the_checkpoint_alone(make_agent: MakeAgent, tmp_path: Path, lora_only: bool) -> None:
    """Of a full actor the base is in memory only, so it is written for vLLM to load."""
    agent = make_agent(stop_sequences=["e"] if lora_only else None)
    train(agent, 3)
    agent.save_checkpoint(tmp_path / "saved", lora_only=lora_only)
    loaded = GRPO.load(tmp_path / "saved", use_vllm=True, vllm_config=CONFIG)
    assert loaded.generator.engine is not agent.generator.engine
    assert same_rows(agent, loaded, training=False)
    train(loaded)
    loaded.clean_up()


def test_bad_values(base: PreTrainedModel, make_agent: MakeAgent, tmp_path: Path) -> None:
    make_agent().save_checkpoint(tmp_path / "saved")
    for changes, says in (
        ({"use_vllm": "yes"}, "use_vllm is 'yes'"),
        ({"vllm_config": 3}, "vllm_config is 3"),
        ({"use_vllm": True, "vllm_config": {"max_num_seqs": 4}}, "vllm_config is {'max_num_seqs'"),
    ):
        with pytest.raises(TypeError, match=says):
            GRPO.load(tmp_path / "saved", actor_network=base, **changes)
    with pytest.raises(ValueError, match=r"max_lora_rank is 4, but lora_config\.r is 16"):
        GRPO.load(
            tmp_path / "saved",
            actor_network=base,
            use_vllm=True,
            vllm_config=VLLMConfig(max_lora_rank=4),
        )
