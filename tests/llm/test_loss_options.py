"""What is off by default in a loss: golden numbers, and properties that hold for any numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_helpers import (
    ABOUT,
    ADVANTAGES,
    GEN,
    LOGP,
    MASK,
    OLD,
    REF,
    batches,
    config,
    evaluate,
    rows,
)
from update_helpers import Objective

from agilerl.distributed import Ranks
from agilerl.llm.config import ImportanceCorrection
from agilerl.llm.losses import (
    policy_loss,
    quantile_over_ranks,
    reduction_counts,
    reduction_weights,
    sampler_correction,
    top_entropy_mask,
)

MODES: tuple[ImportanceCorrection, ...] = (
    "token_truncate",
    "token_mask",
    "geometric_mask",
    "sequence_truncate",
    "sequence_mask",
)
CISPO_6 = config("cispo", clip_band=(0.0, 6.0))
GRPO_TOKEN = config(reduction="token")


@dataclass(frozen=True)
class Golden:
    settings: Objective
    value: float
    gen: torch.Tensor | None = GEN


def corrected(base: Objective, mode: str, floor: float | None, cap: float) -> Objective:
    bounds = {"importance_floor": floor, "importance_weight_cap": cap}
    return replace(base, importance_correction=mode, **bounds)


GOLDEN = {
    "token_truncate": Golden(corrected(CISPO_6, "token_truncate", None, 2.0), -0.49030451),
    "token_mask": Golden(corrected(CISPO_6, "token_mask", 0.5, 2.3), -0.06063451),
    "geometric_mask": Golden(corrected(CISPO_6, "geometric_mask", 0.9, 1.4), 0.69942893),
    "sequence_truncate": Golden(corrected(GRPO_TOKEN, "sequence_truncate", None, 2.3), 1.88058379),
    "sequence_mask": Golden(corrected(GRPO_TOKEN, "sequence_mask", None, 2.3), 3.05717137),
    "dual_clip": Golden(replace(GRPO_TOKEN, dual_clip=3.0), 0.25218633, None),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_numbers(name: str) -> None:
    golden = GOLDEN[name]
    terms, _ = evaluate(golden.settings, sampling_logp=golden.gen)
    assert terms.loss.item() == pytest.approx(golden.value, **ABOUT)


@pytest.mark.parametrize("old", [None, OLD, torch.full_like(OLD, math.nan)])
def test_a_ratio_against_the_sampler_is_tinkers(old: torch.Tensor | None) -> None:
    """Whatever the old log-probs are: they are not read, and nothing is corrected."""
    tinker = config("cispo", clip_band=(0.0, 4.0), reduction="sum", importance_anchor="sampler")
    terms, gradient = evaluate(tinker, old_logp=old, sampling_logp=GEN)
    assert terms.loss.item() == pytest.approx(-1.71935862, **ABOUT)
    expected = rows([-1.16183424, -1.0512711, -0.90483742], [4.0, 2.01375271])
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=6e-9)
    # Means over the tokens are made of sums; no weights, but what is against the sampler.
    names = {"clip_fraction", "ratio_mean", "ratio_nonfinite", "sampler_kl"}
    assert (terms.sums.keys(), terms.maxima.keys()) == (names, {"ratio_max"})
    ratio = (LOGP - GEN).exp()[MASK]
    assert terms.sums["ratio_mean"].item() == pytest.approx(ratio.sum().item())
    kl = (ratio - 1 - ratio.log()).sum().item()
    assert terms.sums["sampler_kl"].item() == pytest.approx(kl)


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_token_of_which_the_sampler_reported_no_number_is_left_out(odd: float) -> None:
    for loss_type in ("grpo", "cispo"):
        base = config(loss_type, reduction="token", importance_anchor="sampler")
        _, plain = evaluate(base, sampling_logp=GEN)
        broken = GEN.clone()
        broken[0, 1] = odd
        terms, gradient = evaluate(base, sampling_logp=broken)
        plain[0, 1] = 0.0
        torch.testing.assert_close(gradient, plain)
        assert terms.sums["ratio_nonfinite"] == 1 and terms.loss.isfinite()


def by_hand(weights: list[float], mode: str, floor: float, cap: float) -> list[float]:
    """The factors of one sequence's tokens."""
    product = math.prod(weights)
    geometric = product ** (1 / len(weights))
    match mode:
        case "token_truncate":
            return [min(w, cap) for w in weights]
        case "token_mask":
            return [w if floor <= w <= cap else 0.0 for w in weights]
        case "geometric_mask":
            return weights if floor <= geometric <= cap else [0.0] * len(weights)
        case "sequence_truncate":
            return [min(product, cap)] * len(weights)
        case _:
            return [product if floor <= product <= cap else 0.0] * len(weights)


