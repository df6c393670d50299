"""Several agents on one base: clones, populations, PEFT starts, and cleaning up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agent_helpers import (
    fixed_rollouts,
    lora,
    make_agent,
    prompts,
    randomise,
    small_model,
    train,
    weights,
)
from peft import LoraConfig, PeftModel, get_peft_model

from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.algorithms.core import EvolvableAlgorithm, LLMAlgorithm
from agilerl.algorithms.core.build_policy import move_to_device
from agilerl.algorithms.core.registry import (
    HyperparameterConfig,
    NetworkGroup,
    OptimizerConfig,
    RLParameter,
)
from agilerl.llm.config import CosineLRScheduleConfig

SEARCH = HyperparameterConfig(
    lr=RLParameter(min=1e-4, max=1e-2), batch_size=RLParameter(min=1, max=8, dtype=int)
)


def storages(agent: GRPO) -> set[int]:
    """Addresses of the base's weights."""
    base = agent.policy.base.model.state_dict()
    return {tensor.data_ptr() for name, tensor in base.items() if "lora" not in name}


def test_a_clone_is_equal_and_then_independent() -> None:
    agent = randomise(randomise(make_agent(hp_config=SEARCH)), "reference", seed=2)
    train(agent)
    agent.fitness, agent.scores, agent.mut = [0.5], [0.1, 0.2], "lr"
    agent.clip_coef, agent.reference_update_tracker = 0.3, 3
    twin = agent.clone()
    assert type(twin) is GRPO and twin.index == agent.index
    assert storages(twin) == storages(agent)
    for role in ("actor", "reference"):
        assert torch.equal(weights(twin, role), weights(agent, role))
    assert (twin.fitness, twin.scores, twin.mut) == ([0.5], [0.1, 0.2], "lr")
    assert (twin.clip_coef, twin.reference_update_tracker) == (0.3, 3)
    assert twin.fitness is not agent.fitness and twin.hp_config is agent.hp_config
    # The same next step from the same optimizer, and neither moves the other.
    before = weights(agent), weights(agent, "reference"), moments(agent)
    first = train(twin)
    after = weights(agent), weights(agent, "reference"), moments(agent)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert train(agent) == first and torch.equal(weights(agent), weights(twin))


def moments(agent: GRPO) -> torch.Tensor:
    state = agent.optimizer.state_dict()["state"]
    return torch.cat([entry["exp_avg"].flatten() for entry in state.values()]).clone()


def test_a_clone_keeps_its_place_in_the_schedule_and_explores_by_its_index() -> None:
    agent = make_agent(GSPO, cosine_lr_schedule_config=CosineLRScheduleConfig(10))
    for _ in range(3):
        train(agent)
    twin, other = agent.clone(), agent.clone(index=5)
    assert type(other) is GSPO and other.index == 5
    rates = [a.optimizer.param_groups[0]["lr"] for a in (agent, twin, other)]
    assert rates[0] == rates[1] == rates[2] < agent.lr
    same, again, differs = (
        a.get_action(prompts("hello")).completion_ids[0] for a in (agent, twin, other)
    )
    assert torch.equal(same, again) and not torch.equal(same, differs)


def test_a_clone_of_mutated_sizes_is_made() -> None:
    agent = make_agent(micro_batch_size_per_gpu=4)
    agent.batch_size = 2
    assert agent.clone().batch_size == 2


def test_dtypes_are_kept() -> None:
    agent = make_agent(model=small_model(dtype=torch.bfloat16))
    twin = agent.clone()
    assert twin.policy.base.model.dtype == torch.bfloat16
    kinds = [{p.dtype for p in a.policy.parameters().values()} for a in (agent, twin)]
    assert kinds[0] == kinds[1]


