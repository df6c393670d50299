"""Layers and head that rollouts run on single tokens compute what the model's own do."""

from __future__ import annotations

import logging

import pytest
import torch
from generation_helpers import policy_of, prompts_of, sampling_of
from model_families import make_family
from rollout_helpers import lora, random_policy
from torch import nn
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from agilerl.llm.causal_lm import LogitHead
from agilerl.llm.generation import Completions
from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm.generation.merged_weights import rollout_weights
from agilerl.llm.generation.single_token import layer_swap, tiled_head
from agilerl.llm.generation.single_token.fused_layer import FusedLayer
from agilerl.llm.generation.single_token.tiled_head import TiledHead
from agilerl.llm.policy import Policy
from agilerl.testing import tiny_model

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def biased_gelu() -> LlamaForCausalLM:
    config = LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, hidden_act="gelu")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter += 0.3 * torch.randn(parameter.shape)
    return model.eval()


def completed(policy: Policy) -> Completions:
    sampling = sampling_of(
        max_new_tokens=20, max_model_len=30, eos_token_ids=(1, 2, 3), return_logps=True
    )
    prompts = prompts_of([9, 3, 3, 1], vocab=64)
    return HFGenerator(policy).generate(prompts, 3, sampling, torch.Generator().manual_seed(0))


@pytest.fixture
def tokens_by_layer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that run here, one entry per call."""
    ran, run = list[int](), FusedLayer.run

    def recording(self: FusedLayer, *args: object) -> torch.Tensor:
        ran.append(self.attention.layer_idx)
        return run(self, *args)

    monkeypatch.setattr(FusedLayer, "run", recording)
    return ran


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "down_proj"]], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "smollm3", "biased_gelu"])
def test_completions_are_those_of_the_models_own_layers(
    family: str, targets: str | list[str], tokens_by_layer: list[int]
) -> None:
    """Prompts are padded, windows are shorter than they are, and rows leave."""
    model = biased_gelu() if family == "biased_gelu" else make_family(family)
    policy = random_policy(model.double(), lora(target_modules=targets))
    fused = completed(policy)
    assert set(tokens_by_layer) == {0, 1}
    tokens_by_layer.clear()
    layer_swap._exact[policy.base] = False
    own = completed(policy)
    assert not tokens_by_layer
    assert fused.logps is not None and own.logps is not None
    assert len({len(row) for row in own.token_ids}) > 3
    assert all(map(torch.equal, fused.token_ids, own.token_ids))
    # Log-probs are float32.
    torch.testing.assert_close(torch.cat(fused.logps), torch.cat(own.logps), rtol=1e-6, atol=1e-6)


def test_hidden_states_are_those_of_the_models_own_layers() -> None:
    """To the rounding of float32, in which the models compute their norms."""
    policy = random_policy(make_family("qwen3", torch.float64))
    with rollout_weights(policy), torch.no_grad():
        copies = {m for m in policy.base.decoder.modules() if isinstance(m, nn.Linear)}
        for layer in policy.base.decoder.layers:
            fused = FusedLayer(layer, copies)
            made, expected = layer_swap.changes(policy.base.decoder, fused)
            torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)


def test_layers_that_add_up_in_another_way_run_as_they_are(
    tokens_by_layer: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    config = GraniteConfig(**SMALL, residual_multiplier=0.5)
    policy = policy_of(GraniteForCausalLM(config).eval())
    generator, prompts = HFGenerator(policy), prompts_of([3], vocab=64)
    with caplog.at_level(logging.INFO, layer_swap.__name__):
        for _ in range(2):
            tokens_by_layer.clear()
            generator.generate(prompts, 2, sampling_of(), torch.Generator().manual_seed(0))
    assert not tokens_by_layer
    assert [record.getMessage() for record in caplog.records] == [
        "rollouts run the decoder layers of GraniteForCausalLM as they are: their results come out "
        "different"
    ]


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3_moe"])
def test_layers_with_other_parts_run_as_they_are(family: str, tokens_by_layer: list[int]) -> None:
    policy = policy_of(make_family(family))
    HFGenerator(policy).generate(
        prompts_of([3], vocab=60), 2, sampling_of(max_model_len=12), torch.Generator()
    )
    assert not tokens_by_layer


def test_layers_with_hooks_run_as_they_are_while_they_have_them(
    tokens_by_layer: list[int],
) -> None:
    """Also where they come after a first rollout, in which the layers were found exact."""
    policy = policy_of(tiny_model())
    completed(policy)
    mlp, seen = policy.base.decoder.layers[0].mlp, list[int]()
    for register in (mlp.register_forward_hook, mlp.act_fn.register_forward_pre_hook):
        tokens_by_layer.clear()
        handle = register(lambda module, *given: seen.append(1))
        completed(policy)
        handle.remove()
        assert len(seen) > 1 and not tokens_by_layer
        seen.clear()
    completed(policy)
    assert tokens_by_layer and not seen


def test_in_a_session_layers_are_swapped_once(
    tokens_by_layer: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    policy = policy_of(tiny_model())
    generator = HFGenerator(policy)
    with caplog.at_level(logging.INFO, layer_swap.__name__), generator.session():
        for _ in range(2):
            tokens_by_layer.clear()
            generator.generate(prompts_of([3]), 2, sampling_of(), torch.Generator().manual_seed(0))
            assert tokens_by_layer
    assert not caplog.records


def test_layers_are_left_as_they_were() -> None:
    policy = policy_of(tiny_model())
    layers = policy.base.decoder.layers
    before = [dict(layer.__dict__) for layer in layers]
    with pytest.raises(KeyError), rollout_weights(policy):
        assert all("forward" in layer.__dict__ for layer in layers)
        raise KeyError
    assert [dict(layer.__dict__) for layer in layers] == before


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("biased", [False, True])
def test_logits_of_tiles_are_those_of_the_head(
    biased: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled_head, "TILE_BYTES", 0)  # the smallest tiles, of 64 tokens
    module = nn.Linear(8, 201, bias=biased).requires_grad_(False)
    head = LogitHead(module, module.weight, module.bias, scale=0.5, softcap=softcap)
    tiled = TiledHead(head)
    hidden = torch.randn(5, 8)
    logits = tiled.logits(hidden)
    torch.testing.assert_close(logits, head.logits(hidden))
    # In the same memory for fewer rows.
    again = tiled.logits(hidden[:3])
    torch.testing.assert_close(again, head.logits(hidden[:3]))
    assert again.data_ptr() == logits.data_ptr()
