"""Agents on a base of packed weights: what they compute, what is saved, and what is refused."""

from __future__ import annotations

import copy
import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_helpers import (
    fixed_rollouts,
    make_agent,
    prompts,
    randomise,
    small_model,
    train,
    weights,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from agilerl.algorithms import GRPO
from agilerl.algorithms.checkpoint.load import read_saved_agent
from agilerl.distributed import Ranks
from agilerl.llm.checkpoint.schema import DamagedCheckpointError
from agilerl.llm.generation.mixed_adapters import mixing_key
from agilerl.llm.quantization import is_quantized
from agilerl.llm.shared_base import SharedBase
from agilerl.utils.algo_utils import VLLMConfig

pytestmark = pytest.mark.process  # bitsandbytes asks for the processor's name
NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CONFIGS: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "nested fp4": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    small_model(hidden_size=64).save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONFIGS[request.param]


def packed(name: str, **settings: Any) -> PreTrainedModel:
    config = BitsAndBytesConfig(**settings)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, quantization_config=config)
    return loaded


@pytest.mark.needs("bitsandbytes")
def test_it_acts_and_learns_as_on_the_weights_that_the_packed_ones_stand_for(
    name: str, config: dict[str, Any]
) -> None:
    plain_model = copy.deepcopy(packed(name, **config)).dequantize()
    settings: dict[str, Any] = {"optimizer": torch.optim.SGD, "max_grad_norm": 1e6}
    agents = [
        randomise(make_agent(model_name=name, quantization_config=config, **settings)),
        randomise(make_agent(model=plain_model, **settings)),
    ]
    assert {agent.policy.base.row_layout for agent in agents} == {"packed"}
    (quantized,), (plain,) = (
        agent.get_action(prompts("hello"), training=False).completion_ids for agent in agents
    )
    assert torch.equal(quantized, plain)
    before = weights(agents[0])
    found, expected = (train(agent) for agent in agents)
    moved, steps = (weights(agent) - before for agent in agents)
    assert found["mean_loss"] == pytest.approx(expected["mean_loss"], rel=1e-5)
    assert found["ratio_max"] == pytest.approx(expected["ratio_max"], rel=1e-5)
    assert (moved - steps).norm() < 1e-5 * steps.norm()


@pytest.mark.needs("bitsandbytes")
@pytest.mark.parametrize("bits", ["nf4", "int8"])
def test_a_model_that_was_run_before_is_trained_and_is_left_as_it_was(name: str, bits: str) -> None:
    # On some CPUs bitsandbytes repacks 4-bit weights for inference, and cuts gradients off.
    model, fresh = packed(name, **CONFIGS[bits]).eval(), packed(name, **CONFIGS[bits])
    ids = fixed_rollouts()[0]
    with torch.no_grad():
        before = model(ids).logits
    sgd: dict[str, Any] = {"optimizer": torch.optim.SGD, "max_grad_norm": 1.0, "update_epochs": 1}
    agents = [randomise(make_agent(model=given, batch_size=8, **sgd)) for given in (model, fresh)]
    start = weights(agents[0])
    for agent in agents:
        train(agent)
    moved, expected = (weights(agent) - start for agent in agents)
    # Repacking rounds the scales to bfloat16.
    assert (moved - expected).norm() < 0.05 * expected.norm()
    agents[0].clean_up()
    assert not any(module.training for module in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before, atol=2e-2, rtol=2e-2)


@pytest.mark.needs("bitsandbytes")
def test_checkpoints_clones_and_the_8_bit_optimizer_go_on_exactly(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"optimizer": "adamw_8bit", "lr_schedule": "linear"}
    settings |= {"lr_schedule_steps": 5, "model_name": name, "quantization_config": config}
    agent = randomise(make_agent(**settings))
    train(agent)
    agent.save_checkpoint(tmp_path / "saved")
    twin, live = agent.clone(), make_agent(**settings)
    live.load_checkpoint(tmp_path / "saved", load_optimizer=True)
    live.rng.set_state(agent.rng.get_state())
    resumed = make_agent(**settings)
    read_saved_agent(resumed, tmp_path / "saved").restore()
    base = agent.policy.base
    assert twin.policy.base is base and live.policy.base is base
    loaded = GRPO.load(tmp_path / "saved")
    assert loaded.policy.base.fingerprint() == base.fingerprint()
    train(agent)
    for other in (twin, live, resumed, loaded):
        train(other)
        assert torch.equal(weights(other), weights(agent))
    # From the file alone, without an agent whose base could be shared.
    for other in (agent, twin, live, resumed, loaded):
        other.clean_up()
    del agent, twin, live, resumed, loaded, other, base
    again = GRPO.load(tmp_path / "saved")
    assert is_quantized(again.policy.base.model) and mixing_key(again.policy) is not None


@pytest.mark.needs("bitsandbytes")
def test_a_population_shares_one_quantized_base(name: str) -> None:
    agents = GRPO.population(
        2,
        model_name=name,
        quantization_config=BitsAndBytesConfig(**NF4),
        pad_token_id=0,
        pad_token="!",
    )
    assert len({id(agent.policy.base) for agent in agents}) == 1