def test_a_population_shares_one_base() -> None:
    agents = CISPO.population(
        4, wrapper_cls=None, hp_config=SEARCH, actor_network=small_model(),
        pad_token_id=256, pad_token="<|pad|>", seed=3,
    )  # fmt: skip
    assert [agent.index for agent in agents] == [0, 1, 2, 3]
    assert all(type(agent) is CISPO for agent in agents)
    assert len({frozenset(storages(agent)) for agent in agents}) == 1
    assert len({agent.lr for agent in agents}) == 4
    assert all(1e-4 <= agent.lr <= 1e-2 and 1 <= agent.batch_size <= 8 for agent in agents)
    assert all(agent.optimizer.param_groups[0]["lr"] == agent.lr for agent in agents)


def test_a_population_may_be_wrapped() -> None:
    class Wrapper:
        def __init__(self, agent: GRPO, note: str) -> None:
            self.agent, self.note = agent, note

    settings: dict[str, Any] = {"pad_token_id": 256, "pad_token": "p"}
    wrapped: Any = GRPO.population(
        2,
        wrapper_cls=Wrapper,
        wrapper_kwargs={"note": "x"},
        actor_network=small_model(),
        **settings,
    )
    assert [(w.agent.index, w.note) for w in wrapped] == [(0, "x"), (1, "x")]


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), ("2", TypeError), (True, TypeError)])
def test_bad_population_size(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="size is"):
        GRPO.population(size, actor_network=small_model(), pad_token_id=0, pad_token="p")


def test_a_population_says_that_an_integer_needs_its_dtype() -> None:
    search = HyperparameterConfig(update_epochs=RLParameter(min=1, max=4))
    with pytest.raises(ValueError, match="update_epochs in hp_config has dtype float"):
        GRPO.population(
            2, hp_config=search, actor_network=small_model(), pad_token_id=0, pad_token="p"
        )


def test_a_population_refuses_other_ranges() -> None:
    with pytest.raises(TypeError, match=r"hp_config is .*it must be a HyperparameterConfig"):
        GRPO.population(
            1, hp_config={"lr": 1}, actor_network=small_model(), pad_token_id=0, pad_token="p"
        )


def test_sizes_of_spaces_are_read_off_their_attributes() -> None:
    box, discrete = SimpleNamespace(shape=(3, 4)), SimpleNamespace(n=5, shape=())
    several = SimpleNamespace(nvec=[2, 3], shape=(2,))
    assert GRPO.get_state_dim(box) == (3, 4)
    assert GRPO.get_action_dim(discrete) == (5,) and GRPO.get_action_dim(several) == (5,)
    assert GRPO.get_state_dim([box, discrete]) == ((3, 4), (5,))
    assert GRPO.get_state_dim({"a": box}) == ((3, 4),)
    assert GRPO.get_state_dim(SimpleNamespace(spaces={"a": discrete})) == ((5,),)
    assert GRPO.get_state_dim(SimpleNamespace(spaces=(box, several))) == ((3, 4), (5,))
    with pytest.raises(TypeError, match="is not a Gymnasium space"):
        GRPO.get_state_dim("box")


def test_training_one_agent_leaves_another_alone() -> None:
    model = small_model()
    one, two = randomise(make_agent(model=model)), randomise(make_agent(model=model), seed=2)
    assert storages(one) == storages(two)
    before = weights(two), weights(two, "reference")
    base = {n: t.clone() for n, t in model.state_dict().items() if "lora" not in n}
    train(one)
    assert torch.equal(weights(two), before[0]) and torch.equal(
        weights(two, "reference"), before[1]
    )
    assert all(torch.equal(t, base[n]) for n, t in model.state_dict().items() if n in base)