@settings(max_examples=60, deadline=None)
@given(
    batch=batches(),
    mode=st.sampled_from(MODES),
    floor=st.sampled_from([None, 0.3, 0.8]),
    cap=st.sampled_from([None, 1.1, 2.0]),
)
def test_the_gradient_is_multiplied_by_the_weights(
    batch: dict[str, torch.Tensor], mode: str, floor: float | None, cap: float | None
) -> None:
    """The policy's, not the KL's; tokens that weigh nothing stay in the denominator."""
    mask, log_weights = batch["mask"], batch["old_logp"] - batch["sampling_logp"]
    factors = torch.zeros_like(log_weights)
    for row in range(len(mask)):
        weights = log_weights[row][mask[row]].exp().tolist()
        if weights:
            high = math.inf if cap is None else cap
            factors[row, mask[row]] = torch.tensor(
                by_hand(weights, mode, floor or 0.0, high), dtype=torch.float64
            )
    base = corrected(config(reduction="token", beta=0.1), mode, floor, cap)
    _, gradient = evaluate(base, **batch)
    inputs = {**batch, "sampling_logp": None}
    _, kl = evaluate(base, **{**inputs, "advantages": torch.zeros_like(log_weights)})
    _, policy = evaluate(base, **{**inputs, "ref_logp": None})
    torch.testing.assert_close(gradient, policy * factors + kl, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_sampler_that_is_the_trainer_changes_nothing(mode: str) -> None:
    base = corrected(GRPO_TOKEN, mode, None if "truncate" in mode else 0.5, 2.0)
    terms, gradient = evaluate(base, sampling_logp=OLD)
    plain, expected = evaluate(GRPO_TOKEN)
    assert torch.equal(gradient, expected) and torch.equal(terms.loss, plain.loss)
    assert terms.sums["importance_weight_capped"] == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_weights_that_are_not_finite_count_as_zero_and_padding_does_not_count(
    mode: ImportanceCorrection, odd: float
) -> None:
    log_weights = rows([0.1, odd, 0.2], [0.1, -0.2], pad=odd)
    made = sampler_correction(log_weights, MASK, mode, 0.5, cap=2.0)
    sums, largest = made.metrics(MASK)
    assert made.factors.isfinite().all() and largest.isfinite()
    assert made.factors[1, :2].gt(0).all() and made.factors[1, 2] == 0
    spoilt = "token" not in mode  # the whole sequence
    assert made.factors[0, 1] == 0 and bool((made.factors[0, [0, 2]] == 0).all()) == spoilt
    # exp(-inf) is 0, a weight like any other.
    alike = 3 if "sequence" in mode else 1
    assert sums["importance_weight_nonfinite"] == (0 if odd == -math.inf else alike)


def test_what_is_measured_of_the_weights() -> None:
    def measured(mode: ImportanceCorrection, floor: float | None, cap: float) -> list[float]:
        made = sampler_correction(OLD - GEN, MASK, mode, floor, cap)
        sums, largest = made.metrics(MASK)
        names = ("importance_weight_mean", "importance_weight_capped")
        return [*(sums[name].item() for name in names), largest.item()]

    tokens = (OLD - GEN).exp()[MASK]
    plain = [tokens.sum().item(), tokens.max().item()]
    assert measured("token_truncate", None, 2.0) == pytest.approx([plain[0], 2, plain[1]])
    assert measured("token_mask", 0.92, 2.3) == pytest.approx([plain[0], 2, plain[1]])
    assert measured("geometric_mask", None, 1.4) == pytest.approx([plain[0], 2, plain[1]])
    products = [2.33964685, 2.22554093]
    total = 3 * products[0] + 2 * products[1]
    for mode in ("sequence_truncate", "sequence_mask"):
        assert measured(mode, None, 2.3) == pytest.approx([total, 3, products[0]])


def test_weights_of_long_sequences_stay_finite() -> None:
    """In float32 the product overflows after 900 tokens; it is above the cap all the same."""
    mask = torch.ones(2, 20_000, dtype=torch.bool)
    log_weights = torch.tensor([[0.1], [-0.1]]).expand(mask.shape)
    truncated = sampler_correction(log_weights, mask, "sequence_truncate", cap=2.0).factors
    assert (truncated[0] == 2.0).all() and (truncated[1] == 0.0).all()
    assert (sampler_correction(log_weights, mask, "sequence_mask", cap=2.0).factors == 0).all()
    bounds = {"floor": 0.95, "cap": 1.2}
    geometric = sampler_correction(log_weights, mask, "geometric_mask", **bounds).factors
    torch.testing.assert_close(geometric[0], torch.full((20_000,), math.exp(0.1)))
    assert (geometric[1] == 0).all()


def test_a_geometric_mean_bounds_no_single_weight() -> None:
    log_weights = torch.zeros(1, 100)
    log_weights[0, 3] = 6.0
    mask = torch.ones(1, 100, dtype=torch.bool)

    def largest(mode: ImportanceCorrection, cap: float) -> float:
        return sampler_correction(log_weights, mask, mode, None, cap).factors.max().item()

    assert largest("geometric_mask", 2.0) == pytest.approx(math.exp(6))
    assert largest("geometric_mask", 1.01) == 0.0
    assert largest("token_truncate", 2.0) == 2.0


@settings(max_examples=30, deadline=None)
@given(batch=batches(), bound=st.sampled_from([1.1, 1.5, 3.0]))
def test_dual_clip_bounds_the_terms_of_negative_advantages(
    batch: dict[str, torch.Tensor], bound: float
) -> None:
    inputs = {"old_logp": batch["old_logp"] - 1.0, "mask": batch["mask"]}
    inputs["advantages"] = batch["advantages"]
    base = config(reduction="sum", clip_band=(0.9, 1.1))
    _, plain = evaluate(base, batch["logp"], **inputs)
    terms, gradient = evaluate(replace(base, dual_clip=bound), batch["logp"], **inputs)
    ratio = (batch["logp"] - inputs["old_logp"]).exp()
    clipped = batch["mask"] & (batch["advantages"] < 0) & (ratio > bound)
    assert torch.equal(gradient, torch.where(clipped, 0.0, plain))
    assert terms.sums["dual_clip_fraction"] == clipped.sum()
    _, never = evaluate(replace(base, dual_clip=1e9), batch["logp"], **inputs)
    assert torch.equal(never, plain)


def test_the_entropy_bonus_is_of_all_tokens_and_not_corrected() -> None:
    entropy = rows([1.0, 2.0, 0.5], [0.1, 3.0]).requires_grad_()
    base = corrected(replace(GRPO_TOKEN, entropy_coef=0.01), "token_mask", 0.99, 1.01)
    nothing = torch.zeros_like(MASK)
    terms, gradient = evaluate(base, sampling_logp=GEN, entropy=entropy, top_entropy_mask=nothing)
    # All terms of the policy are masked: 0.01 times the mean of 1, 2, .5, .1 and 3 is left.
    assert terms.loss.item() == pytest.approx(-0.0132, **ABOUT)
    assert (gradient == 0).all()
    leaf = LOGP.clone().requires_grad_()
    weights = reduction_weights(MASK, "token")
    loss = policy_loss(leaf, ADVANTAGES, MASK, weights, base, entropy=entropy).loss
    (slope,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(slope, -0.01 * weights)


def test_tokens_of_little_entropy_leave_the_numerator_only() -> None:
    chosen = torch.tensor([[True, False, False], [False, True, False]])
    base = replace(GRPO_TOKEN, beta=0.3)
    terms, gradient = evaluate(base, ref_logp=REF, top_entropy_mask=chosen)
    _, policy = evaluate(GRPO_TOKEN)
    _, kl = evaluate(base, ref_logp=REF, advantages=torch.zeros_like(ADVANTAGES))
    torch.testing.assert_close(gradient, torch.where(chosen, policy, 0.0) + kl)
    assert terms.sums["top_entropy_share"] == 2
    # GRPO .2, token: -min(1.2214, 1.2) and max(.8, .8187), of five tokens.
    terms, _ = evaluate(GRPO_TOKEN, top_entropy_mask=chosen)
    assert terms.loss.item() == pytest.approx((-1.2 + 0.81873075) / 5, **ABOUT)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(0, 12, width=32), min_size=1, max_size=40),
    quantile=st.sampled_from([0.05, 0.2, 0.5, 0.8, 0.9, 0.99]),
)
def test_the_quantile_keeps_what_reaches_torchs(values: list[float], quantile: float) -> None:
    numbers = torch.tensor(values)
    threshold = quantile_over_ranks(numbers, quantile, Ranks())
    exact = numbers.double()
    expected = exact >= torch.quantile(exact, quantile) - 1e-12 * exact.max()
    assert torch.equal(numbers >= threshold, expected)
    assert threshold in values


