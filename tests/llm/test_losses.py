"""The objectives against golden numbers, and the properties that must hold for any numbers."""

from __future__ import annotations

import itertools
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

from agilerl.llm.config import Reduction
from agilerl.llm.losses import (
    LOSS_TABLE,
    clip_band,
    k3,
    policy_loss,
    pooled_log_ratio,
    reduction_weights,
)

LEVELS = ("token", "turn", "trajectory")
REDUCTIONS = ("sequence", "token", "constant", "sum")
COMBINATIONS = list(itertools.product(LOSS_TABLE, LEVELS, REDUCTIONS))


@dataclass(frozen=True)
class Golden:
    settings: Objective
    value: float
    gradient: list[list[float]] | None = None
    old: torch.Tensor = OLD
    gen: torch.Tensor | None = None
    advantages: torch.Tensor = ADVANTAGES


GSPO_BAND = (1 - 3e-4, 1 + 4e-4)
CISPO_6 = config("cispo", clip_band=(0.0, 6.0))
GOLDEN = {
    "cispo (0,6)": Golden(
        CISPO_6,
        -0.53446402,
        [[-0.24428055, -0.19024588, -0.08131393], [1.2, 0.16374615, 0.0]],
    ),
    "cispo (0,6) x w": Golden(replace(CISPO_6, importance_weight_cap=None), -0.54393516, gen=GEN),
    "cispo (0,6) x min(w,2)": Golden(
        replace(CISPO_6, importance_weight_cap=2.0), -0.49030451, gen=GEN
    ),
    "cispo (0,5)": Golden(config("cispo", clip_band=(0.0, 5.0)), -0.39446402),
    "cispo .2": Golden(config("cispo"), 0.29062756),
    "cispo (0,6) sequence": Golden(replace(CISPO_6, reduction="sequence"), -0.87725976),
    "tinker": Golden(
        config("cispo", clip_band=(0.0, 4.0), reduction="sum"),
        -1.71935862,
        [[-1.16183424, -1.0512711, -0.90483742], [4.0, 2.01375271, 0.0]],
        old=GEN,
    ),
    "gspo": Golden(
        config("gspo", clip_band=GSPO_BAND),
        0.72337007,
        [[-0.12980013] * 3, [0.55638523, 0.55638523, 0.0]],
    ),
    "gspo, A flipped": Golden(
        config("gspo", clip_band=GSPO_BAND), -0.00035, [[0.0] * 3] * 2, advantages=-ADVANTAGES
    ),
    "grpo .2 token": Golden(config(reduction="token"), 0.86211583),
    "grpo .2 sequence": Golden(config(), 1.29079471),
    "grpo .2 constant": Golden(config(reduction="constant", max_output_tokens=4), 0.53882239),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_numbers(name: str) -> None:
    golden = GOLDEN[name]
    terms, gradient = evaluate(
        golden.settings,
        old_logp=golden.old,
        sampling_logp=golden.gen,
        advantages=golden.advantages,
    )
    assert terms.loss.item() == pytest.approx(golden.value, **ABOUT)
    assert terms.per_row.sum().item() == pytest.approx(golden.value, **ABOUT)
    if golden.gradient is not None:
        expected = torch.tensor(golden.gradient, dtype=torch.float64)
        torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=6e-9)


@pytest.mark.parametrize("name", GOLDEN)
def test_gradient_is_the_slope_of_the_surrogate(name: str) -> None:
    """Finite differences; for CISPO with its weight held fixed, as the stop-gradient says."""
    golden = GOLDEN[name]
    inputs = {"sampling_logp": golden.gen, "advantages": golden.advantages}
    _, gradient = evaluate(golden.settings, old_logp=golden.old, **inputs)
    step = 1e-6
    if golden.settings.loss_type == "cispo":
        weights = reduction_weights(MASK, golden.settings.reduction)
        clamped = (LOGP - golden.old).exp().clamp(*golden.settings.clip_band)
        if golden.gen is not None:
            cap = golden.settings.importance_weight_cap or math.inf
            clamped = clamped * (golden.old - golden.gen).exp().clamp(max=cap)
        expected = -clamped * golden.advantages * weights
    else:
        expected = torch.zeros_like(LOGP)
        for place in MASK.nonzero().tolist():
            shift = torch.zeros_like(LOGP)
            shift[tuple(place)] = step
            up, _ = evaluate(golden.settings, LOGP + shift, old_logp=golden.old, **inputs)
            down, _ = evaluate(golden.settings, LOGP - shift, old_logp=golden.old, **inputs)
            expected[tuple(place)] = (up.loss - down.loss) / (2 * step)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def test_golden_ratios() -> None:
    token = pooled_log_ratio(LOGP - OLD, MASK, "token").exp()[MASK]
    expected = [1.22140276, 0.95122942, 0.40656966, 6.04964746, 0.81873075]
    assert token.tolist() == pytest.approx(expected, **ABOUT)
    pooled = pooled_log_ratio(LOGP - OLD, MASK, "trajectory").exp()[MASK]
    assert pooled.tolist() == pytest.approx([0.77880078] * 3 + [2.22554093] * 2, **ABOUT)
    for loss_type, ratio in (("grpo", token), ("gspo", pooled)):
        terms, _ = evaluate(config(loss_type))
        assert terms.sums["ratio_mean"].item() == pytest.approx(ratio.sum().item())
        assert terms.maxima["ratio_max"].item() == pytest.approx(ratio.max().item())


