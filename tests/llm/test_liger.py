"""Liger's layers are in place during an update only, and only where they compute the same."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from agilerl import checks
from agilerl.llm.forward import liger
from agilerl.llm.shared_base import SharedBase
from agilerl.testing import tiny_model

needs_liger = pytest.mark.needs("liger_kernel", "triton")


def attributes(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Of each layer, and of the module with the functions that layers call."""
    return [
        *(dict(vars(m)) for m in model.modules()),
        dict(vars(sys.modules[type(model).__module__])),
    ]


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> tuple[PreTrainedModel, list[Any]]:
    # Read when kernels are defined: without a GPU they can only be interpreted.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = tiny_model(hidden_size=32, layers=1).requires_grad_(False)
    before = attributes(model)
    found = liger.recorded_changes(model)
    assert attributes(model) == before
    return model, found


@needs_liger
@pytest.mark.process
def test_what_liger_would_change_is_found_and_undone(
    changes: tuple[PreTrainedModel, list[Any]],
) -> None:
    model, found = changes
    layers = model.model.layers[0]
    forwards = {change.owner for change in found if change.name == "forward"}
    norms = {layers.input_layernorm, layers.post_attention_layernorm, model.model.norm}
    assert forwards == norms | {layers.mlp}
    assert [c.after for c in found if c.name == "in_place"] == [False] * 3
    assert not any(change.owner is model for change in found), "not its loss"


@needs_liger
@pytest.mark.process
def test_a_kernel_that_agrees_is_taken_and_one_that_does_not_is_left_out(
    changes: tuple[PreTrainedModel, list[Any]],
) -> None:
    # The interpreter knows no scalar arguments, which all others have.
    model, found = changes
    (rope,) = (change for change in found if change.name == "apply_rotary_pos_emb")
    assert "liger" in rope.after.__module__ and liger.same_with([rope], model)
    other = liger._Change(rope.owner, rope.name, rope.before, lambda q, k, *angles: (q, k))
    assert not liger.same_with([other], model)
    assert vars(rope.owner)[rope.name] is rope.before


@needs_liger
@pytest.mark.process
def test_what_liger_changed_before_an_error_is_undone_and_the_error_is_the_reason(
    changes: tuple[PreTrainedModel, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from liger_kernel.transformers import monkey_patch

    model, found = changes

    def failing(rope: bool = True, model: PreTrainedModel | None = None) -> None:
        assert rope and model is not None
        for change in found:
            change.put(change.after)
        raise RuntimeError("no kernel")

    monkeypatch.setitem(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, "qwen2", failing)
    before = attributes(model)
    assert liger.tried_changes(model) == ([], "Liger's layers raise RuntimeError('no kernel')")
    assert attributes(model) == before


def test_changes_that_cannot_all_be_made_are_undone() -> None:
    norm = tiny_model(hidden_size=32, layers=1).model.norm
    before = dict(vars(norm))
    made = liger._Change(norm, "in_place", liger._ABSENT, True)
    refused = liger._Change(norm, "weight", norm.weight, "no parameter")
    with pytest.raises(TypeError, match="parameter"), liger._in_place([made, refused]):
        pass
    assert vars(norm) == before


@pytest.mark.parametrize(
    ("device", "installed", "partition", "says"),
    [
        ("cpu", True, None, "its kernels need a GPU"),
        ("cuda", False, None, "liger-kernel is not installed (pip install 'agilerl[liger]')"),
        ("cuda", True, object(), "with ZeRO stage 3 the layers are DeepSpeed's"),
    ],
    ids=["cpu", "missing", "partitioned"],
)
def test_layers_stay_and_the_log_says_why_once(
    device: str,
    installed: bool,
    partition: Any,
    says: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    model = tiny_model(hidden_size=32, layers=1)
    base = SharedBase.of(model)
    # What a machine has; nothing is run on it.
    monkeypatch.setattr(SharedBase, "device", torch.device(device))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found" if installed else None)
    monkeypatch.setattr(base, "partition", partition)
    for _ in range(2):
        before = attributes(model)
        with liger.liger_layers(base):
            assert attributes(model) == before
    told = f"use_liger_loss has no effect on this Qwen2ForCausalLM: {says}"
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("WARNING", told)]


@needs_liger
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_all_layers_agree(tmp_path: Path) -> None:
    model = tiny_model(hidden_size=64, layers=2).to("cuda")
    base = SharedBase.of(model)
    plain = vars(model.model.norm).get("forward")
    with liger.liger_layers(base):
        assert vars(model.model.norm)["forward"] is not plain
    assert vars(model.model.norm).get("forward") is plain
