"""LoRA layers that add their branch in place compute what PEFT's compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from model_families import FAMILIES, make_family, without_float32_steps
from peft.tuners.lora.layer import Linear
from rollout_helpers import (
    gradients,
    lora,
    random_batch,
    random_policy,
    relative_difference,
)

from agilerl.llm.config import ForwardConfig
from agilerl.llm.forward import lora_linear
from agilerl.llm.policy import Policy
from agilerl.testing import tiny_model


def count_in_place(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> int:
    """Layers of a forward that ran in place."""
    calls, apply = [], lora_linear._LoraLinear.apply

    def counting(*args: object) -> torch.Tensor:
        calls.append(1)
        return apply(*args)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(lora_linear._LoraLinear, "apply", counting)
        policy.base.decoder(input_ids=torch.tensor([[3, 4, 5]]))
    return len(calls)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_pefts(
    family: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = random_policy(make_family(family, torch.float64))
    batch = random_batch(vocab=60)
    config = ForwardConfig(temperature=0.9, recompute_layers=recompute)

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with without_float32_steps():
            logp = policy.logprobs(batch, config).logp
            return logp.detach(), gradients(policy, (logp * logp.detach().sin()).sum())

    mine, my_gradients = run()
    monkeypatch.setattr(lora_linear, "_is_plain", lambda *_: False)
    theirs, their_gradients = run()
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    assert relative_difference(my_gradients, their_gradients) < 1e-10


def test_every_linear_layer_runs_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = random_policy(tiny_model())
    linear = sum(type(m) is Linear for m in policy.model.modules())
    assert count_in_place(policy, monkeypatch) == linear > 0
    with policy.as_role(None):
        assert count_in_place(policy, monkeypatch) == 0
    assert count_in_place(policy, monkeypatch) == linear


@pytest.mark.parametrize(
    "made",
    [
        lambda: random_policy(tiny_model(), lora(use_dora=True)),
        lambda: random_policy(tiny_model(), lora(lora_bias=True)),
        # Its linear layers are Conv1D.
        lambda: random_policy(make_family("gpt2")),
    ],
    ids=["dora", "bias", "conv1d"],
)
def test_other_layers_run_as_peft_has_them(
    made: Callable[[], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert count_in_place(made(), monkeypatch) == 0


def test_adapters_in_another_precision_run_as_peft_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = random_policy(make_family("qwen2", torch.bfloat16))
    assert count_in_place(policy, monkeypatch) > 0
    for parameter in policy.parameters().values():
        parameter.data = parameter.data.float()
    assert count_in_place(policy, monkeypatch) == 0


def test_a_hook_on_a_layer_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, calls = random_policy(tiny_model()), []
    before = count_in_place(policy, monkeypatch)
    layer = next(m for m in policy.model.modules() if type(m) is Linear)
    layer.get_base_layer().register_forward_hook(lambda *_: calls.append(1))
    assert count_in_place(policy, monkeypatch) == before - 1
    assert calls == [1]


def test_the_users_model_is_left_without_it() -> None:
    model = tiny_model()
    random_policy(model).release()
    assert not any("forward" in module.__dict__ for module in model.modules())