def test_golden_k3_and_its_slope() -> None:
    zero = torch.zeros_like(ADVANTAGES)
    settings = config(reduction="token", beta=1.0)
    terms, gradient = evaluate(settings, advantages=zero, ref_logp=REF)
    assert terms.loss.item() == pytest.approx(0.04449635, **ABOUT)
    # d k3 / d logp = 1 - exp(ref - logp); swapped arguments would give exp(logp - ref) - 1.
    expected = torch.where(MASK, (1 - (REF - LOGP).exp()) / 5, 0.0)
    torch.testing.assert_close(gradient, expected)


def test_k3_is_an_unbiased_estimate_of_the_kl_from_policy_to_reference() -> None:
    policy = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).log()
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    expected = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * k3(policy, reference)).sum(), expected)


def test_kl_penalty_is_added_to_the_policy_term_and_not_corrected() -> None:
    settings = config(reduction="token", beta=0.3, importance_weight_cap=2.0)
    with_kl, gradient = evaluate(settings, ref_logp=REF, sampling_logp=GEN)
    without, policy_gradient = evaluate(settings, sampling_logp=GEN)
    kl, kl_gradient = evaluate(settings, ref_logp=REF, advantages=torch.zeros_like(ADVANTAGES))
    torch.testing.assert_close(with_kl.loss, without.loss + kl.loss)
    torch.testing.assert_close(gradient, policy_gradient + kl_gradient)


def test_kl_shaping_moves_the_kl_into_the_advantages() -> None:
    beta = 0.3
    shaped, gradient = evaluate(config(beta=beta, kl_shaping=True), ref_logp=REF)
    kl = torch.where(MASK, k3(LOGP, REF), 0.0)
    by_hand = ADVANTAGES + beta * (kl.sum(1, keepdim=True) / MASK.sum(1, keepdim=True) - kl)
    expected, expected_gradient = evaluate(config(), advantages=by_hand)
    torch.testing.assert_close(shaped.loss, expected.loss)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize(("loss_type", "level", "reduction"), COMBINATIONS)
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_masked_positions_never_contribute(
    loss_type: str, level: str, reduction: Reduction, poison: float
) -> None:
    settings = config(
        loss_type,
        ratio_level=level,
        reduction=reduction,
        beta=0.1,
        importance_weight_cap=2.0,
        max_output_tokens=4,
    )
    inputs = {
        "advantages": ADVANTAGES,
        "old_logp": OLD,
        "ref_logp": REF,
        "sampling_logp": GEN,
    }
    turns = torch.where(MASK, torch.tensor([[0, 0, 1], [0, 1, 0]]), -1)
    clean, gradient = evaluate(settings, turn_ids=turns, **inputs)
    poisoned = {name: torch.where(MASK, tensor, poison) for name, tensor in inputs.items()}
    terms, poisoned_gradient = evaluate(
        settings, torch.where(MASK, LOGP, poison), turn_ids=turns, **poisoned
    )
    assert torch.equal(terms.loss, clean.loss)
    assert torch.equal(terms.per_row, clean.per_row)
    assert torch.equal(poisoned_gradient, gradient)
    assert poisoned_gradient[~MASK].tolist() == [0.0]
    assert gradient[MASK].ne(0).any()


