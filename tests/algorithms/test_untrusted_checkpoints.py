"""Checkpoints made to run code on the reader's machine, or to exhaust its memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_helpers import lora, make_agent, small_model, train
from safetensors.torch import save_file

from agilerl.algorithms import GRPO

MARKER = "attributes.pt"


class Bomb:
    """Makes a directory when unpickled without care."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base model whose weights are a pickle that runs code."""
    path = tmp_path / "base"
    small_model().save_pretrained(path)
    state = dict(small_model().state_dict()) | {"x": Bomb(tmp_path / "trace")}
    (path / "model.safetensors").unlink()
    torch.save(state, path / "pytorch_model.bin")
    # Without a dtype there, transformers opens the weights to find out.
    config = json.loads((path / "config.json").read_text())
    del config["dtype"]
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    agent = make_agent(lora_config=lora())
    train(agent)
    agent.save_checkpoint(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module that makes a directory when imported."""
    name = f"megatron_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(f"import os; os.mkdir({str(tmp_path / 'trace')!r})")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def edit(run: Path, *path: str, **changes: Any) -> None:
    content = torch.load(run / MARKER, weights_only=True)
    inner = content
    for key in path:
        inner = inner[key]
    inner |= changes
    torch.save(content, run / MARKER)


@pytest.mark.parametrize(
    "settings",
    [
        {"weights_only": False, "use_safetensors": False},
        {"use_safetensors": False},
        {"trust_remote_code": True},
        {"gguf_file": "x"},
        {"use_kernels": True},
        {"attn_implementation": "someone/kernel"},
        {"quantization_config": {"quant_method": "x"}},
    ],
    ids=str,
)
def test_how_a_base_is_loaded_is_not_for_a_checkpoint_to_decide(
    run: Path, base: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    edit(run, base_name=str(base))
    edit(run, "arguments", model_name=str(base), model_config=settings)
    with pytest.raises(
        ValueError, match=rf"{next(iter(settings))}.*load the model yourself.*actor_network"
    ):
        GRPO.load(run)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("named", [True, False])
def test_a_base_that_is_pickled_is_not_loaded(
    run: Path, base: Path, tmp_path: Path, named: bool
) -> None:
    edit(run, base_name=str(base))
    if named:
        edit(run, "arguments", model_name=str(base))
    with pytest.raises(ValueError, match=r"safely.*safetensors.*actor_network"):
        GRPO.load(run)
    assert not (tmp_path / "trace").exists()


def test_what_may_be_said_of_a_base_still_holds(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path / "models" / "base")
    settings = {"dtype": torch.bfloat16, "subfolder": "base", "attn_implementation": "eager"}
    agent = make_agent(model_name=str(tmp_path / "models"), model_config=settings)
    agent.save_checkpoint(tmp_path / "run")
    loaded = GRPO.load(tmp_path / "run")
    assert loaded.policy.base is agent.policy.base
    assert loaded.model_config == settings
    assert loaded.policy.base.model.config._attn_implementation == "eager"


def test_a_base_that_brings_an_adapter_is_not_loaded(run: Path, tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    edit(run, base_name=str(tmp_path / "base"))
    with pytest.raises(ValueError, match=r"it is an adapter itself.*actor_network"):
        GRPO.load(run)


def test_an_adapter_does_not_name_modules_to_import(
    run: Path, importable: str, tmp_path: Path
) -> None:
    named = {"megatron_config": {"a": 1}, "megatron_core": importable}
    file = run / "actor" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | named | {"r": 2}))
    for merge in (True, False):
        with pytest.raises(ValueError, match=r"megatron_config.*may run code"):
            make_agent(lora_config=lora()).load_checkpoint(run, merge_lora_configs=merge)
    file.write_text(json.dumps(config))
    edit(run, "arguments", "lora_config", **named)
    with pytest.raises(ValueError, match=r"megatron_config.*may run code"):
        GRPO.load(run, actor_network=small_model())
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    "config",
    [
        {"corda_config": {"cache_file": "x"}, "eva_config": {"rho": 2.0}},
        {"auto_mapping": {"base_model_class": "system", "parent_library": "os"}},
        {"a_field_of_the_future": None},
    ],
    ids=str,
)
def test_what_an_adapter_says_of_its_origin_is_left_out(run: Path, config: dict[str, Any]) -> None:
    file = run / "actor" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    agent = make_agent(lora_config=lora())
    agent.load_checkpoint(run)
    assert agent.policy.lora_config.corda_config is None


@pytest.mark.parametrize(
    "config",
    [{"kasa_config": {"beta": 1.0}}, {"layer_replication": [[0, 2]]}, {"of_the_future": 1}],
    ids=str,
)
def test_other_kinds_of_adapters_are_refused_by_name(run: Path, config: dict[str, Any]) -> None:
    file = run / "actor" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(ValueError, match=rf"sets .*{next(iter(config))}"):
        make_agent(lora_config=lora()).load_checkpoint(run, merge_lora_configs=True)


def test_a_config_of_a_base_does_not_name_code(tmp_path: Path) -> None:
    make_agent(lora_config=lora()).save_checkpoint(tmp_path / "run", lora_only=False)
    content = torch.load(tmp_path / "run" / MARKER, weights_only=True)
    config = json.loads(content["model_config"]) | {
        "auto_map": {"AutoModelForCausalLM": "someone/code--modeling.Model"},
        "attn_implementation": "someone/kernel",
        "_attn_implementation": "someone/kernel",
    }
    edit(tmp_path / "run", model_config=json.dumps(config))
    agent = GRPO.load(tmp_path / "run")
    train(agent)
    assert type(agent.policy.base.model) is type(small_model())
    assert not hasattr(agent.policy.base.model.config, "auto_map")


HUGE = 10**10


def huge(kind: str, run: Path) -> None:
    """What would be allocated is far more than the file holds."""
    content = torch.load(run / MARKER, weights_only=True)
    expanded = torch.zeros(1).expand(HUGE)
    if kind == "base":
        content["actor_state_dict"]["model.norm.weight"] = expanded
    elif kind == "moments":
        content["optimizer"]["optimizer"]["state"][0]["exp_avg"] = expanded
    elif kind == "generator":
        content["rng_states"] = [expanded]
    elif kind == "rank":
        content["arguments"]["lora_config"]["r"] = HUGE
    elif kind == "model":
        config = json.loads(content["model_config"]) | {"vocab_size": HUGE}
        content["model_config"] = json.dumps(config)
    torch.save(content, run / MARKER)


@pytest.mark.parametrize("kind", ["base", "moments", "generator", "rank", "model"])
def test_nothing_is_allocated_that_the_file_does_not_hold(tmp_path: Path, kind: str) -> None:
    agent = make_agent(lora_config=lora())
    train(agent)
    agent.save_checkpoint(tmp_path / "run", lora_only=False)
    huge(kind, tmp_path / "run")
    with pytest.raises(ValueError, match=r"is damaged.*use another checkpoint"):
        GRPO.load(tmp_path / "run")


def test_the_rank_of_adapters_in_directories_is_that_of_the_arguments(run: Path) -> None:
    edit(run, "arguments", "lora_config", r=HUGE)
    with pytest.raises(ValueError, match=f"r: agent has {HUGE}, its adapter 4"):
        GRPO.load(run, actor_network=small_model())


def test_shards_say_no_sizes_that_they_do_not_hold(run: Path) -> None:
    group = torch.load(run / MARKER, weights_only=True)["optimizer"]["optimizer"]["param_groups"][0]
    (run / "save_checkpoint").mkdir()
    header = {str(n): {"shape": [HUGE, HUGE], "start": 0} for n in group["params"]}
    tensors = {f"{n}.{m}": torch.zeros(1) for n in header for m in ("exp_avg", "exp_avg_sq")}
    save_file(
        tensors | {f"{n}.step": torch.tensor(1.0) for n in header},
        run / "save_checkpoint" / "optimizer_rank_00000.safetensors",
        metadata={"places": json.dumps(header)},
    )
    edit(run, optimizer_shards=1)
    with pytest.raises(ValueError, match="lack elements of the parameters"):
        make_agent(lora_config=lora()).load_checkpoint(run, load_optimizer=True)
