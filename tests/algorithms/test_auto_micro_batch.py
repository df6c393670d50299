"""``micro_batch_size_per_gpu="auto"``: what the free memory has room for, chosen once."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from agent_helpers import lora, make_agent, small_model, train, trained, weights
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agilerl.algorithms import GRPO
from agilerl.algorithms.checkpoint.load import read_saved_agent
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.distributed import Ranks
from agilerl.llm.memory import auto_micro_batch
from agilerl.llm.memory.auto_micro_batch import (
    LEFT_FREE,
    choose_micro_batch_size,
    fitting_rows,
    free_memory,
)
from agilerl.llm.memory.settings import MemorySettings
from agilerl.utils import estimate_memory

PLENTY = 2**50
SIZES = MemorySettings(8, 56, prompts=3, group_size=4, batch_size=12, gradient_checkpointing=False)


def set_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(auto_micro_batch, "free_memory", lambda device, ranks: free)


def free_for(rows: int, settings: MemorySettings = SIZES) -> int:
    """Free memory in which so many sequences just fit, after the optimizer's first step."""
    found = estimate_memory(small_model(), replace(settings, micro_batch_size_per_gpu=rows))
    return int((found.update_peak - found.fixed) / (1 - LEFT_FREE)) + 1


def test_the_share_or_the_largest_power_of_two_that_fits_is_taken() -> None:
    model = small_model()
    all_fit, eight_fit = free_for(12), free_for(8)
    for free, rows in ((all_fit, 12), (all_fit - 2, 8), (eight_fit, 8), (eight_fit - 2, 4)):
        assert fitting_rows(model, SIZES, free, True)[0] == rows
    # The optimizer's state counts while it is yet to be made.
    assert fitting_rows(model, SIZES, eight_fit, False)[0] == 4


@pytest.mark.parametrize(("free", "rows"), [(0, 1), (PLENTY, 4)])
def test_an_update_is_that_of_the_number_given(
    free: int, rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_free(monkeypatch, free)
    with caplog.at_level(logging.INFO, "agilerl"):
        found, metrics = trained(micro_batch_size_per_gpu="auto")
    assert f"micro_batch_size_per_gpu='auto' is {rows}: " in caplog.text
    given, same = trained(micro_batch_size_per_gpu=rows)
    assert torch.equal(found, given)
    assert metrics["mean_loss"] == same["mean_loss"]


def test_sequence_packing_names_the_number_that_leaves_nothing_to_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agilerl.checks._warned", set())
    set_free(monkeypatch, PLENTY)
    trained(micro_batch_size_per_gpu="auto", use_sequence_packing=True)
    assert "no effect: micro_batch_size_per_gpu='auto' chose 4, which is all" in caplog.text
    assert "below batch_size" in caplog.text


def test_rows_count_as_long_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as long as those of the first batch; and of several turns a completion is longer."""
    set_free(monkeypatch, 3 * 2**20)
    sizes: dict[str, Any] = {"group_size": 4, "batch_size": 8, "lora_config": lora()}
    chosen = []
    for longest, turns in ((64, False), (512, False), (512, True)):
        agent = make_agent(micro_batch_size_per_gpu="auto", max_model_len=longest, **sizes)
        agent.choose_micro_batch_size(several_turns=turns)
        chosen.append(agent.rank_micro_batch_size())
    assert chosen[0] > chosen[1] > chosen[2]


def test_clones_checkpoints_and_resumed_runs_keep_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free(monkeypatch, 0)
    agent = make_agent(micro_batch_size_per_gpu="auto")
    assert agent.clone().chosen_micro_batch_size is None
    train(agent)
    agent.save_checkpoint(tmp_path / "agent")
    set_free(monkeypatch, PLENTY)
    resumed = make_agent(micro_batch_size_per_gpu="auto")
    read_saved_agent(resumed, tmp_path / "agent").restore()
    loaded = GRPO.load(tmp_path / "agent", actor_network=small_model())
    others = [agent.clone(), resumed, loaded]
    train(agent)
    for other in others:
        train(other)
        assert other.micro_batch_size_per_gpu == "auto"
        assert other.update_config().micro_batch_size == 1
        assert torch.equal(weights(other), weights(agent))


def test_a_checkpoint_from_before_there_was_a_number_loads(tmp_path: Path) -> None:
    agent = make_agent(micro_batch_size_per_gpu="auto")
    agent.save_checkpoint(tmp_path / "agent")
    file = tmp_path / "agent" / "attributes.pt"
    attributes = torch.load(file, weights_only=True)
    del attributes["history"]["chosen_micro_batch_size"]
    torch.save(attributes, file)
    loaded = GRPO.load(tmp_path / "agent", actor_network=small_model())
    assert loaded.chosen_micro_batch_size is None


class SmallerOther(Ranks):
    """Rank 0 of two, of which the other has room for two sequences."""

    world_size = 2

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clamp(min=-2)


def test_all_ranks_take_the_smallest_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_free(monkeypatch, PLENTY)
    with caplog.at_level(logging.INFO, "agilerl"):
        found = choose_micro_batch_size(
            small_model(), SIZES, SmallerOther(), has_optimizer_state=True
        )
    assert found == 2
    assert "another process has room for 2 only" in caplog.text


def test_processes_share_the_memory_of_a_machine() -> None:
    alone, one_of_two = (free_memory(torch.device("cpu"), r) for r in (Ranks(), SmallerOther()))
    assert 0 < one_of_two < 0.75 * alone < psutil.virtual_memory().total
    with pytest.raises(ValueError, match=r"'auto', but .* 'mps' cannot be read; pass a number"):
        free_memory(torch.device("mps"), Ranks())


def test_a_model_that_cannot_be_estimated_is_refused_by_name() -> None:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    settings = replace(SIZES, lora_config=lora())
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM cannot be estimated.*pass a number"):
        fitting_rows(Qwen3MoeForCausalLM(config), settings, PLENTY, True)


def test_combinations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"is 'auto' and micro_batch_tokens is 9; .* one of them"):
        make_agent(micro_batch_size_per_gpu="auto", micro_batch_tokens=9)
    search = HyperparameterConfig(micro_batch_size_per_gpu=RLParameter(1, 4, dtype=int))
    arguments: dict[str, Any] = {"hp_config": search, "micro_batch_size_per_gpu": "auto"}
    with pytest.raises(ValueError, match="which is 'auto'; leave it out of hp_config, or pass"):
        make_agent(**arguments)
    with pytest.raises(ValueError, match="which is 'auto'; leave it out of hp_config, or pass"):
        GRPO.population(2, actor_network=small_model(), **arguments)
