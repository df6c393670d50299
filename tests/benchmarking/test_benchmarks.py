"""The benchmarks run, on shapes that only show that they do, and their arithmetic is right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bench
import gpu_sides
import gpu_step
import grpo_step
import logprob_memory
import memory_estimate
import multiturn_cache
import population
import pytest
import time_shares
import token_cost
from report import count
from vllm_rollout import Workload
from workloads import WORKLOADS, completion_lengths, shrunk

ROOT = Path(__file__).parents[2]
TINY = shrunk(WORKLOADS["tiny"])


@pytest.mark.slow
@pytest.mark.process
def test_the_command_writes_results(tmp_path: Path) -> None:
    words = ["benchmarking/bench.py", "--quick", "--only", "token_cost", "--out", str(tmp_path)]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    result = json.loads((tmp_path / bench.SCRIPTS["token_cost"]).read_text())
    assert result["versions"]["torch"] and result["cpu"] and result["threads"] == 1
    found = result["workloads"]["completion length"]
    assert 0.0 <= found["stolen_time_share"] <= 1.0
    costs = found["factors"]["2"]
    assert costs["tokens"] == 2 * TINY.sequences * TINY.new_tokens
    assert costs["median_seconds"] > 0 and costs["memory_bytes"]["peak"] > 0


def test_every_script_of_the_command_exists() -> None:
    for name in bench.SCRIPTS:
        words = bench.command(name, quick=True, out=Path("results"), trl=False)
        assert (ROOT / words[1]).is_file() and "--quick" in words
    words = bench.command("grpo_step", quick=False, out=Path("results"), trl=False)
    assert grpo_step.parse_arguments(words[2:]).side == "agilerl"


def test_commands_of_the_page_name_every_script() -> None:
    page = (ROOT / "benchmarking" / "README.md").read_text()
    alone = set(re.findall(r'"--only (\w+)"', page))
    assert alone == bench.SCRIPTS.keys()
    for script in re.findall(r"\.venv/bin/python ([\w/]+\.py)", page):
        assert (ROOT / script).is_file()


def test_time_shares_of_a_step() -> None:
    found = time_shares.measure(shrunk(WORKLOADS["uneven"]), steps=1, threads=1)
    assert list(found["share"]) == list(time_shares.ALL_KINDS)
    assert sum(found["share"].values()) == pytest.approx(1.0)
    assert min(found["share"].values()) >= 0 and found["share"]["matrix products"] > 0
    assert any(name.startswith("aten::") for name in found["largest_operators"])


def test_shares_are_of_the_step_without_the_profiler() -> None:
    found = time_shares.shares({"aten::mm": 0.375, "aten::bmm": 0.125, "aten::cat": 0.25})
    assert (found["matrix products"], found["python and dispatch"]) == (0.5, 0.25)
    found = time_shares.shares({"aten::addmm_": 1.5, "aten::cat": 0.5})
    assert (found["matrix products"], found["python and dispatch"]) == (0.75, 0.0)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ("aten::addmm", "matrix products"),
        ("aten::addmm_", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention kernels"),
        ("aten::cat", "copies"),
        ("aten::copy_", "copies"),
        ("aten::transpose", "views and allocation"),
        ("aten::silu", "elementwise and reductions"),
        ("autograd::engine::evaluate_function: AddmmBackward0", None),
    ],
)
def test_kinds_of_operators(event: str, kind: str | None) -> None:
    assert time_shares.kind_of(event) == kind


def test_every_side_of_the_log_probs_agrees() -> None:
    case, sides = replace(logprob_memory.Case(512, 48), hidden_size=32), ("agilerl", "plain")
    found = {side: logprob_memory.memory(side, case, 1) for side in sides}
    logprob_memory._check_equal(found)
    assert found["plain"]["logp_mean"] < 0 and found["plain"]["gradient_norm"] > 0
    timed = logprob_memory.seconds(sides, case, 1)
    assert list(timed) == [*sides] and {len(each) for each in timed.values()} == {case.rounds}
    found["plain"]["logp_mean"] *= 1.001
    with pytest.raises(RuntimeError, match="logp_mean"):
        logprob_memory._check_equal(found)


def test_the_estimate_is_set_against_the_measured_step_with_the_highest_peak() -> None:
    measured = [{"rollout": 40, "update": 60}, {"rollout": 50, "update": 100}]
    predicted = [{"rollout": 1, "update": 1}, {"rollout": 60, "update": 90}]
    found = memory_estimate.summary(TINY, measured, predicted)
    assert found["measured"] == {"rollout": 50, "update": 100, "peak": 100}
    assert found["ratio"] == {"rollout": 1.2, "update": 0.9, "peak": 0.9}


def test_the_memory_of_a_step_is_measured_and_predicted() -> None:
    (measured,) = memory_estimate.measure(TINY, steps=1, threads=1)
    predicted = memory_estimate.predict(TINY, 1)
    assert list(measured) == list(predicted) == ["rollout", "update"]
    assert min(predicted.values()) > 0


def test_turns_are_played_alike_both_ways() -> None:
    few = replace(
        multiturn_cache.WORKLOADS["demo-3-turns"], prompts=2, group_size=2, prompt_tokens=16
    )
    agent = multiturn_cache.build_agent(few)
    kept, recomputed = (multiturn_cache.play(agent, few, side) for side in multiturn_cache.SIDES)
    assert kept["rows"].equal(recomputed["rows"])
    assert sum(kept["tokens_run"]) < sum(recomputed["tokens_run"])


def test_a_population_is_measured() -> None:
    assert population.measure_memory(TINY, 2, "batched", 1)["peak"] > 0
    seconds = population.measure_time(replace(TINY, warmup_steps=1, measured_steps=1), 2, 1)
    assert [len(taken) for taken in seconds.values()] == [1, 1, 1]


def test_a_straight_line_is_found() -> None:
    fit = token_cost.line([1, 2, 4], [12.0, 14.0, 18.0])
    assert fit == pytest.approx({"slope": 2.0, "intercept": 10.0, "largest_deviation": 0.0})
    assert token_cost.line([1, 2, 4], [1.0, 4.0, 16.0])["largest_deviation"] > 0.2


def test_arithmetic_per_token_grows_with_what_is_attended_to() -> None:
    base = replace(TINY, hidden_size=2, layers=1, shortest_prompt=4, longest_prompt=4)
    base = replace(base, vocab_size=10, intermediate_factor=1, new_tokens=2)
    # Weights 7 * 4 and the head 2 * 10; keys and values 2 * 2 of the prompt's 4 tokens and 1 more.
    assert token_cost.arithmetic_per_token(base) == 28 + 20 + 2 * 2 * 5


def test_lengths_of_uneven_completions_are_cut_off_at_both_ends() -> None:
    lengths = completion_lengths(WORKLOADS["uneven"], 0)
    assert len(lengths) == 64 and min(lengths) >= 4 and max(lengths) <= 256
    assert lengths == completion_lengths(WORKLOADS["uneven"], 0)


def test_counts_are_read_from_the_command_line() -> None:
    assert count("3") == 3
    with pytest.raises(Exception, match="0; it must be 1 or more"):
        count("0")


SMALL = Workload("small", hidden_size=32, layers=1, prompts=2, group_size=2, prompt_tokens=8)


@pytest.mark.parametrize("option", ["plain", "gradient_checkpointing"])
def test_the_learn_step_of_the_gpu_runs_on_a_cpu(option: str) -> None:
    step = gpu_sides.Step(replace(SMALL, new_tokens=8), micro_batch_size=2, device="cpu", steps=1)
    found = gpu_sides.measure(option, step)
    assert len(found["seconds"]) == 2 and found["memory_bytes"]["peak"] > 0


def test_an_option_that_is_refused_says_why() -> None:
    step = gpu_sides.Step(replace(SMALL, group_size=1), micro_batch_size=2, device="cpu", steps=1)
    assert "group_size is 1" in gpu_sides.measure("plain", step)["refused"]


def test_flops_of_a_model_that_can_be_counted_by_hand() -> None:
    shape = Workload("hand", vocab_size=10, hidden_size=4, layers=1, heads=2, key_value_heads=1)
    shape = replace(shape, intermediate_size=8, prompts=1, group_size=2, prompt_tokens=4)
    step = gpu_sides.Step(replace(shape, new_tokens=2), micro_batch_size=2, device="cpu", steps=1)
    # q and o 4 x 4, k and v 4 x 2, three of 4 x 8; a prompt of 4 attends to 8 pairs, its two
    # completions to 2 * (4 + 1) each; the head is 4 x 10 for each of 4 tokens.
    weights, head = 16 + 16 + 8 + 8 + 96, 2 * 40 * 4
    once = 2 * weights * 8 + 16 * (8 + 20) + head
    each = 2 * weights * 12 + 16 * (16 + 20) + head
    assert gpu_step.model_flops(step, distinct=True) == 3 * once
    assert gpu_step.model_flops(step, distinct=False) == 3 * each


def test_ratios_are_over_the_plain_case() -> None:
    plain = {"median_seconds": 2.0, "memory_bytes": {"added": 10}}
    other = {"median_seconds": 3.0, "memory_bytes": {"added": 5}}
    found = gpu_step.ratios({"plain": plain, "other": other, "none": {"refused": "no"}})
    assert found["other"] == {"seconds": 1.5, "memory_added": 0.5} and "none" not in found
    assert gpu_step.ratios({"plain": {"out_of_memory": "all of it"}, "other": other}) == {}
