"""Forwards of real architectures: log-probs as the model's own, prompts shared or not."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from model_families import (
    FAMILIES,
    LONG_WINDOW,
    UNSHARED_FAMILIES,
    make_family,
    without_float32_steps,
    without_window_when_cached,
)
from rollout_helpers import (
    PLAIN,
    TOLERANCE,
    gradients,
    lora,
    random_batch,
    random_policy,
    relative_difference,
)
from transformers import PreTrainedModel

from agilerl.llm.batch import TrainBatch, make_batch
from agilerl.llm.config import RowLayout
from agilerl.llm.forward.hidden_states import tokens_run
from agilerl.llm.forward.packed_attention import PackedAttention, attending_packed
from agilerl.llm.forward.packed_rows import PackedRows
from agilerl.llm.forward.recomputation import recomputed_layers
from agilerl.llm.policy import Policy
from agilerl.testing import tiny_model

# PEFT speaks of patterns it set itself for mixtures of experts.
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")

TEMPERATURE = PLAIN.temperature
PACKED = replace(PLAIN, layout="packed")
SHARED = replace(PLAIN, layout="shared_prompts")


def plain_formula(model: PreTrainedModel, batch: TrainBatch) -> torch.Tensor:
    """Log-probs row by row from the model's own logits, without padding."""
    found = []
    for row in range(len(batch)):
        ids = batch.token_ids[row, : batch.lengths[row]]
        log_p = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        chosen = log_p.gather(1, ids[1:, None]).squeeze(1)
        found.append(chosen[batch.action_mask[row, : len(chosen)]])
    return torch.cat(found)


@pytest.fixture(
    scope="module",
    params=itertools.product([*FAMILIES, *UNSHARED_FAMILIES], TOLERANCE),
    ids=lambda param: f"{param[0]}-{str(param[1]).removeprefix('torch.')}",
)
def policy(request: pytest.FixtureRequest) -> Iterator[Policy]:
    family, dtype = request.param
    config = lora(fan_in_fan_out=family == "gpt2")
    made = random_policy(make_family(family, dtype), config, separate_reference=False)
    yield made
    made.release()


@pytest.fixture
def tolerance(policy: Policy) -> Iterator[float]:
    dtype = policy.base.model.dtype
    exact = contextlib.nullcontext() if dtype is torch.float32 else without_float32_steps()
    with exact:
        yield TOLERANCE[dtype]


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    return random_batch(vocab=60)


def weighted(logp: torch.Tensor) -> torch.Tensor:
    return (logp * torch.linspace(-1, 2, len(logp), dtype=logp.dtype)).sum()


def test_log_probs_are_those_of_the_models_own_logits(
    policy: Policy, batch: TrainBatch, tolerance: float
) -> None:
    logp = policy.logprobs(batch, PLAIN).logp
    expected = plain_formula(policy.model.get_base_model(), batch)
    assert relative_difference({"logp": logp.detach()}, {"logp": expected.detach()}) < tolerance
    mine, theirs = gradients(policy, weighted(logp)), gradients(policy, weighted(expected))
    assert relative_difference(mine, theirs) < tolerance


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("layout", ["packed", "shared_prompts"])
def test_layouts_are_exact(
    policy: Policy, batch: TrainBatch, layout: RowLayout, recompute: bool, tolerance: float
) -> None:
    family = policy.base.model.config.model_type
    if family in UNSHARED_FAMILIES:
        assert policy.base.row_layout == "padded"
    else:
        eager = policy.base.model.config._attn_implementation == "eager"
        assert policy.base.row_layout == "shared_prompts" if eager else "packed"
        everything = torch.arange(len(batch))
        assert tokens_run(batch, everything, layout) < tokens_run(batch, everything, "padded")
    plain = policy.logprobs(batch, PLAIN)
    config = replace(PLAIN, layout=layout, recompute_layers=recompute)
    shared = policy.logprobs(batch, config)
    for name in ("logp", "entropy"):
        values = ({name: getattr(found, name).detach()} for found in (shared, plain))
        assert relative_difference(*values) < tolerance
    mine, theirs = gradients(policy, weighted(shared.logp)), gradients(policy, weighted(plain.logp))
    assert relative_difference(mine, theirs) < tolerance


def test_the_soft_cap_of_attention_is_felt(batch: TrainBatch) -> None:
    """Or the capped family would show nothing."""
    policy = random_policy(make_family("gemma2_capped"), separate_reference=False)
    capped = policy.logprobs(batch, SHARED).logp
    for layer in policy.base.decoder.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (policy.logprobs(batch, SHARED).logp - capped).abs().max() > 0.1


def test_recomputed_layers_change_nothing_in_plain_rows(
    policy: Policy, batch: TrainBatch, tolerance: float
) -> None:
    plain = policy.logprobs(batch, PLAIN)
    again = policy.logprobs(batch, replace(PLAIN, recompute_layers=True))
    assert torch.equal(again.logp, plain.logp)
    mine, theirs = gradients(policy, weighted(again.logp)), gradients(policy, weighted(plain.logp))
    assert relative_difference(mine, theirs) < tolerance