def test_a_model_named_by_path_is_shared(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    settings = {"model_name": str(tmp_path), "model_config": {"dtype": torch.float32}}
    one, two = make_agent(**settings), make_agent(**settings)
    assert one.policy.base is two.policy.base
    assert train(one) == train(two)


def test_arguments_that_do_not_fit_the_model_leave_it_as_it_was() -> None:
    model = small_model().train()
    with pytest.raises(ValueError, match="lora_target_scope 'vision'"):
        make_agent(model=model, lora_target_scope="vision")
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_clean_up_frees_adapters_and_leaves_a_plain_model() -> None:
    model = small_model().train()
    ids, _ = fixed_rollouts()
    with torch.no_grad():
        expected = model(ids).logits
    names = set(model.state_dict())
    one, two = randomise(make_agent(model=model)), make_agent(model=model)
    one.clean_up()
    train(two)
    two.clean_up()
    two.clean_up()
    assert set(model.state_dict()) == names
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
    train(make_agent(model=model))


@pytest.mark.parametrize(
    "call",
    [
        lambda agent: agent.get_action(prompts("a")),
        train,
        lambda agent: agent.clone(),
        lambda agent: agent.save_checkpoint("never-written"),
        lambda agent: agent.load_checkpoint("never-read"),
        lambda agent: agent.set_reference_policy(1),
        lambda agent: agent.use_adapter("actor"),
        lambda agent: agent.optimizer,
        lambda agent: agent.actor,
    ],
)
def test_a_cleaned_up_agent_says_so(call: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    agent = make_agent()
    agent.clean_up()
    with pytest.raises((RuntimeError, FileNotFoundError), match=r"cleaned up|never-read"):
        call(agent)
    assert not list(tmp_path.iterdir())


def peft_model(config: LoraConfig | None = None) -> PeftModel:
    return get_peft_model(small_model(), config or lora(init_lora_weights=False))


def test_a_peft_model_starts_actor_and_reference() -> None:
    network = peft_model()
    ids, _ = fixed_rollouts()
    with torch.no_grad():
        expected = network(input_ids=ids).logits
    agent = make_agent(actor_network=network)
    for role in ("actor", "reference"):
        with agent.select_adapter(role), torch.no_grad():
            assert torch.allclose(agent.actor(input_ids=ids).logits, expected, atol=1e-5)
    assert agent.lora_config is not None and agent.lora_config.r == 4
    train(agent)


def test_a_peft_model_serves_a_whole_population() -> None:
    network = peft_model()
    agents = [make_agent(actor_network=network, index=index) for index in range(3)]
    agents.append(agents[0].clone(index=3))
    assert all(torch.equal(weights(agent), weights(agents[0])) for agent in agents)
    assert weights(agents[0]).abs().sum() > 0


def test_a_peft_model_of_another_config_is_refused() -> None:
    with pytest.raises(ValueError, match=r"r: agent has 8, actor_network 4.*Leave lora_config out"):
        make_agent(actor_network=peft_model(), lora_config=lora(r=8))


def test_the_peft_model_of_a_living_agent_is_refused() -> None:
    agent = make_agent()
    with pytest.raises(ValueError, match=r"adapters of other agents.*clone"):
        make_agent(actor_network=agent.actor)


def test_the_evolvable_surface() -> None:
    agent = make_agent(hp_config=SEARCH)
    assert isinstance(agent, LLMAlgorithm) and isinstance(agent, EvolvableAlgorithm)
    assert (agent.algo, agent.index, agent.mut, agent.steps) == ("GRPO", 0, None, [])
    assert agent.get_lr_names() == ["lr"]
    assert agent.get_policy() is agent.actor
    assert set(agent.evolvable_attributes()) == {"actor", "optimizer"}
    assert set(agent.evolvable_attributes(networks_only=True)) == {"actor"}
    arguments = GRPO.inspect_attributes(agent, input_args_only=True)
    assert arguments["lr"] == 1e-2 and "fitness" not in arguments
    everything = GRPO.inspect_attributes(agent)
    assert everything["fitness"] == [] and not {"policy", "engine", "actor"} & everything.keys()
    calls: list[int] = []
    agent.register_mutation_hook(lambda: calls.append(1))
    agent.mutation_hook()
    assert calls == [1]
    agent.register_network_group(NetworkGroup("actor"))
    agent.set_training_mode(False)
    agent.wrap_models()
    agent.unwrap_models()
    agent.recompile()
    assert agent.preprocess_observation([1]) == [1]
    ids, nested = agent.to_device(torch.ones(2), {"a": [torch.ones(1)]})
    assert ids.device.type == nested["a"][0].device.type == "cpu"
    accelerator, scheduler = agent.update_lr(agent.optimizer, (3e-3, 1.0))
    assert accelerator is None is scheduler and agent.optimizer.param_groups[0]["lr"] == 3e-3
    scheduler = agent.update_lr(agent.optimizer, 1.0, None, CosineLRScheduleConfig(4, 0.5))[1]
    assert agent.optimizer.param_groups[0]["lr"] == 0.5 and scheduler is not None


@pytest.mark.parametrize("schedule", [None, CosineLRScheduleConfig(10, 0.3)])
def test_a_rate_set_on_the_optimizer_stays_until_lr_is_changed(
    schedule: Any, tmp_path: Path
) -> None:
    """In clones, engines made anew and rebuilt agents as well."""
    agent = make_agent(cosine_lr_schedule_config=schedule)
    train(agent)
    agent.update_lr(agent.optimizer, 3e-3)
    twin, unwrapped = agent.clone(), agent.clone(wrap=False)
    unwrapped.wrap_models()
    agent.save_checkpoint(tmp_path / "saved")
    rebuilt = GRPO.load(tmp_path / "saved", actor_network=agent.policy.base.model)
    for lr in (agent.lr, 1e-3):
        for each in (agent, twin, unwrapped, rebuilt):
            each.lr = lr
            train(each)
        (group,) = agent.optimizer.param_groups
        assert group.get("initial_lr", group["lr"]) == (1e-3 if lr == 1e-3 else 3e-3)
        for each in (twin, unwrapped, rebuilt):
            assert dict(each.optimizer.param_groups[0], params=[]) == dict(group, params=[])
            assert torch.equal(weights(each), weights(agent))


def test_reinit_optimizers_forgets_the_moments() -> None:
    agent = make_agent()
    train(agent)
    agent.reinit_optimizers(OptimizerConfig("optimizer", ("actor",), "lr"))
    assert agent.optimizer.state_dict()["state"] == {}
    with pytest.raises(ValueError, match="'critic_optimizer'"):
        agent.reinit_optimizers(OptimizerConfig("critic_optimizer", ("critic",), "lr"))


def test_adapters_are_chosen_by_role() -> None:
    agent = randomise(make_agent())
    ids, _ = fixed_rollouts()

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return agent.actor(input_ids=ids).logits

    agent.use_adapter("actor")
    actor = logits()
    with agent.select_adapter("reference"):
        reference = logits()
    assert torch.equal(logits(), actor) and not torch.equal(reference, actor)
    agent.use_adapter("reference")
    assert torch.equal(logits(), reference)
    with pytest.raises(ValueError, match=r"'critic'.*\['actor', 'reference'\]"):
        agent.use_adapter("critic")
    with pytest.raises(ValueError, match="'critic'"), agent.select_adapter("critic"):
        pass


def test_the_actor_attribute_is_the_agents_own_whoever_acted_last() -> None:
    model = small_model()
    first, second = make_agent(GRPO, model), make_agent(GRPO, model, index=1)
    randomise(first, seed=1), randomise(second, seed=2)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        own = second.actor(ids).logits
        first.get_action(prompts("hello"))
        assert torch.equal(second.actor(ids).logits, own)
        assert not torch.equal(first.actor(ids).logits, own)


def test_an_agent_acts_with_the_adapter_that_is_selected() -> None:
    agent = make_agent()
    randomise(agent, scale=0.5)
    obs = prompts("hello there", "what")
    actor = agent.get_action(obs, training=False).completion_ids
    with agent.select_adapter("reference"):
        reference = agent.get_action(obs, training=False).completion_ids
    assert not all(torch.equal(a, b) for a, b in zip(actor, reference, strict=True))
    agent.use_adapter("reference")
    again = agent.get_action(obs, training=False).completion_ids
    assert all(torch.equal(a, b) for a, b in zip(again, reference, strict=True))


def test_a_model_in_use_is_not_moved_to_another_device() -> None:
    model = small_model()
    agent = make_agent(GRPO, model)
    with pytest.raises(ValueError, match=r"device is 'meta'.*in use by another agent on 'cpu'"):
        move_to_device(model, torch.device("meta"))
    assert agent.policy.device.type == "cpu"
