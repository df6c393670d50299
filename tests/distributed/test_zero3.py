"""ZeRO stage 3: the base is in parts, and all else is as in a single process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_and_batches import data, make_agent, weights
from case_settings import each_setting
from cases_zero3 import MODELS, TURNS_OF_RANK, agent_on, answers, rolled_out, turns

from agilerl.algorithms import GRPO
from agilerl.testing import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.process]

Ranks = list[dict[str, Any]]
TOLERANCE = 1e-6


@functools.cache
def alone(name: str) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """A single process: its weights after two updates, and its answers around them."""
    agent = agent_on(**MODELS[name])
    found = [answers(agent, 4)]
    for _ in range(2):
        data().learned_by(agent)
        found.append(answers(agent, 4))
    return weights(agent), found


@each_setting("partitioned_models")
@pytest.mark.parametrize("name", MODELS)
def test_updates_and_rollouts_are_those_of_a_single_process(ranks: Ranks, name: str) -> None:
    expected, texts = alone(name)
    assert not all(map(torch.equal, texts[0], texts[2]))  # it has learned something
    assert torch.equal(ranks[0][name]["weights"], ranks[1][name]["weights"])
    # Four steps of Adam: where a gradient is tiny, its rounding counts in full.
    torch.testing.assert_close(ranks[0][name]["weights"], expected, atol=3e-5, rtol=0)
    for number, rank in enumerate(ranks):
        for given, wanted in zip(rank[name]["answers"], texts, strict=True):
            assert len(given) == 1 + 3 * number
            assert all(torch.equal(g, w) for g, w in zip(given, wanted, strict=False))


@each_setting("partitioned_models")
@pytest.mark.parametrize("name", MODELS)
def test_each_rank_keeps_half_of_the_base(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        found = rank[name]
        whole = found["elements"]["all"]
        assert found["elements"]["here"] == pytest.approx(whole / 2, rel=0.02)
        assert found["elements"]["whole"] == found["after"]["whole"] == 0
        assert found["during"] < whole / 10, "weights are given up between forward and backward"
        assert found["stack"] == 0


def second_step_alone(agent: GRPO) -> torch.Tensor:
    data().learned_by(agent)
    return weights(agent)


@each_setting("partitioned_checkpoints")
def test_checkpoints_go_on_on_ranks_and_in_one_process(ranks: Ranks, folder: Path) -> None:
    agent = make_agent()
    data().learned_by(agent)
    expected = second_step_alone(agent)
    for rank in ranks:
        for name, values in rank["second"].items():
            torch.testing.assert_close(values, expected, atol=TOLERANCE, rtol=0, msg=name)
        assert "base weights differ" in rank["refusal"]
    base = tiny_model(hidden_size=32, layers=1)
    rebuilt = GRPO.load(folder / "lora_only_True", actor_network=base)
    full = GRPO.load(folder / "lora_only_False")
    for name, tensor in full.policy.base.model.state_dict().items():
        if "lora_" not in name:
            assert torch.equal(tensor, rebuilt.policy.base.model.state_dict()[name])
    for each in (rebuilt, full):
        torch.testing.assert_close(second_step_alone(each), expected, atol=TOLERANCE, rtol=0)


@each_setting("partitioned_checkpoints")
def test_a_model_without_agents_stays_partitioned_and_serves_new_ones(ranks: Ranks) -> None:
    expected = second_step_alone(make_agent())
    for rank in ranks:
        torch.testing.assert_close(rank["late"], expected, atol=TOLERANCE, rtol=0)


def in_parts(case: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ranks", [("zero3_in_parts", case)], indirect=True, ids=[""])


def same(given: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(given) == len(wanted) and all(map(torch.equal, given, wanted))


@in_parts("rollouts_in_parts")
@pytest.mark.parametrize("name", ["tied", "untied_recomputed"])
def test_rollouts_in_parts_are_those_of_a_single_process(ranks: Ranks, name: str) -> None:
    agent = agent_on(**MODELS[name])
    for number, rank in enumerate(ranks):
        found, expected = rank[name], rolled_out(agent, number)
        expected["turns"] = turns(agent, 1 + number, TURNS_OF_RANK[number])
        for kind in ("one_by_one", "together", "only_rank_1", "turns"):
            assert same(found[kind], expected[kind]), kind
        tokens, logps = found["sampled"]
        assert same(tokens, expected["sampled"][0])
        torch.testing.assert_close(logps, expected["sampled"][1], atol=1e-4, rtol=0)
    data().learned_by(agent)
    for rank in ranks:
        torch.testing.assert_close(rank[name]["weights"], weights(agent), atol=3e-5, rtol=0)
        assert same(rank[name]["answer"], answers(agent, 1))


@in_parts("rollouts_in_parts")
@pytest.mark.parametrize("name", ["tied", "untied_recomputed"])
def test_rollouts_in_parts_put_one_module_together_at_a_time(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        assert rank[name]["whole"] == rank[name]["largest"] < rank[name]["elements"]["all"] / 2
        assert rank[name]["elements"]["whole"] == 0
        assert "outside of agent.rollout()" in rank[name]["refusal"]
    # All ranks run as often as any; of a turn only what is new is run.
    assert len({len(rank[name]["columns"]) for rank in ranks}) == 1
    for rank in ranks:
        assert sorted(rank[name]["turn_columns"])[-2] <= 3


@in_parts("resampled_in_parts")
def test_ranks_decide_outside_of_rollouts_to_draw_further_seeds(ranks: Ranks) -> None:
    for number, rank in enumerate(ranks):
        played, announced = rank["seeds"]
        assert played == announced, "two batches, on both ranks"
        assert rank["metrics"]["resamples"] == 1.0
        assert rank["metrics"]["zero_variance_share"] == (0.5, 0.0)[number]
        assert rank["steps"] == (16, 32)[number]
        assert rank["rewards"].sum(1).tolist() == [0.0, 1.0] * 4
        assert rank["learned"]["grad_norm"] > 0
        assert rank["learned"] == ranks[0]["learned"]


@each_setting("partition_refusals")
def test_what_does_not_go_together_with_parts_is_refused(ranks: Ranks) -> None:
    parts = {
        "head": "include the head (lm_head)",
        "dora": "lora_config.use_dora is True",
        "modules_to_save": "lora_config.modules_to_save is ['norm']",
        "compiled": "torch_compiler is 'default'",
        "offloaded": "activation_offload is True, but with ZeRO stage 3",
        "auto": "micro_batch_size_per_gpu is 'auto', but with ZeRO stage 3",
        "eight_bits": "optimizer is 'adamw_8bit', but accelerator asks for ZeRO stage 3",
        "in_use": "serves other agents without it",
        "elsewhere": "create_llm_accelerator",
        "without": "accelerator is not for ZeRO stage 3",
    }
    for rank in ranks:
        assert rank.keys() == parts.keys()
        for name, message in rank.items():
            assert parts[name] in message
