"""The members of a population share one engine, each with its own adapter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import command_line
from vllm_agents import CONFIG, agent_on, prompts_of, train

from agilerl.algorithms import GRPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo.mutation import set_hyperparameter
from agilerl.llm.generation.vllm.engine import Answer, EngineError, Request
from agilerl.testing import load_bundled_model
from agilerl.utils.algo_utils import VLLMConfig

PROMPTS = prompts_of(4, 9, 17, 30)
SIZE = 3
MUTATED: dict[str, float] = {
    "group_size": 2,
    "temperature": 1.7,
    "lr": 3e-2,
    "vllm_importance_sampling_cap": 0.5,
}


def engine_processes() -> set[int]:
    """Of this process."""
    return {
        child.pid
        for child in psutil.Process().children()
        if any("engine_process" in word for word in command_line(child))
    }


@pytest.fixture(scope="module")
def staging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("staging")


@pytest.fixture(scope="module")
def members(staging: Path) -> Iterator[list[GRPO]]:
    """With adapters that are trained differently, and as many slots as the default has."""
    model, _ = load_bundled_model()
    before = engine_processes()
    made = GRPO.population(
        SIZE,
        pad_token_id=256,
        pad_token="<|pad|>",
        actor_network=model,
        use_vllm=True,
        vllm_config=replace(CONFIG, max_loras=1, lora_staging_dir=str(staging)),
        max_model_len=128,
        max_output_tokens=12,
        group_size=4,
        batch_size=8,
        lr=2e-2,
        beta=0.0,
    )
    (engine,) = engine_processes() - before
    for member in made:
        train(member, 2, seed=10 * member.index)
    yield made
    assert engine_processes() - before == {engine}
    for member in made:
        member.clean_up()
    assert engine not in engine_processes()
    assert not list(staging.iterdir())


def greedy(agent: GRPO) -> list[list[int]]:
    action = agent.get_action(PROMPTS, training=False)
    return [
        row[0, 1:][mask[0]].tolist()
        for row, mask in zip(action.completion_ids, action.action_masks, strict=True)
    ]


def recorded_requests(agent: GRPO, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What an agent asks the engine for when it decodes greedily."""
    complete, asked = agent.generator.engine.complete, []

    def note(requests: list[Request]) -> list[Answer]:
        asked.extend(requests)
        return complete(requests)

    with monkeypatch.context() as patch:
        patch.setattr(agent.generator.engine, "complete", note)
        greedy(agent)
    return asked


def test_the_engine_has_room_for_every_member(members: list[GRPO]) -> None:
    assert [member.vllm_config.max_loras for member in members] == [SIZE] * SIZE
    assert len({id(member.generator.engine) for member in members}) == 1


def test_the_arguments_of_members() -> None:
    plain: dict[str, Any] = {"lr": 1e-3}
    assert GRPO.members_arguments(4, plain) is plain
    assert GRPO.members_arguments(1, {"use_vllm": True}) == {"use_vllm": True}
    given = {"use_vllm": True, "vllm_config": None}
    assert GRPO.members_arguments(4, given)["vllm_config"] == VLLMConfig(max_loras=4)
    assert given["vllm_config"] is None
    larger = {"use_vllm": True, "vllm_config": VLLMConfig(max_loras=9)}
    assert GRPO.members_arguments(4, larger) == larger
    with pytest.raises(TypeError, match="vllm_config is 3"):
        GRPO.members_arguments(4, {"use_vllm": True, "vllm_config": 3})


def test_members_sample_from_their_own_adapters_in_one_batch(
    members: list[GRPO], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [greedy(member) for member in members]
    assert all(a != b for a, b in ((alone[0], alone[1]), (alone[1], alone[2])))
    requests = [recorded_requests(member, monkeypatch) for member in members]
    assert [len({r.adapter.name for r in asked}) for asked in requests] == [1] * SIZE
    # Alternating, so that every step of the engine runs all adapters.
    mixed = [request for row in zip(*requests, strict=True) for request in row]
    answers = members[0].generator.engine.complete(mixed)
    together = [answer.samples[0].token_ids for answer in answers]
    assert [together[i::SIZE] for i in range(SIZE)] == alone


def test_each_samples_what_it_would_without_vllm(members: list[GRPO]) -> None:
    for member in members:
        assert greedy(member) == greedy(without_vllm(member))


def without_vllm(agent: GRPO) -> GRPO:
    """An agent of the same adapter, on a base of its own."""
    twin = agent_on(load_bundled_model()[0], use_vllm=False)
    for role in agent.policy.roles:
        theirs = agent.policy.parameters(role)
        for name, parameter in twin.policy.parameters(role).items():
            parameter.data.copy_(theirs[name].data)
    return twin


def test_training_one_member_leaves_what_others_sample(members: list[GRPO]) -> None:
    before = [greedy(member) for member in members]
    found = train(members[1], 2, seed=77)
    assert found["importance_weight_mean"] == pytest.approx(1.0, abs=1e-3)
    after = [greedy(member) for member in members]
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] != before[1]


def test_clones_and_mutated_members(members: list[GRPO], staging: Path) -> None:
    processes = engine_processes()
    clones = [members[0].clone(index=SIZE + i) for i in range(4)]  # more adapters than slots
    expected = greedy(members[0])
    assert [greedy(clone) for clone in clones] == [expected] * 4
    mutated = clones[0]
    for name, value in MUTATED.items():
        set_hyperparameter(mutated, name, RLParameter(value, value, dtype=type(value)), value)
    child = mutated.clone()
    for agent in (mutated, child):
        action = agent.get_action(PROMPTS)
        assert [len(rows) for rows in action.completion_ids] == [2] * len(PROMPTS)
        # Of its own temperature, and of its own adapter once that is trained.
        found = train(agent, 2)
        assert found["importance_weight_max"] == pytest.approx(1.0, abs=1e-3)
        assert found["importance_weight_capped"] == 1.0
        assert greedy(agent) == greedy(without_vllm(agent)) != expected
    assert greedy(members[0]) == expected
    assert engine_processes() <= processes
    for clone in (*clones, child):
        clone.clean_up()
    assert len(list(staging.iterdir())) == SIZE
    assert greedy(members[0]) == expected


def test_an_agent_that_was_cleaned_up_leaves_no_adapter(
    members: list[GRPO], monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = members[0].clone(index=SIZE)
    (request, *_) = recorded_requests(clone, monkeypatch)
    engine, path = clone.generator.engine, Path(request.adapter.path)
    engine.complete([request])
    assert path.exists()
    clone.clean_up()
    assert not path.exists()
    # An adapter that the engine holds still is not read again.
    with pytest.raises(EngineError, match=f"refused a request: .*{request.adapter.path}"):
        engine.load_adapter(request.adapter)
    greedy(members[0])


def test_hyperparameters_of_members_are_drawn_as_without_vllm(members: list[GRPO]) -> None:
    search = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-2))
    given = {
        name: value
        for name, value in members[0].saved_arguments().items()
        if name not in ("index", "hp_config", "lora_config")
    }
    given |= {"actor_network": members[0].policy.base.model, "hp_config": search}
    plain = GRPO.population(2, **given)
    shared = {"use_vllm": True, "vllm_config": members[0].vllm_config}
    with_vllm = GRPO.population(2, **given, **shared)
    assert [agent.lr for agent in with_vllm] == [agent.lr for agent in plain]
    assert with_vllm[0].generator.engine is members[0].generator.engine
    for agent in (*plain, *with_vllm):
        agent.clean_up()
