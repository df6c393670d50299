"""What is kept for backward goes to host memory and comes back unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from agilerl import checks
from agilerl.llm.batch import TrainBatch
from agilerl.llm.config import ForwardConfig
from agilerl.llm.forward.activation_offload import activations_on_host, may_offload
from agilerl.llm.policy import Policy
from agilerl.llm.shared_base import SharedBase
from agilerl.testing import tiny_model

CPU = torch.device("cpu")
PACKED: dict[str, dict[str, Any]] = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "8 bits": {"load_in_8bit": True},
}
PACKED_ONLY = [pytest.param(name, marks=pytest.mark.needs("bitsandbytes")) for name in PACKED]


def model_with(weights: str, folder: Path, layers: int = 2) -> PreTrainedModel:
    model = tiny_model(hidden_size=64, layers=layers)
    if weights not in PACKED:
        return model.to(getattr(torch, weights))
    model.save_pretrained(folder)
    config = BitsAndBytesConfig(**PACKED[weights])
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config
    )
    return loaded


def policy_on(model: PreTrainedModel, targets: str | list[str] = "all-linear") -> Policy:
    lora = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    policy = Policy(SharedBase.of(model), {"actor": lora}, seed=0)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    return policy


def rows() -> TrainBatch:
    """Two completions of one prompt, and one of another."""
    ids = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(0))
    ids[1, :5] = ids[0, :5]
    mask = torch.zeros(3, 8, dtype=torch.bool)
    mask[:, 4:] = True
    return TrainBatch(
        ids, mask, torch.tensor([9] * 3), torch.tensor([5] * 3), torch.tensor([0, 0, 1]), mask
    )


def gradients(policy: Policy, config: ForwardConfig) -> torch.Tensor:
    parameters = list(policy.parameters().values())
    logp = policy.logprobs(rows(), config).logp
    found = torch.autograd.grad((logp * logp.detach()).sum(), parameters)
    return torch.cat([gradient.flatten() for gradient in found])


def offloaded_gradients(policy: Policy, config: ForwardConfig) -> tuple[torch.Tensor, int]:
    """The same with every activation in host memory, and the bytes of those."""
    parameters = list(policy.parameters().values())
    with activations_on_host(policy.model, CPU, smallest=1) as copies:
        logp = policy.logprobs(rows(), config).logp
    found = torch.autograd.grad((logp * logp.detach()).sum(), parameters)
    return torch.cat([gradient.flatten() for gradient in found]), copies.bytes


@pytest.mark.process  # bitsandbytes asks for the processor's name
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("weights", ["float64", "bfloat16", *PACKED_ONLY])
def test_gradients_are_the_same(weights: str, recompute: bool, tmp_path: Path) -> None:
    policy = policy_on(model_with(weights, tmp_path))
    config = ForwardConfig(temperature=0.9, recompute_layers=recompute)
    plain = gradients(policy, ForwardConfig(temperature=0.9))
    found, size = offloaded_gradients(policy, config)
    assert torch.equal(found, plain) and size > 0
    # Of a layer that is recomputed only the inputs are kept.
    kept = offloaded_gradients(policy, ForwardConfig(temperature=0.9))[1]
    assert not recompute or size < kept / 2


def test_weights_stay_and_what_several_layers_keep_is_copied_once() -> None:
    model = torch.nn.Linear(8, 8).requires_grad_(False)
    x = torch.randn(4, 8, requires_grad=True)
    with activations_on_host(model, CPU, smallest=1) as copies:
        hidden = x.sin()
        (model(hidden) * hidden + hidden.square()).sum().backward()
    # x of the sine, the sum of products keeps the layer's output and hidden, the square hidden.
    assert copies.bytes == 3 * 4 * 8 * 4


def test_a_copy_is_of_the_values_at_the_time() -> None:
    model = torch.nn.Module()
    x = torch.ones(4, requires_grad=True)
    with activations_on_host(model, CPU, smallest=1):
        hidden = x * 2
        first = hidden.square()
        with torch.no_grad():
            hidden.mul_(10)
        second = hidden.square()
    (gradient,) = torch.autograd.grad((first + second).sum(), x)
    assert gradient.tolist() == [2 * (2 * 2 + 2 * 20)] * 4


def test_small_tensors_and_those_on_other_devices_stay() -> None:
    x = torch.ones(4, requires_grad=True)
    for device, smallest in ((CPU, 17), (torch.device("meta"), 1)):
        with activations_on_host(torch.nn.Module(), device, smallest) as copies:
            x.square().sum().backward()
        assert copies.bytes == 0


def test_on_a_cpu_it_says_once_that_it_has_no_effect(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    assert not may_offload(CPU) and not may_offload(CPU)
    assert may_offload(torch.device("cuda"))
    assert caplog.text.count("activation_offload has no effect: the model is on the CPU") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_activations_take_its_memory_no_more() -> None:
    policy = policy_on(tiny_model(hidden_size=256, layers=8).to("cuda"))
    plain, config = gradients(policy, ForwardConfig(0.9)), ForwardConfig(0.9)
    before = torch.cuda.memory_allocated()
    logp = policy.logprobs(rows().to("cuda"), config).logp
    kept = torch.cuda.memory_allocated() - before
    del logp
    with activations_on_host(policy.model, policy.device, smallest=1):
        logp = policy.logprobs(rows().to("cuda"), config).logp
    assert torch.cuda.memory_allocated() - before < kept / 4
    found = torch.autograd.grad((logp * logp.detach()).sum(), list(policy.parameters().values()))
    torch.testing.assert_close(torch.cat([g.flatten() for g in found]), plain)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("weights", PACKED_ONLY)
def test_compiled_forwards_are_offloaded_too(weights: str, tmp_path: Path) -> None:
    # Each format compiles for as long as there are layers and adapters.
    policy = policy_on(model_with(weights, tmp_path, layers=1), ["q_proj"])
    # Compiled forwards are of padded rows.
    config = ForwardConfig(temperature=0.9, layout="padded")
    plain = gradients(policy, config)
    policy.compile("default")
    found, size = offloaded_gradients(policy, replace(config, recompute_layers=True))
    assert size > 0
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))