def test_of_a_hundred_tokens_the_twenty_with_most_entropy_are_kept() -> None:
    numbers = torch.randperm(100, generator=torch.Generator().manual_seed(0)) / 37
    threshold = quantile_over_ranks(numbers, 0.8, Ranks())
    assert sorted(numbers[numbers >= threshold].tolist()) == sorted(numbers.tolist())[80:]
    assert quantile_over_ranks(numbers[:0], 0.8, Ranks()) == 0.0


def test_of_certain_tokens_rounding_chooses_none() -> None:
    entropy = torch.tensor([[-1e-8, 0.0, 0.7], [0.0, -1e-9, 0.0]])
    assert torch.equal(top_entropy_mask(entropy, entropy >= -1, 0.5, Ranks()), entropy >= -1)
    chosen = top_entropy_mask(entropy, MASK, 0.9, Ranks())
    assert chosen.nonzero().tolist() == [[0, 2]]
    minus_zero = -torch.zeros(3)
    assert quantile_over_ranks(minus_zero, 0.5, Ranks()) == 0.0
    # What is not trained neither counts nor is chosen.
    entropy[1, 2] = 9.0
    assert torch.equal(top_entropy_mask(entropy, MASK, 0.9, Ranks()), chosen)


def shares(mask: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Of each row in the tokens of its group."""
    tokens = mask.sum(1).double()
    total = torch.zeros_like(tokens).index_add(0, groups, tokens)
    return tokens / total[groups]


def test_prompts_weigh_the_same_and_within_them_tokens_do() -> None:
    # Of one prompt: as a mean over tokens.
    one = reduction_weights(MASK, "prompt", sequence_weights=torch.tensor([0.6, 0.4]))
    torch.testing.assert_close(one, reduction_weights(MASK, "token"))
    # Three rows of 3, 1 and 2 tokens, the first two of one prompt, the last of another.
    mask = torch.arange(3) < torch.tensor([[3], [1], [2]])
    weights = reduction_weights(
        mask, "prompt", sequence_weights=shares(mask, torch.tensor([0, 0, 1]))
    )
    expected = torch.tensor([[1 / 8] * 3, [1 / 8, 0, 0], [1 / 4, 1 / 4, 0]], dtype=torch.float64)
    torch.testing.assert_close(weights, expected)
    with pytest.raises(ValueError, match=r"loss_reduction \"prompt\" needs the share"):
        reduction_weights(mask, "prompt")


def test_a_prompt_that_is_split_counts_by_the_share_of_its_tokens() -> None:
    """A step with row 0 (three quarters of its prompt's tokens) and row 2 (all of its prompt's)."""
    mask = torch.arange(3) < torch.tensor([[3], [1], [2]])
    part = torch.tensor([0, 2])
    share = shares(mask, torch.tensor([0, 0, 1]))[part]
    assert reduction_counts(mask[part], share).tolist() == [5.0, 1.75]
    weights = reduction_weights(mask[part], "prompt", sequence_weights=share)
    assert weights.sum(1).tolist() == pytest.approx([0.75 / 1.75, 1 / 1.75])
