"""Tiled log-probs against the plain formula, in value, gradient and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from agilerl.llm import logprobs
from agilerl.llm.causal_lm import LogitHead, find_head
from agilerl.llm.logprobs import TokenLogProbs, token_logprobs
from agilerl.llm.policy import Policy
from agilerl.llm.shared_base import SharedBase
from agilerl.testing import tiny_model

V, D = 53, 12
TILE_COLUMNS = (1, 7, 20, 1024)


@contextmanager
def tile_columns(columns: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(logprobs.TILE_COLUMNS, "cpu", columns)
        yield


def frozen_head(
    *,
    vocab: int = V,
    bias: bool = False,
    scale: float = 1.0,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> LogitHead:
    rng = torch.Generator().manual_seed(1)
    module = nn.Linear(D, vocab, bias=bias, dtype=dtype).requires_grad_(False)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=rng))
    return LogitHead(module, module.weight, module.bias if bias else None, scale, softcap, vocab)


def as_trained(head: LogitHead) -> LogitHead:
    """The same head on the path of trained heads, which recomputes."""
    return LogitHead(head.module, None, None, head.scale, head.softcap, head.vocab_size)


def inputs(rows: int, seed: int = 0, vocab: int = V) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, D, generator=rng, dtype=torch.float64)
    return hidden, torch.randint(vocab, (rows,), generator=rng)


def plain(
    hidden: torch.Tensor, targets: torch.Tensor, head: LogitHead, temperature: float
) -> TokenLogProbs:
    logits = head.module(hidden) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    logp = log_p.gather(1, targets[:, None]).squeeze(1)
    return TokenLogProbs(logp, -(log_p.exp() * log_p).sum(-1))


def value_and_gradients(
    result: TokenLogProbs, leaves: list[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    weights = torch.linspace(-1, 2, len(result.logp), dtype=result.logp.dtype)
    grads = torch.autograd.grad((result.logp * weights).sum(), leaves, retain_graph=True)
    return result.logp.detach(), list(grads)


def assert_same(mine: TokenLogProbs, theirs: TokenLogProbs, leaves: list[torch.Tensor]) -> None:
    value, grads = value_and_gradients(mine, leaves)
    expected, expected_grads = value_and_gradients(theirs, leaves)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    entropies = mine.entropy.detach(), theirs.entropy.detach()
    torch.testing.assert_close(*entropies, rtol=1e-10, atol=1e-10)
    for gradient, reference in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    tile_rows=st.sampled_from([None, 1, 2, 3, 5, 9, 100]),
    columns=st.sampled_from(TILE_COLUMNS),
    temperature=st.sampled_from([0.3, 0.9, 1.0, 2.5]),
    bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    trained=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_tiled_equals_plain(
    rows: int,
    tile_rows: int | None,
    columns: int,
    temperature: float,
    bias: bool,
    scale: float,
    softcap: float | None,
    trained: bool,
    seed: int,
) -> None:
    head = frozen_head(bias=bias, scale=scale, softcap=softcap)
    hidden, targets = inputs(rows, seed)
    hidden.requires_grad_()
    path = as_trained(head) if trained else head
    with tile_columns(columns):
        mine = token_logprobs(hidden, targets, path, temperature=temperature, tile_rows=tile_rows)
    assert_same(mine, plain(hidden, targets, head, temperature), [hidden])


@settings(max_examples=60, deadline=None)
@given(
    tile_rows=st.sampled_from([None, 1, 2, 5, 100]),
    columns=st.sampled_from(TILE_COLUMNS),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    softcap=st.sampled_from([None, 2.0]),
    trained=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_gradient_of_the_entropy_is_that_of_the_plain_formula(
    tile_rows: int | None,
    columns: int,
    temperature: float,
    bias: bool,
    scale: float,
    softcap: float | None,
    trained: bool,
    seed: int,
) -> None:
    head = frozen_head(bias=bias, scale=scale, softcap=softcap)
    hidden, targets = inputs(7, seed)
    hidden.requires_grad_()
    path = as_trained(head) if trained else head
    settings: dict[str, Any] = {"temperature": temperature, "tile_rows": tile_rows}
    with tile_columns(columns):
        mine = token_logprobs(hidden, targets, path, entropy_gradient=True, **settings)
        without = token_logprobs(hidden, targets, path, **settings)
    theirs = plain(hidden, targets, head, temperature)
    assert_same(mine, theirs, [hidden])  # of the log-probs alone it is as before
    found, expected = (both_gradients(made, hidden) for made in (mine, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert not without.entropy.requires_grad and torch.equal(without.entropy, mine.entropy)


def both_gradients(made: TokenLogProbs, hidden: torch.Tensor) -> torch.Tensor:
    rows = torch.linspace(-1, 2, len(made.logp), dtype=made.logp.dtype)
    loss = (made.logp * rows).sum() + (made.entropy * rows.flip(0)).sum()
    return torch.autograd.grad(loss, hidden)[0]


@pytest.mark.parametrize("trained", [False, True])
def test_without_gradients_the_values_are_the_same(trained: bool) -> None:
    head = frozen_head(bias=True, scale=0.5, softcap=5.0)
    hidden, targets = inputs(7)
    with torch.no_grad():
        path = as_trained(head) if trained else head
        mine = token_logprobs(hidden, targets, path, temperature=0.7, tile_rows=3)
        expected = plain(hidden, targets, head, 0.7)
    torch.testing.assert_close(mine.logp, expected.logp, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mine.entropy, expected.entropy, rtol=1e-10, atol=1e-10)
    assert not mine.logp.requires_grad


@pytest.mark.parametrize("trained", [False, True])
def test_no_rows_are_fine(trained: bool) -> None:
    head = frozen_head()
    hidden, targets = inputs(0)
    hidden.requires_grad_()
    result = token_logprobs(hidden, targets, as_trained(head) if trained else head)
    result.logp.sum().backward()
    assert result.logp.shape == result.entropy.shape == (0,)


def test_huge_logits_do_not_overflow() -> None:
    head = frozen_head(scale=1e4, dtype=torch.float32)
    hidden, targets = inputs(6)
    hidden = hidden.float().requires_grad_()
    result = token_logprobs(hidden, targets, head, tile_rows=4)
    result.logp.sum().backward()
    assert result.logp.isfinite().all()
    assert result.entropy.isfinite().all()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("trained", [False, True])
def test_bfloat16_is_close_and_reduces_in_float32(trained: bool) -> None:
    head = frozen_head(dtype=torch.bfloat16)
    path = as_trained(head) if trained else head
    hidden, targets = inputs(32)
    low = (0.3 * hidden).bfloat16().requires_grad_()
    result = token_logprobs(low, targets, path, tile_rows=5)
    exact = frozen_head()
    assert exact.weight is not None
    assert head.weight is not None
    exact.weight.copy_(head.weight)
    high = low.detach().double().requires_grad_()
    expected = plain(high, targets, exact, 1.0)
    assert result.logp.dtype == torch.float32
    torch.testing.assert_close(result.logp.double(), expected.logp, rtol=0.02, atol=0.02)
    result.logp.sum().backward()
    expected.logp.sum().backward()
    assert low.grad is not None
    assert high.grad is not None
    difference = (low.grad.double() - high.grad).norm() / high.grad.norm()
    assert difference < 0.02
    assert token_logprobs(low, targets, path, fp32=False).logp.dtype == torch.bfloat16


def test_a_flat_softmax_over_many_tokens_stays_within_float16() -> None:
    vocab = 32768
    head = frozen_head(vocab=vocab, dtype=torch.float16)
    assert head.weight is not None
    head.weight[:, 0] = 6.0
    hidden = torch.full((3, D), 1e-3, dtype=torch.float16, requires_grad=True)
    made = token_logprobs(hidden, torch.arange(3), head, tiled_for="cuda")
    made.logp.sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


class LargestTensor(TorchDispatchMode):
    """Records the largest number of rows of any tensor whose last axis is the vocabulary."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and self.vocab in tensor.shape:
                self.rows = max(self.rows, tensor.numel() // self.vocab)
        return out


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_tile_is_the_largest_logits_ever(
    trained: bool, softcap: float | None, entropy_gradient: bool
) -> None:
    vocab, tile_rows = 997, 16
    head = frozen_head(vocab=vocab, softcap=softcap)
    hidden, targets = inputs(41, vocab=vocab)
    hidden.requires_grad_()
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with (
        LargestTensor(vocab) as largest,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        path = as_trained(head) if trained else head
        result = token_logprobs(
            hidden, targets, path, tile_rows=tile_rows, entropy_gradient=entropy_gradient
        )
        assert max(saved) <= hidden.numel()  # nothing the size of logits waits for backward
        if not trained:  # the gradients of the hidden states, and nothing more where it is off
            assert len(saved) == 1 + entropy_gradient
        (result.logp + result.entropy * entropy_gradient).sum().backward()
    assert largest.rows == tile_rows  # the head's own weight has D < tile_rows rows of this size


class Operations(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trained", [True, False])
def test_entropies_are_only_computed_when_asked_for(trained: bool) -> None:
    hidden, targets = inputs(7)
    head = as_trained(frozen_head()) if trained else frozen_head()
    counts = []
    for entropy in (True, False):
        with torch.no_grad(), Operations() as operations:
            made = token_logprobs(hidden, targets, head, entropy=entropy)
        assert (made.entropy > 0).all() == entropy
        counts.append(len(operations.names))
    assert counts[1] < counts[0]


class TestModelHeads:
    """The head as it is found in a model with adapters on it."""

    @pytest.fixture(params=[True, False], ids=["tied", "untied"])
    def tied(self, request: pytest.FixtureRequest) -> bool:
        return bool(request.param)

    def test_a_frozen_head_takes_the_fast_path(self, tied: bool) -> None:
        model = tiny_model(tie_word_embeddings=tied).double().requires_grad_(False)
        head = find_head(model)
        assert head.weight is model.lm_head.weight
        rng = torch.Generator().manual_seed(0)
        hidden = torch.randn(5, 64, generator=rng, dtype=torch.float64, requires_grad=True)
        targets = torch.randint(260, (5,), generator=rng)
        mine = token_logprobs(hidden, targets, head, temperature=0.9, tile_rows=2)
        assert_same(mine, plain(hidden, targets, head, 0.9), [hidden])

    @pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
    def test_lora_on_the_head_is_trained_exactly(self, tied: bool) -> None:
        model = tiny_model(tie_word_embeddings=tied).double()
        base = SharedBase.of(model)
        lora = LoraConfig(r=3, target_modules=["q_proj", "lm_head"])
        policy = Policy(base, dict.fromkeys(("actor", "reference"), lora), seed=0)
        rng = torch.Generator().manual_seed(0)
        for parameter in policy.parameters().values():
            parameter.data = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        head = policy.head()
        assert head.weight is None
        hidden = torch.randn(5, 64, generator=rng, dtype=torch.float64, requires_grad=True)
        targets = torch.randint(260, (5,), generator=rng)
        factors = [p for n, p in policy.parameters().items() if n.startswith("lm_head")]
        assert len(factors) == 2
        for tile_rows in (1, 2, 100):
            mine = token_logprobs(hidden, targets, head, temperature=0.9, tile_rows=tile_rows)
            assert_same(mine, plain(hidden, targets, head, 0.9), [hidden, *factors])
        mine = token_logprobs(hidden, targets, head, tile_rows=2, entropy_gradient=True)
        made = (mine.entropy, plain(hidden, targets, head, 1.0).entropy)
        found, expected = (
            torch.autograd.grad(entropy.square().sum(), [hidden, *factors]) for entropy in made
        )
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        policy.release()