def test_padding_stays_within_learned_positions() -> None:
    """A long prompt beside a long completion: their sum is more positions than the model has."""
    model = make_family("gpt2", torch.float64)
    policy = random_policy(model, lora(fan_in_fan_out=True), separate_reference=False)
    long_prompt = random_batch((12,), (3, 1, 2, 3, 3, 3))
    long_completion = random_batch((6,), (9, 8), seed=1)
    batch = make_batch(
        [long_prompt.token_ids, long_completion.token_ids],
        [long_prompt.action_mask, long_completion.action_mask],
    )
    everything = torch.arange(len(batch))
    assert tokens_run(batch, everything, "shared_prompts") < tokens_run(batch, everything, "padded")
    shared, plain = policy.logprobs(batch, SHARED), policy.logprobs(batch, PLAIN)
    torch.testing.assert_close(shared.logp, plain.logp, rtol=1e-10, atol=1e-10)


def test_a_prompt_goes_through_the_model_once_with_its_gradient(batch: TrainBatch) -> None:
    policy = random_policy(tiny_model(), separate_reference=False)
    assert policy.base.row_layout == "packed"
    shapes: list[tuple[int, ...]] = []
    hook = policy.base.model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: shapes.append(tuple(args[0].shape))
    )
    policy.logprobs(batch, SHARED)
    # Two prompts; eight completions without their last token.
    assert shapes == [(2, 9), (8, 5)]
    shapes.clear()
    policy.logprobs(batch, PACKED)
    hook.remove()
    assert shapes == [(1, tokens_run(batch, torch.arange(len(batch)), "packed"))]


def test_little_to_share_runs_plain_rows() -> None:
    policy = random_policy(tiny_model(), separate_reference=False)
    batch = random_batch((2, 3, 4), (9,))
    shapes: list[tuple[int, ...]] = []
    hook = policy.base.model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: shapes.append(tuple(args[0].shape))
    )
    assert policy.base.row_layout == "packed"
    shapes.clear()
    policy.logprobs(batch, SHARED)
    hook.remove()
    assert shapes == [(3, 12)]


def test_single_token_completions_need_only_the_prompt() -> None:
    policy = random_policy(tiny_model().double(), separate_reference=False)
    batch = random_batch((9, 7), (1, 1, 1))
    plain = policy.logprobs(batch, PLAIN)
    for config in (PACKED, SHARED):
        found = policy.logprobs(batch, config)
        torch.testing.assert_close(found.logp, plain.logp, rtol=1e-10, atol=1e-10)


def test_an_unsupported_model_is_named_in_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    model = make_family("qwen3_next")
    policy = random_policy(model, separate_reference=False)
    with caplog.at_level(logging.INFO, logger="agilerl.llm.forward"):
        assert policy.base.row_layout == "padded"
        assert policy.base.row_layout == "padded"
    lines = [r.getMessage() for r in caplog.records if r.name == "agilerl.llm.forward.probe"]
    assert len(lines) == 1
    assert lines[0].startswith("rows of Qwen3NextModel are padded")


def test_rows_that_are_not_packed_say_why(caplog: pytest.LogCaptureFixture) -> None:
    model = make_family("llama")
    model.set_attn_implementation("eager")
    policy = random_policy(model, separate_reference=False)
    with caplog.at_level(logging.INFO, logger="agilerl.llm.forward"):
        assert policy.base.row_layout == "shared_prompts"
    (line,) = [r.getMessage() for r in caplog.records if r.name == "agilerl.llm.forward.probe"]
    assert line.startswith("rows of LlamaModel are not packed: there is no kernel")


def test_another_threads_forward_keeps_its_mask(batch: TrainBatch) -> None:
    """While a thread runs packed rows, the model's config says so to every thread."""
    model = make_family("llama", torch.float64)
    ids, mask = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    decoder = model.base_model
    with torch.no_grad(), ThreadPoolExecutor() as pool:
        expected = decoder(input_ids=ids, attention_mask=mask).last_hidden_state
        with attending_packed(decoder, PackedAttention(PackedRows.of(batch))):
            run = pool.submit(torch.no_grad()(decoder), input_ids=ids, attention_mask=mask)
            made = run.result().last_hidden_state
    torch.testing.assert_close(made[mask.bool()], expected[mask.bool()])


def test_a_retained_graph_with_recomputed_layers_runs_backward_twice(batch: TrainBatch) -> None:
    policy = random_policy(make_family("llama", torch.float64), separate_reference=False)
    loss = weighted(policy.logprobs(batch, replace(PACKED, recompute_layers=True)).logp)
    parameters = list(policy.parameters().values())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    for mine, again in zip(first, torch.autograd.grad(loss, parameters), strict=True):
        assert torch.equal(mine, again)


def test_recomputing_keeps_less_and_puts_every_layer_back(batch: TrainBatch) -> None:
    policy = random_policy(tiny_model(layers=4), separate_reference=False)
    layers = policy.base.decoder.layers
    own = layers[1].__dict__["forward"] = layers[1].forward

    def kept(recompute: bool) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy.logprobs(batch, replace(PLAIN, recompute_layers=recompute))
        return sum(sizes.values())

    assert kept(True) < 0.5 * kept(False)
    assert layers[1].__dict__["forward"] is own
    assert "forward" not in layers[0].__dict__


def test_a_model_without_layers_to_recompute_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agilerl.checks._warned", set())
    layer = torch.nn.Linear(2, 2)
    for _ in range(2):
        with recomputed_layers(layer):
            layer(torch.ones(2))
    assert caplog.text.count("gradient_checkpointing has no effect on this Linear") == 1


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_the_probe_goes_beyond_a_long_window(family: str) -> None:
    assert random_policy(make_family(family)).base.row_layout == "packed"
    model = without_window_when_cached(make_family(family))
    model.set_attn_implementation("eager")
    assert random_policy(model).base.row_layout == "padded"
    assert model.config.sliding_window == LONG_WINDOW
