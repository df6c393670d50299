"""One token from logits: filters agree with transformers', frequencies with the distribution."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agilerl.llm.config import SamplingConfig
from agilerl.llm.generation.sampling import (
    _draw_by_weight,
    _draw_from_candidates,
    _most_likely,
    next_tokens,
    penalise,
)


def config(**settings: object) -> SamplingConfig:
    return SamplingConfig(
        **{
            "max_new_tokens": 4,
            "max_model_len": 64,
            "eos_token_ids": (1,),
            "pad_token_id": 0,
            **settings,
        }
    )


def drawn_distribution(
    logits: torch.Tensor, sampling: SamplingConfig, points: int = 20_000
) -> torch.Tensor:
    """The distribution drawn from one row of logits, by uniforms on a regular grid."""
    uniforms = (torch.arange(points) + 0.5) / points
    tokens = next_tokens(logits.expand(points, -1).clone(), uniforms, sampling).tokens
    return torch.bincount(tokens, minlength=logits.numel()).double() / points


def reference_distribution(logits: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers(None, logits[None].clone())[0].double().softmax(-1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 2.5},
        {"top_k": 5},
        {"top_k": 1},
        {"top_k": 10_000},
        {"top_p": 0.8},
        {"top_p": 0.01},
        {"min_p": 0.1},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.95},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("vocab", [3, 128, 300, 700])
def test_draws_follow_the_filtered_distribution(settings: dict[str, float], vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    sampling = config(**settings)
    drawn, expected = drawn_distribution(logits, sampling), reference_distribution(logits, sampling)
    assert (drawn - expected).abs().max() < 2e-4
    assert not drawn[expected == 0].any()


def test_flat_distribution_needs_more_candidates_than_the_first_few() -> None:
    logits = torch.zeros(5000)
    drawn = drawn_distribution(logits, config(top_p=0.9), points=5000)
    assert (drawn > 0).sum() > 3500


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.9, "min_p": 1e-3}]
)
def test_a_flat_row_costs_the_others_nothing(
    settings: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its own candidates are looked for again, and every token is the one drawn alone."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 20_000, generator=rng) * 8
    logits[5] = 0.0
    logits[9] *= 0.02
    uniforms, sampling = torch.rand(64, generator=rng), config(**settings)
    alone = [
        next_tokens(row[None].clone(), uniform[None], sampling).tokens
        for row, uniform in zip(logits, uniforms, strict=True)
    ]
    searched: list[tuple[int, int]] = []
    topk = torch.Tensor.topk

    def recording(self: torch.Tensor, k: int, dim: int) -> object:
        searched.append((len(self), k))
        return topk(self, k, dim=dim)

    monkeypatch.setattr(torch.Tensor, "topk", recording)
    together = next_tokens(logits.clone(), uniforms, sampling).tokens
    assert torch.equal(together, torch.cat(alone))
    assert searched == [(64, 512)]
    by_weight = [
        int(_draw_by_weight((logits[i] - logits[i].amax()).exp(), uniforms[i], sampling))
        for i in (5, 9)
    ]
    assert together[[5, 9]].tolist() == by_weight


@pytest.mark.parametrize(
    "settings",
    [{"top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.5, "min_p": 0.3}, {"top_p": 0.97, "min_p": 0.01}],
)
@pytest.mark.parametrize("spread", [0.001, 0.5, 4.0])
def test_drawn_by_weight_a_token_is_the_one_of_all_candidates(
    settings: dict[str, float], spread: float
) -> None:
    rng = torch.Generator().manual_seed(1)
    weights = (torch.randn(30_000, generator=rng) * spread).double()
    weights = (weights - weights.max()).exp()
    weights[7] = 0.0
    uniforms = torch.cat([torch.rand(40, generator=rng), torch.tensor([0.0, 1.0 - 2**-24])])
    values, indices = weights.float()[None].sort(descending=True, stable=True)
    values = values.double()
    sampling, same = config(**settings), 0
    for uniform in uniforms:
        drawn = _draw_by_weight(weights.float(), uniform, sampling)
        expected = _draw_from_candidates(indices, values / values.sum(), uniform[None], sampling)
        assert weights[drawn] > 0
        same += int(drawn) == int(expected)
    assert same == len(uniforms)


@pytest.mark.parametrize(("vocab", "top_p"), [(1024, 0.75), (2048, 0.5)])
def test_a_nucleus_that_meets_its_mass_exactly_ends_there(vocab: int, top_p: float) -> None:
    almost_one = torch.tensor([1.0 - 2**-24])
    drawn = next_tokens(torch.zeros(1, vocab), almost_one, config(top_p=top_p))
    assert drawn.tokens.tolist() == [vocab * top_p - 1]


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}])
@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-24])
def test_the_ends_of_the_unit_interval_never_hit_an_impossible_token(
    settings: dict[str, float], uniform: float
) -> None:
    logits = torch.full((4, 300), -torch.inf)
    logits[:, 130:133] = torch.tensor([0.0, 1.0, -1.0])
    tokens = next_tokens(logits, torch.full((4,), uniform), config(**settings)).tokens
    assert ((tokens >= 130) & (tokens < 133)).all()


def test_greedy_takes_the_most_likely_whatever_the_filters() -> None:
    logits = torch.randn(6, 40)
    best = logits.argmax(-1)
    greedy = next_tokens(logits.clone(), torch.rand(6), config(greedy=True, top_k=3))
    assert torch.equal(greedy.tokens, best)


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits, ids = torch.randn(2, 20), torch.tensor([[3, 4, 4], [5, 6, 7]])
    ours = penalise(logits.clone(), ids, 0, config(repetition_penalty=1.4))
    torch.testing.assert_close(ours, RepetitionPenaltyLogitsProcessor(1.4)(ids, logits.clone()))


def test_no_end_of_sequence_before_the_least_length() -> None:
    sampling = config(min_new_tokens=2, eos_token_ids=(1, 3))
    for generated, forbidden in [(0, True), (1, True), (2, False)]:
        logits = penalise(torch.zeros(1, 5), None, generated, sampling)
        assert bool(torch.isinf(logits[0, [1, 3]]).all()) is forbidden


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 5}, {"top_p": 0.9}, {"greedy": True}, {"temperature": 0.5}]
)
def test_the_largest_logit_tells_rows_that_are_not_finite(settings: dict[str, object]) -> None:
    logits = torch.randn(4, 300)
    logits[1, 7], logits[2, 280], logits[3, 4] = torch.nan, torch.inf, -torch.inf
    largest = next_tokens(logits.clone(), torch.rand(4), config(**settings)).largest
    assert (largest < torch.inf).tolist() == [True, False, False, True]
    assert torch.equal(largest[[0, 3]], logits[[0, 3]].amax(1))


@pytest.mark.parametrize("vocab", [20_000, 20_031])
@pytest.mark.parametrize("count", [1, 50, 128])
def test_the_most_likely_are_those_of_torch(vocab: int, count: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0))
    logits[1, -3:], logits[2, :count] = 9.0, 8.0
    values, tokens = _most_likely(logits, count)
    assert torch.equal(values, logits.topk(count, dim=1).values)
    assert torch.equal(logits.gather(1, tokens), values)
    assert all(len(set(row)) == count for row in tokens.tolist())
