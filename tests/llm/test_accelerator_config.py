"""What ZeRO stage 3 asks of a model and of a DeepSpeed configuration, without processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from model_families import FAMILIES, make_family
from torch import nn

from agilerl.llm.engine.accelerator_config import gathers_for_generation
from agilerl.llm.engine.partition_checks import check_every_layer_runs
from agilerl.testing import tiny_model
from agilerl.utils.llm_utils import create_llm_accelerator

pytest.importorskip("deepspeed")


@dataclass
class Configured:
    """As much of an accelerator as is asked; a whole one would start processes."""

    deepspeed_plugin: DeepSpeedPlugin


def configured(folder: Path, **changes: Any) -> Accelerator:
    """With a user's own DeepSpeed configuration, read from its file."""
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}} | changes
    (folder / "deepspeed.json").write_text(json.dumps(config))
    plugin = DeepSpeedPlugin(hf_ds_config=str(folder / "deepspeed.json"))
    return cast(Accelerator, Configured(plugin))


def test_the_base_is_gathered_unless_the_configuration_says_otherwise(tmp_path: Path) -> None:
    assert gathers_for_generation(None)
    assert gathers_for_generation(configured(tmp_path))
    for value in (True, False):
        section = {"gather_for_generation": value}
        assert gathers_for_generation(configured(tmp_path, agilerl=section)) is value


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"agilerl": False}, TypeError, "'agilerl' is False; it must be a dict"),
        ({"agilerl": {"gather_for_generation": "no"}}, TypeError, "is 'no'; it must be true or"),
        ({"agilerl": {"gather": False}}, ValueError, r"\['gather'\]; only 'gather_for_gener"),
        (
            {"agilerl": {"gather_for_generation": False}, "zero_optimization": {"stage": 2}},
            ValueError,
            "not partitioned with ZeRO stage 2; use stage 3",
        ),
    ],
    ids=["section", "type", "name", "stage"],
)
def test_a_bad_setting_is_named(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        gathers_for_generation(configured(tmp_path, **changes))


@pytest.mark.parametrize(("stage", "processes"), [(0, 1), (2, 1), (2, 2), (None, 2)])
def test_the_helper_refuses_what_has_no_effect(
    stage: int | None, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    with pytest.raises(ValueError, match=f"gather_for_generation is False.*{stage}.*stage=3"):
        create_llm_accelerator(zero_stage=stage, gather_for_generation=False)


@pytest.mark.parametrize("stage", [3, None], ids=["given", "the launcher's"])
def test_a_script_for_stage_3_also_runs_as_one_process(
    stage: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert create_llm_accelerator(zero_stage=stage, gather_for_generation=False) is None


def test_deepspeed_does_not_mind_the_section(tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    section = {"agilerl": {"gather_for_generation": False}}
    accelerator = configured(tmp_path, train_batch_size=1, **section)
    plugin = accelerator.deepspeed_plugin
    assert plugin is not None
    assert DeepSpeedConfig(plugin.deepspeed_config).zero_optimization_stage == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_every_supported_family_may_be_partitioned(family: str) -> None:
    check_every_layer_runs(make_family(family))


class Experts(nn.Module):
    """Every token goes to one of several layers."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden_size, 4)
        self.experts = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = self.router(hidden).argmax(-1)
        result = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            result[chosen == number] = self.experts[number](hidden[chosen == number])
        return result


def test_experts_that_are_layers_of_their_own_are_refused() -> None:
    model = tiny_model(hidden_size=32, layers=2)
    torch.manual_seed(0)
    model.model.layers[1].mlp = Experts(32)
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM.*layers\.1\.mlp\.experts\.\d.*stage 2"):
        check_every_layer_runs(model.eval())