@settings(max_examples=25, deadline=None)
@given(batch=batches(), combination=st.sampled_from([(t, r) for t, _, r in COMBINATIONS]))
def test_one_turn_is_the_trajectory_and_one_token_turns_are_tokens(
    batch: dict[str, torch.Tensor], combination: tuple[str, Reduction]
) -> None:
    loss_type, reduction = combination
    base = config(loss_type, reduction=reduction, beta=0.1, max_output_tokens=9)
    mask = batch["mask"]
    one_turn = torch.where(mask, 0, -1)
    each_its_own = torch.where(mask, mask.cumsum(1) - 1, -1)
    for turns, level in ((one_turn, "trajectory"), (each_its_own, "token")):
        by_turn = evaluate(replace(base, ratio_level="turn"), turn_ids=turns, **batch)
        plain = evaluate(replace(base, ratio_level=level), **batch)
        torch.testing.assert_close(by_turn[0].loss, plain[0].loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(by_turn[1], plain[1], rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(batch=batches(), combination=st.sampled_from(COMBINATIONS), padding=st.integers(0, 3))
def test_gradient_depends_neither_on_micro_batches_nor_on_padding_nor_on_row_order(
    batch: dict[str, torch.Tensor], combination: tuple[str, str, Reduction], padding: int
) -> None:
    loss_type, level, reduction = combination
    options = {"ratio_level": level, "reduction": reduction, "max_output_tokens": 9}
    base = config(loss_type, beta=0.1, importance_weight_cap=2.0, **options)
    turns = torch.arange(batch["mask"].shape[1]).expand_as(batch["mask"]) // 2
    batch = {**batch, "turn_ids": turns}
    whole, gradient = evaluate(base, **batch)

    order = torch.randperm(len(turns), generator=torch.Generator().manual_seed(padding))
    other = {n: torch.nn.functional.pad(t[order], (0, padding)) for n, t in batch.items()}
    weights = reduction_weights(other["mask"], reduction, 9)
    total = torch.zeros_like(gradient)
    values = torch.zeros(len(turns), dtype=torch.float64)
    for i, row in enumerate(order.tolist()):
        leaf = other["logp"][i : i + 1].clone().requires_grad_()
        inputs = {n: t[i : i + 1] for n, t in other.items() if n != "logp"}
        terms = policy_loss(leaf, weights=weights[i : i + 1], config=base, **inputs)
        (part,) = torch.autograd.grad(terms.loss, leaf)
        total[row], values[row] = part[0, : gradient.shape[1]], terms.per_row[0]
    torch.testing.assert_close(total, gradient, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(values, whole.per_row, rtol=1e-10, atol=1e-14)


@settings(max_examples=25, deadline=None)
@given(batch=batches())
def test_weights_of_means_sum_to_one_and_those_of_sums_count(
    batch: dict[str, torch.Tensor],
) -> None:
    mask = batch["mask"]
    rows_with_tokens = int(mask.any(1).sum())
    for reduction in ("sequence", "token"):
        assert reduction_weights(mask, reduction).sum().item() == pytest.approx(1.0)
    assert reduction_weights(mask, "sum").sum().item() == mask.sum()
    constant = reduction_weights(mask, "constant", 8).sum().item()
    assert constant == pytest.approx(mask.sum().item() / (rows_with_tokens * 8))
    assert (reduction_weights(mask, "sequence")[~mask] == 0).all()


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_that_of_reinforce() -> None:
    for loss_type in LOSS_TABLE:
        settings = config(loss_type, reduction="token")
        terms, gradient = evaluate(settings, old_logp=None)
        assert terms.sums["ratio_mean"] == MASK.sum()
        assert terms.maxima["ratio_max"] == 1
        torch.testing.assert_close(gradient, -ADVANTAGES * MASK / 5)


def test_importance_weights_are_capped_and_not_finite_ones_count_as_zero() -> None:
    gen = OLD - rows([0.0, math.log(3.0), 0.0], [0.0, 0.0])
    gen[0, 2], gen[1, 0], gen[1, 1] = -math.inf, math.nan, math.inf
    settings = config("cispo", clip_band=(0.0, 9.0), reduction="sum", importance_weight_cap=2.0)
    terms, gradient = evaluate(settings, sampling_logp=gen)
    ratio = (LOGP - OLD).exp()
    expected = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(gradient, -expected * ratio * ADVANTAGES * MASK)
    # As measured, before the cap.
    assert terms.maxima["importance_weight_max"].item() == pytest.approx(3.0)


def test_the_divergence_of_the_sampler_is_k3_of_its_samples() -> None:
    mask = torch.tensor([[True, True, True, False]])
    sampler = torch.tensor([[-1.0, -2.0, -0.5, -1.0]], dtype=torch.float64)
    trainer = torch.tensor([[-1.5, -1.5, -0.5, -9.0]], dtype=torch.float64)
    # w - log w - 1 for w = e^-0.5, e^0.5 and 1: 0.10653066 + 0.14872127 + 0.
    settings = config("cispo", reduction="sum", importance_weight_cap=1.1)

    def measured(sampling_logp: torch.Tensor) -> float:
        given = {"advantages": mask.double(), "mask": mask, "old_logp": trainer}
        terms, _ = evaluate(settings, trainer, **given, sampling_logp=sampling_logp)
        return terms.sums["sampler_kl"].item()

    assert measured(sampler) == pytest.approx(0.25525193, abs=1e-8)
    assert measured(trainer) == 0.0
    for odd in (math.inf, -math.inf, math.nan, -1000.0):
        broken = sampler.clone()
        broken[0, 0] = odd
        assert measured(broken) == pytest.approx(0.14872127, abs=1e-8)
    # Differences of float32's rounding are not lost in 1 + x, nor below 0.
    close = sampler + torch.tensor([1e-4, -1e-4, 0.0, 0.0])
    as_float32 = k3(sampler.float(), close.float()).sum()
    assert as_float32.item() == pytest.approx(1e-8, rel=1e-2)


def test_importance_weights_carry_no_gradient() -> None:
    settings = config("cispo", reduction="sum", importance_weight_cap=2.0)
    leaf = LOGP.clone().requires_grad_()
    terms = policy_loss(
        leaf, ADVANTAGES, MASK, reduction_weights(MASK, "sum"), settings, sampling_logp=GEN
    )
    (gradient,) = torch.autograd.grad(terms.loss, leaf)
    weight = (LOGP - GEN).exp().clamp(max=2.0)
    torch.testing.assert_close(gradient, -weight * ADVANTAGES * MASK)


def test_long_sequences_neither_explode_nor_vanish_at_trajectory_level() -> None:
    mask = torch.ones(1, 20_000, dtype=torch.bool)
    pooled = pooled_log_ratio(torch.full((1, 20_000), 0.1), mask, "trajectory")
    torch.testing.assert_close(pooled.exp(), torch.full((1, 20_000), math.exp(0.1)))


@pytest.mark.parametrize(
    ("clip_coef", "band"), [(0.2, (0.8, 1.2)), (1.0, (0.0, 2.0)), ((0.0, 5.0), (0.0, 5.0))]
)
def test_clip_band(clip_coef: float | tuple[float, float], band: tuple[float, float]) -> None:
    assert clip_band(clip_coef) == pytest.approx(band)


@pytest.mark.parametrize("clip_coef", [0.0, -0.2, 1.5, (1.0, 0.5), (-1.0, 2.0), (1.0, 1.0)])
def test_bad_clip_bands_are_refused(clip_coef: float | tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="clip_coef"):
        clip_band(clip_coef)


@pytest.mark.parametrize("band", [(0.0, 1.0), (1.0, 5.0), (0.8, 1.28)])
def test_a_clip_band_may_end_at_1(band: tuple[float, float]) -> None:
    assert clip_band(band) == band


def test_a_pair_of_epsilons_is_no_clip_band() -> None:
    with pytest.raises(ValueError, match=r"\(0.2, 0.28\).*contain 1.*pass \(0.8, 1.28\)"):
        clip_band((0.2, 0.28))
    with pytest.raises(ValueError, match=r"\(1.5, 3.0\).*contain 1$"):
        clip_band((1.5, 3.0))


def test_settings_that_need_another_input_say_so() -> None:
    with pytest.raises(ValueError, match="turn_ids"):
        evaluate(config(ratio_level="turn"))
    with pytest.raises(ValueError, match="max_output_tokens"):
        reduction_weights(MASK, "constant")


def test_rows_of_one_trajectory_count_as_one_sequence() -> None:
    """Four tokens in one row weigh what they weigh in two rows of three and one."""
    one = torch.tensor([[True] * 4, [True, True, False, False]])
    two = torch.tensor(
        [[True, True, True, False], [False, False, False, True], [True, True, False, False]]
    )
    shares = torch.tensor([0.75, 0.25, 1.0])
    for reduction in ("sequence", "token", "constant", "sum"):
        plain = reduction_weights(one, reduction, 8)
        split = reduction_weights(two, reduction, 8, shares)
        assert torch.equal(split[0] + split[1], plain[0]), reduction
        assert torch.equal(split[2], plain[1]), reduction