@pytest.mark.needs("bitsandbytes")
def test_a_device_map_of_the_users_own_is_taken(name: str) -> None:
    placed = {"device_map": {"": "cpu"}}
    agent = make_agent(model_name=name, model_config=placed, quantization_config=NF4)
    assert is_quantized(agent.policy.base.model)


@pytest.mark.needs("bitsandbytes")
def test_products_are_logged_once_while_there_are_agents(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    agents = [make_agent(model=packed(name, **NF4)) for _ in range(2)]
    for agent in agents:
        caplog.clear()
        for _ in range(2):
            logger.warning("a product is rounded")
        assert len(caplog.records) == (agent is agents[0])
        agent.clean_up()
    for _ in range(2):
        logger.warning("a product is rounded")
    assert len(caplog.records) == 2


@pytest.mark.needs("bitsandbytes")
def test_a_skip_list_without_the_head_keeps_it_whole(name: str) -> None:
    skipping = NF4 | {"llm_int8_skip_modules": ["down_proj"]}
    agent = make_agent(model_name=name, quantization_config=skipping)
    kinds = {n: type(m).__name__ for n, m in agent.policy.base.model.named_modules()}
    assert kinds["lm_head"] == kinds["model.layers.0.mlp.down_proj.base_layer"] == "Linear"
    assert kinds["model.layers.0.mlp.up_proj.base_layer"] == "Linear4bit"
    with pytest.raises(ValueError, match=r"actor_network has a quantized head.*llm_int8_skip"):
        make_agent(model=packed(name, **skipping))


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ({}, ValueError, "neither load_in_4bit nor load_in_8bit"),
        ({"load_in_4bit": True, "load_in_8bit": True}, ValueError, "only one can be used"),
        ({"load_in_8bit": True, "llm_int8_has_fp16_weight": True}, ValueError, "keeps whole"),
        ({"load_in_2bit": True}, ValueError, "'load_in_2bit'.*BitsAndBytesConfig"),
        ({"load_in_4bit": "yes"}, TypeError, "load_in_4bit must be a boolean"),
        ({"quant_method": "gptq"}, ValueError, "quant_method 'gptq'.*BitsAndBytesConfig"),
        (NF4 | {"bnb_4bit_quant_type": "nf5"}, ValueError, "quant_type 'nf5'; .* 'nf4', 'fp4'"),
        (NF4 | {"bnb_4bit_compute_dtype": "bf17"}, ValueError, "dtype 'bf17'; .*torch.bfloat16"),
        (NF4 | {"bnb_4bit_compute_dtype": torch.int8}, ValueError, "dtype torch.int8; .*torch"),
        (BitsAndBytesConfig(bnb_4bit_quant_type="nf5"), ValueError, "quant_type 'nf5'; "),
        ("nf4", TypeError, "'nf4'.*BitsAndBytesConfig"),
    ],
    ids=str,
)
def test_bad_configs_are_named(value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^quantization_config .*{says}"):
        make_agent(model_name="somewhere", quantization_config=value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"actor_network": small_model()}, "actor_network is loaded already.*model_name"),
        ({"model_config": {"quantization_config": NF4}}, "as the argument"),
    ],
    ids=["network", "twice"],
)
def test_a_second_place_to_say_it_is_refused(
    changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before a library is asked for that would not help.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"quantization_config.*{says}|model_config has .*{says}"):
        make_agent(**({"model_name": "x", "quantization_config": NF4} | changes))


def test_quantizing_needs_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"quantization_config.*agilerl\[quantization\]"):
        make_agent(model_name="somewhere", quantization_config=NF4)


@pytest.mark.needs("bitsandbytes")
def test_what_packed_weights_cannot_do_is_refused(name: str, tmp_path: Path) -> None:
    agent = make_agent(model_name=name, quantization_config=NF4)
    with pytest.raises(ValueError, match=r"lora_only is False.*lora_only=True"):
        agent.save_checkpoint(tmp_path / "saved", lora_only=False)
    with pytest.raises(ValueError, match=r"vllm_config.quantization is None.*'bitsandbytes'"):
        make_agent(model_name=name, quantization_config=NF4, use_vllm=True)
    unnamed = packed(name, **NF4)
    unnamed.name_or_path = ""
    with pytest.raises(ValueError, match=r"not loaded by a name.*model_name"):
        make_agent(model=unnamed, use_vllm=True, vllm_config=VLLMConfig(quantization="x"))
    with pytest.raises(ValueError, match=r"ZeRO stage 3.*quantized.*zero_stage 2"):
        SharedBase.of(packed(name, **NF4)).partition_over(Ranks())


@pytest.mark.needs("bitsandbytes")
@pytest.mark.parametrize(
    "written", [{"quant_method": "x"}, {"bnb_4bit_compute_dtype": "load"}, "nf4"], ids=str
)
def test_a_checkpoint_says_nothing_else_of_quantization(
    name: str, tmp_path: Path, written: Any
) -> None:
    make_agent(model_name=name, quantization_config=NF4).save_checkpoint(tmp_path / "saved")
    file = tmp_path / "saved" / "attributes.pt"
    torch.save(torch.load(file, weights_only=True) | {"base_quantization": written}, file)
    with pytest.raises(DamagedCheckpointError, match="base_quantization"):
        GRPO.load(tmp_path / "saved")
