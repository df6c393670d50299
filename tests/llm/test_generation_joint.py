"""Several policies in one call get what each would have got alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from generation_helpers import VOCAB, policy_of, prompts_of, sampling_of
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import FAMILIES, make_family
from peft import LoraConfig

from agilerl.llm.config import SamplingConfig
from agilerl.llm.generation import GenerationRequest, mixed_adapters
from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm.generation.mixed_adapters import MixedLinear, RowAdapters, mixing_key
from agilerl.llm.policy import Policy
from agilerl.llm.shared_base import SharedBase
from agilerl.testing import tiny_model

# Many tokens end a completion, so that rows of a batch finish at different steps.
ENDS = tuple(range(2, 24))


def policies_on(model: torch.nn.Module, count: int, **lora: object) -> list[Policy]:
    """Policies with random adapters that differ."""
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | lora
    )
    base, rng = SharedBase.of(model), torch.Generator().manual_seed(1)
    policies = [Policy(base, {"actor": config}, seed=number) for number in range(count)]
    for policy in policies:
        for parameter in policy.parameters().values():
            noise = torch.randn(parameter.shape, generator=rng) * 0.15
            parameter.data = noise.to(parameter.dtype)
    return policies


def requests_of(
    count: int, sampling: SamplingConfig, vocab: int = VOCAB, lengths: tuple[int, ...] = (5, 3, 9)
) -> dict[int, GenerationRequest]:
    """Requests of different sizes; their first prompts are the same."""
    prompts = prompts_of(list(lengths), vocab)
    rngs = [torch.Generator().manual_seed(7 + number) for number in range(count)]
    return {
        n: GenerationRequest(
            [prompts[0], *prompts[1 : 1 + n], prompts[0]], 2 + n % 2, sampling, rng
        )
        for n, rng in enumerate(rngs)
    }


def alone(policies: list[Policy], requests: dict[int, GenerationRequest]) -> dict[int, list[int]]:
    made = {}
    for number, request in requests.items():
        done = HFGenerator(policies[number]).generate(
            request.prompts, request.samples_per_prompt, request.sampling, request.rng
        )
        made[number] = [row.tolist() for row in done.token_ids]
    return made


def together(
    policies: list[Policy], requests: dict[int, GenerationRequest]
) -> dict[int, list[int]]:
    first, *others = [HFGenerator(policy) for policy in policies]
    done = first.join(others).generate(requests)
    return {number: [row.tolist() for row in made.token_ids] for number, made in done.items()}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 3))
def test_each_row_runs_through_its_adapter(adapters: list[int], tokens: int) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(len(adapters), tokens, 5, generator=rng)
    down, up = torch.randn(4, 5, 2, generator=rng), torch.randn(4, 2, 6, generator=rng)
    rows = RowAdapters(4)
    for chosen in (adapters[::-1], adapters):
        rows.assign(torch.tensor(chosen))
    expected = torch.stack([row @ down[a] @ up[a] for row, a in zip(x, adapters, strict=True)])
    torch.testing.assert_close(rows.run(x, down, up), expected)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt2"])
def test_completions_are_those_of_one_by_one(family: str) -> None:
    model = make_family(family)
    policies = policies_on(model, 3)
    sampling = sampling_of(eos_token_ids=ENDS, return_logps=True)
    vocab = model.config.vocab_size
    if mixing_key(policies[0]) is None:
        assert family == "qwen3_moe"  # an expert is given some of the rows
        return
    expected = alone(policies, requests_of(3, sampling, vocab))
    assert together(policies, requests_of(3, sampling, vocab)) == expected
    # The adapters matter, or this would show nothing.
    assert expected != alone(policies[::-1], requests_of(3, sampling, vocab))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    greedy=st.booleans(),
    min_new_tokens=st.integers(0, 4),
    penalty=st.sampled_from([1.0, 1.3]),
)
@settings(max_examples=15, deadline=None)
def test_whatever_the_requests(
    sizes: list[tuple[int, int]],
    lengths: list[int],
    greedy: bool,
    min_new_tokens: int,
    penalty: float,
) -> None:
    policies = policies_on(tiny_model(), len(sizes))
    sampling = sampling_of(
        eos_token_ids=ENDS,
        greedy=greedy,
        min_new_tokens=min_new_tokens,
        repetition_penalty=penalty,
    )
    prompts = prompts_of(lengths)

    def requests() -> dict[int, GenerationRequest]:
        return {
            n: GenerationRequest(
                prompts[:count], samples, sampling, torch.Generator().manual_seed(n)
            )
            for n, (count, samples) in enumerate(sizes)
            if count
        }

    if requests():
        assert together(policies, requests()) == alone(policies, requests())


def test_log_probs_are_those_of_one_by_one() -> None:
    policies = policies_on(tiny_model(), 2)
    sampling = sampling_of(eos_token_ids=ENDS, return_logps=True, temperature=0.7)
    requests = requests_of(2, sampling)
    first, second = map(HFGenerator, policies)
    made = first.join([second]).generate(requests)
    for number, request in requests_of(2, sampling).items():
        expected = HFGenerator(policies[number]).generate(
            request.prompts, request.samples_per_prompt, sampling, request.rng
        )
        assert made[number].logps is not None
        assert expected.logps is not None
        for mine, theirs in zip(made[number].logps, expected.logps, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("session", [False, True])
def test_turns_continue_the_rows_of_their_own_policy(session: bool) -> None:
    # After one token of the first turn the rows with keys and values are the prompts, which are
    # equal: only the policy tells whose they are.
    policies = policies_on(tiny_model(), 3)
    lengths = [1, 4, 4]
    rng = torch.Generator()
    first, *others = map(HFGenerator, policies)
    joint = first.join(others)

    def grown(
        prompts: list[torch.Tensor], completions: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        rows = enumerate(zip(prompts, completions, strict=True))
        return [torch.cat([*row, torch.tensor([30, 31 + number])]) for number, row in rows]

    # Two rows of each adapter share a prompt, in later turns what they began with.
    prompt, other = prompts_of([6, 6])
    together = {number: [prompt, prompt, other] for number in range(3)}
    one_by_one = dict(together)
    with joint.session() if session else nullcontext():
        for turn, new_tokens in enumerate(lengths):
            sampling = sampling_of(greedy=True, max_new_tokens=new_tokens)
            playing = [n for n in together if (n, turn) != (1, 2)]  # one ends a turn earlier
            made = joint.generate(
                {n: GenerationRequest(together[n], 1, sampling, rng) for n in playing}
            )
            together |= {n: grown(together[n], made[n].token_ids) for n in playing}
    for n, policy in enumerate(policies):
        for new_tokens in lengths[: 2 if n == 1 else 3]:
            sampling = sampling_of(greedy=True, max_new_tokens=new_tokens)
            done = HFGenerator(policy).generate(one_by_one[n], 1, sampling, rng)
            one_by_one[n] = grown(one_by_one[n], done.token_ids)
        for mine, theirs in zip(together[n], one_by_one[n], strict=True):
            assert torch.equal(mine, theirs)


def test_lower_precision_runs_as_one_by_one() -> None:
    policies = policies_on(tiny_model().bfloat16(), 3)
    sampling = sampling_of(eos_token_ids=ENDS, greedy=True)
    made = together(policies, requests_of(3, sampling))
    expected = alone(policies, requests_of(3, sampling))
    # Rounding may depend on the rows beside one; a wrong adapter changes all rows.
    rows = [(a, b) for n in made for a, b in zip(made[n], expected[n], strict=True)]
    assert sum(a == b for a, b in rows) >= 0.75 * len(rows)


def test_no_adapter_can_be_used_within_it_and_the_model_is_as_before_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    policies = policies_on(model, 2)
    modules = [type(module) for module in model.modules()]
    generators = first, second = [HFGenerator(policy) for policy in policies]
    for policy in policies:
        policy.set_role("actor")  # the last one's adapter is the active one
    for generator in generators:
        with first.join([second]).session(), pytest.raises(RuntimeError, match="is under way"):
            generator.generate(prompts_of([4]), 1, sampling_of(), torch.Generator())
    for generator in generators:
        with generator.session(), pytest.raises(RuntimeError, match="is under way"):
            together(policies, requests_of(2, sampling_of()))
    with pytest.raises(ValueError, match="leaves no room"):
        together(policies, requests_of(2, sampling_of(max_model_len=4)))
    assert [type(module) for module in model.modules()] == modules

    made: list[MixedLinear] = []

    class Failing(MixedLinear):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)
            if len(made) == 3:
                raise MemoryError

    monkeypatch.setattr(mixed_adapters, "MixedLinear", Failing)
    with pytest.raises(MemoryError):
        together(policies, requests_of(2, sampling_of()))
    assert [type(module) for module in model.modules()] == modules
    for policy in policies:
        policy.set_role("actor")


def test_a_model_that_cannot_be_probed_is_not_mixed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policies = policies_on(tiny_model(), 2)

    def forward(self: MixedLinear, x: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no attribute 'in_features'")

    monkeypatch.setattr(MixedLinear, "forward", forward)
    with caplog.at_level("INFO", logger="agilerl"):
        assert mixing_key(policies[0]) is None
    assert "one by one" in caplog.text
    assert "in_features" in caplog.text
    # Nor one whose rows come out differently.
    monkeypatch.setattr(MixedLinear, "forward", lambda self, x: self.base_layer(x))
    assert mixing_key(policies_on(tiny_model(), 1)[0]) is None


def test_limits() -> None:
    model = tiny_model()
    one, two = policies_on(model, 2)
    (larger,) = policies_on(model, 1, r=8)
    (dora,) = policies_on(model, 1, use_dora=True)
    (with_head,) = policies_on(model, 1, target_modules=["q_proj", "lm_head"])
    elsewhere = policy_of(tiny_model())
    sampling = sampling_of()

    def key(policy: Policy, sampling: SamplingConfig = sampling) -> object:
        limits = HFGenerator(policy).joint_limits(sampling, 4)
        return None if limits is None else limits.key

    assert key(one) == key(two) == key(one, replace(sampling, chunk_size=3))
    others = [key(larger), key(elsewhere), key(one, replace(sampling, temperature=0.5))]
    assert len({key(one), *others}) == 4
    assert key(dora) is None
    assert key(with_head) is None
    # As many rows as one policy may hold; by default fewer on a CPU.
    rows = [
        HFGenerator(one).joint_limits(s, 4) for s in (sampling, replace(sampling, chunk_size=3))
    ]
    assert [limits.max_rows for limits in rows if limits] == [64, 12]
