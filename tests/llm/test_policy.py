"""One frozen base, many policies."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from rollout_helpers import PLAIN, lora, random_batch, random_policy, randomise
from torch import nn

from agilerl.llm.adapters import adapter_parameters
from agilerl.llm.engine.local import LocalEngine
from agilerl.llm.policy import Policy, scatter_actions
from agilerl.llm.shared_base import SharedBase
from agilerl.testing import tiny_model


def bits(policy: Policy) -> dict[str, torch.Tensor]:
    return {
        f"{role}.{name}": parameter.detach().clone()
        for role in policy.roles
        for name, parameter in policy.parameters(role).items()
    }


def same_bits(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def trainable(policy: Policy) -> set[int]:
    return {id(p) for p in policy.model.parameters() if p.requires_grad}


def test_two_policies_on_one_model_share_its_storage() -> None:
    model = tiny_model()
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    size = sum(p.numel() for p in model.parameters())
    first, second = random_policy(model), random_policy(model, seed=7)
    assert first.base is second.base
    assert first.model is second.model
    adapters = sum(p.numel() for policy in (first, second) for p in bits(policy).values())
    assert sum(p.numel() for p in model.parameters()) == size + adapters
    now = {p.data_ptr() for p in model.parameters()}
    assert set(pointers.values()) <= now
    assert not {id(p) for p in first.parameters().values()} & {
        id(p) for p in second.parameters().values()
    }


def test_training_one_policy_leaves_the_other_and_the_base_bit_identical() -> None:
    model = tiny_model()
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    first, second = random_policy(model), random_policy(model, seed=7)
    batch = random_batch()
    others = {**bits(second), **{n: p for n, p in bits(first).items() if n[:9] == "reference"}}
    logp = second.frozen_logprobs(batch, "actor", PLAIN)
    before = bits(first)

    engine = LocalEngine(first.parameters().values(), lr=0.1)
    for _ in range(2):
        first.set_role("actor")
        engine.backward(first.logprobs(batch, PLAIN).logp.sum())
        assert engine.step(1.0) > 0

    after = bits(first)
    assert all(not torch.equal(after[n], before[n]) for n in after if n.startswith("actor"))
    assert same_bits(
        others, {**bits(second), **{n: p for n, p in after.items() if n[:9] == "reference"}}
    )
    assert torch.equal(second.frozen_logprobs(batch, "actor", PLAIN), logp)
    now = {name.replace(".base_layer", ""): p for name, p in model.named_parameters()}
    assert all(torch.equal(now[name], value) for name, value in base.items())


def test_only_the_active_actor_requires_gradients() -> None:
    model = tiny_model()
    first, second = random_policy(model), random_policy(model)
    for policy in (first, second, first):
        policy.set_role("actor")
        assert trainable(policy) == {id(p) for p in policy.parameters().values()}
        for role in ("reference", None):
            with policy.as_role(role):
                assert trainable(policy) == set()
        assert trainable(policy) == {id(p) for p in policy.parameters().values()}


def test_roles_compute_their_own_function_and_none_is_the_bare_base() -> None:
    model = tiny_model()
    batch = random_batch()
    config = PLAIN
    plain = Policy(SharedBase.of(model), {"actor": lora()}, seed=0)
    bare = plain.frozen_logprobs(batch, "actor", config)  # a fresh adapter computes nothing
    policy = random_policy(model)
    actor, reference = (policy.frozen_logprobs(batch, r, config) for r in policy.roles)
    assert torch.equal(policy.frozen_logprobs(batch, None, config), bare)
    assert not torch.allclose(actor, bare, atol=1e-3)
    assert not torch.allclose(actor, reference, atol=1e-3)
    policy.copy_role("actor", "reference")
    assert torch.equal(policy.frozen_logprobs(batch, "reference", config), actor)


def test_the_actor_is_active_again_after_an_error() -> None:
    policy = random_policy(tiny_model())
    with pytest.raises(RuntimeError, match="inside"), policy.as_role("reference"):
        raise RuntimeError("inside")
    assert trainable(policy) == {id(p) for p in policy.parameters().values()}


def test_an_unknown_role_is_named_with_those_there_are() -> None:
    policy = random_policy(tiny_model(), separate_reference=False)
    with pytest.raises(ValueError, match=r"'critic'.*\['actor'\]"):
        policy.set_role("critic")


def test_releasing_the_last_policy_gives_back_a_plain_model() -> None:
    model = tiny_model()
    untouched = tiny_model()
    first, second = random_policy(model), random_policy(model)
    ids = torch.arange(12)[None]
    logp = second.frozen_logprobs(random_batch(), "actor", PLAIN)
    first.release()
    assert torch.equal(second.frozen_logprobs(random_batch(), "actor", PLAIN), logp)
    assert first.roles == []
    second.release()
    assert not any(isinstance(module, BaseTunerLayer) for module in model.modules())
    assert [type(m) for m in model.modules()] == [type(m) for m in untouched.modules()]
    state, expected = model.state_dict(), untouched.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, untouched(ids).logits)
    again = random_policy(model)
    assert torch.equal(
        again.frozen_logprobs(random_batch(), "actor", PLAIN),
        random_policy(untouched).frozen_logprobs(random_batch(), "actor", PLAIN),
    )


def test_the_same_seed_gives_the_same_adapter_whatever_ran_before() -> None:
    both = dict.fromkeys(("actor", "reference"), lora())
    first = Policy(SharedBase.of(tiny_model()), both, seed=3)
    torch.rand(17)
    state = torch.get_rng_state()
    model = tiny_model()
    random_policy(model)
    second = Policy(SharedBase.of(model), both, seed=3)
    other = Policy(SharedBase.of(model), both, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert same_bits(bits(first), bits(second))
    assert not same_bits(bits(first), bits(other))
    actor, reference = second.parameters("actor"), second.parameters("reference")
    assert all(torch.equal(actor[name], reference[name]) for name in actor)


def test_a_policy_dropped_without_release_takes_its_adapters_along() -> None:
    model = tiny_model()
    kept = random_policy(model)
    batch = random_batch()
    logp = kept.logprobs(batch, PLAIN).logp
    for _ in range(3):  # as when a cell of a notebook is run again
        random_policy(model)
        assert len(kept.model.peft_config) == 2
    kept.set_role("actor")
    assert torch.equal(kept.logprobs(batch, PLAIN).logp, logp)
    assert trainable(kept) == {id(p) for p in kept.parameters().values()}
    del kept
    assert not any(isinstance(module, BaseTunerLayer) for module in model.modules())


def leave_to_the_garbage_collector(model: nn.Module) -> None:
    """A policy that only a reference cycle keeps."""
    policy = random_policy(model)
    policy.__dict__["me"] = policy


def collect_while_modules_are_iterated(model: nn.Module) -> None:
    """Collects where a removed adapter would change the dictionary that is iterated over."""
    collected = False
    for name, _ in model.named_modules():
        if not collected and ".lora_A." in name:
            collected = gc.collect() > 0
    assert collected


@pytest.fixture
def no_other_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_other_collection")
def test_a_garbage_collection_removes_no_adapter_until_the_base_is_used() -> None:
    model = tiny_model()
    kept = random_policy(model)
    leave_to_the_garbage_collector(model)
    collect_while_modules_are_iterated(model)
    assert len(kept.model.peft_config) == 4
    kept.set_role("actor")
    assert kept.model.peft_config.keys() == set(kept.slots.values())
    assert trainable(kept) == {id(p) for p in kept.parameters().values()}


@pytest.mark.usefixtures("no_other_collection")
def test_after_a_garbage_collection_the_next_policy_finds_a_plain_model() -> None:
    model = tiny_model()
    expected, own = set(model.state_dict()), set(vars(model))
    leave_to_the_garbage_collector(model)
    collect_while_modules_are_iterated(model)
    policy = random_policy(model)  # its base is the one that knows of the other adapters
    assert policy.model.peft_config.keys() == set(policy.slots.values())
    policy.release()
    assert set(model.state_dict()) == expected
    assert set(vars(model)) == own
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.usefixtures("no_other_collection")
def test_a_garbage_collection_keeps_no_model_alive() -> None:
    model = tiny_model()
    dropped = weakref.ref(model)
    leave_to_the_garbage_collector(model)
    del model
    gc.collect()
    gc.collect()  # the first one only makes a cycle of base and model out of it
    assert dropped() is None


def test_dropping_a_policy_leaves_the_active_adapter_alone() -> None:
    model = tiny_model()
    kept, other = random_policy(model), random_policy(model)
    batch = random_batch()
    kept.set_role("actor")
    logp = kept.logprobs(batch, PLAIN).logp
    del other
    assert trainable(kept) == {id(p) for p in kept.parameters().values()}
    assert torch.equal(kept.logprobs(batch, PLAIN).logp, logp)


def test_a_slot_name_inside_another_mixes_nothing_up() -> None:
    """Slots count up, so that one's name is soon the beginning of another's: actor_1, actor_10."""
    model = tiny_model(layers=1)
    policies = [Policy(SharedBase.of(model), {"actor": lora(r=1)}, seed=i) for i in range(12)]
    owners = [
        {id(p) for p in adapter_parameters(policy.model, policy.slot("actor")).values()}
        for policy in policies
    ]
    assert len(set.union(*owners)) == sum(map(len, owners))
    for policy in policies[:-1]:
        policy.release()
    assert len(policies[-1].parameters()) == len(owners[-1])


def test_the_base_keeps_its_dtype() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    policy = Policy(SharedBase.of(model), dict.fromkeys(("actor", "reference"), lora()), seed=0)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" not in n} == {torch.bfloat16}
    logp = policy.frozen_logprobs(random_batch(), "actor", PLAIN)
    assert logp.dtype == torch.float32
    assert logp.isfinite().all()


def test_frozen_log_probs_do_not_depend_on_the_micro_batch_and_are_zero_elsewhere() -> None:
    policy = random_policy(tiny_model().double())
    batch = random_batch(padding=2)
    whole = policy.frozen_logprobs(batch, "actor", PLAIN)
    assert not whole.requires_grad
    assert (whole[~batch.action_mask] == 0).all()
    assert (whole[batch.action_mask] < 0).all()
    for size in (1, 3):
        parts = torch.arange(len(batch)).split(size)
        part = policy.frozen_logprobs(batch, "actor", PLAIN, parts)
        torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-12)


def test_scatter_actions_is_differentiable() -> None:
    mask = torch.tensor([[False, True], [True, True]])
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    scattered = scatter_actions(values, mask)
    assert scattered.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    (scattered * torch.tensor([[7.0, 1.0], [2.0, 3.0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 2.0, 3.0]


def test_parameters_keep_their_order_and_carry_no_slot_name() -> None:
    model = tiny_model()
    first, second = random_policy(model), random_policy(model)
    assert list(first.parameters()) == list(second.parameters("reference"))
    assert not any("actor" in name or "reference" in name for name in first.parameters())
    assert all(isinstance(p, nn.Parameter) for p in first.parameters().values())
    randomise(first.parameters(), seed=1, dtype=torch.float32)


def test_log_probs_return_to_the_role_in_use() -> None:
    policy = random_policy(tiny_model())
    policy.set_role("reference")
    with policy.as_role(None):
        pass
    assert policy.model.active_adapters == [policy.slot("reference")]
    policy.set_role("actor")
    assert policy.model.active_adapters == [policy.slot("actor")]
