"""What two ranks run of the checkpoint grid: every cell saved, and loaded by other engines."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_and_batches import COSINE, PROMPTS_OF_RANK, data, every_weight, make_agent, weights
from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.llm.checkpoint import checkpoint_files
from agilerl.testing import tiny_model

CELLS = list(product([True, False], [True, False]))
BOTH = ("load_checkpoint", "load")
LOADED = {
    "ddp": list(product(["alone", "ddp"], BOTH)),
    "zero2": list(product(["alone", "ddp", "zero2"], BOTH)),
    # Every base is partitioned anew, which takes its time.
    "zero3": [("zero2", "load_checkpoint"), ("zero2", "load"), ("zero3", "load_checkpoint")],
}
"""Whose cells are loaded by ranks under a setting, and how."""
ALL_LAYERS_RANK_2 = LoraConfig(
    r=2, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM"
)
ATTENTION_RANK_3 = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def cells_of(folder: Path, writer: str) -> dict[tuple[bool, bool], Path]:
    """Where an engine's four cells are, by ``(lora_only, save_optimizer)``."""
    return {cell: folder / f"cells-{writer}" / "-".join(map(str, cell)) for cell in CELLS}


def trained_agent(accelerator: Any = None) -> GRPO:
    """After two steps."""
    agent = make_agent(accelerator, cosine_lr_schedule_config=COSINE)
    for _ in range(2):
        learn(agent)
    return agent


def learn(agent: GRPO) -> None:
    """This process's part of the data; in a single process all of it."""
    rank = agent.accelerator and agent.accelerator.process_index
    part = data() if rank is None else data().of(PROMPTS_OF_RANK[rank])
    part.learned_by(agent)


def third_step(agent: GRPO) -> torch.Tensor:
    learn(agent)
    found = weights(agent)
    agent.clean_up()
    return found


def loaded_into(path: Path, accelerator: Any = None) -> GRPO:
    """An agent made for itself, then loaded with optimizer (if there is one)."""
    agent = make_agent(accelerator, cosine_lr_schedule_config=COSINE)
    learn(agent)  # so that there are moments to be overwritten
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no optimizer state was loaded")
        agent.load_checkpoint(path, load_optimizer=True)
    return agent


def rebuilt(path: Path, accelerator: Any = None) -> GRPO:
    """An agent made from the checkpoint; adapters alone need the base."""
    base = None if path.name.startswith("False") else tiny_model(hidden_size=32, layers=1)
    return GRPO.load(path, accelerator=accelerator, actor_network=base)


LOADERS: dict[str, Callable[..., GRPO]] = {"load_checkpoint": loaded_into, "load": rebuilt}


def setting_of(accelerator: Any) -> str:
    plugin = accelerator.deepspeed_plugin
    return "ddp" if plugin is None else f"zero{plugin.zero_stage}"


def checkpoint_grid(accelerator: Any) -> dict[str, Any]:
    """Every cell is saved by these ranks, by a single process and under other settings; all load.

    Returns the weights after a third step by what wrote, its cell, and how it was loaded.
    """
    folder, own = Path(sys.argv[1]), setting_of(accelerator)
    agent = trained_agent(accelerator)
    for (lora_only, save_optimizer), path in cells_of(folder, own).items():
        agent.save_checkpoint(path, lora_only=lora_only, save_optimizer=save_optimizer)
    agent.clean_up()
    if own == "ddp" and accelerator.is_main_process:
        alone = trained_agent()
        for (lora_only, save_optimizer), path in cells_of(folder, "alone").items():
            alone.save_checkpoint(path, lora_only=lora_only, save_optimizer=save_optimizer)
    torch.distributed.barrier()
    return {
        "third": {
            (writer, cell, how): third_step(LOADERS[how](path, accelerator))
            for writer, how in LOADED[own]
            for cell, path in cells_of(folder, writer).items()
        }
    }


def merged_lora_configs(accelerator: Any) -> dict[str, Any]:
    """A checkpoint of other rank and targets goes into an agent that trained already."""
    path = Path(sys.argv[1]) / f"small-{setting_of(accelerator)}"
    small = make_agent(accelerator, lora_config=ALL_LAYERS_RANK_2)
    learn(small)
    small.save_checkpoint(path)
    agent = make_agent(accelerator, lora_config=ATTENTION_RANK_3)
    learn(agent)
    agent.load_checkpoint(path, merge_lora_configs=True)
    functions = [
        {role: logits(each, role) for role in each.policy.roles} for each in (small, agent)
    ]
    loaded = every_weight(agent)
    learn(agent)
    return {"functions": functions, "loaded": loaded, "learned": every_weight(agent)}


def logits(agent: GRPO, role: str) -> torch.Tensor:
    """What one of an agent's adapters computes."""
    with torch.no_grad(), agent.select_adapter(role):
        found: torch.Tensor = agent.actor(input_ids=data().ids[0]).logits
    return found


def saved_unwrapped(accelerator: Any) -> dict[str, Any]:
    """A checkpoint is replaced while its agent is unwrapped, and goes into a wrapped one."""
    path = Path(sys.argv[1]) / f"unwrapped-{setting_of(accelerator)}"
    agent = trained_agent(accelerator)
    agent.save_checkpoint(path)
    agent.unwrap_models()
    agent.save_checkpoint(path)
    torch.distributed.barrier()
    agent.wrap_models()
    return {"third": [third_step(each) for each in (loaded_into(path, accelerator), agent)]}


def failing_save(accelerator: Any) -> dict[str, Any]:
    """Rank 1 cannot write its file: no rank goes on alone, and the earlier checkpoint stays."""
    path = Path(sys.argv[1]) / "failing"
    agent = trained_agent(accelerator)
    agent.save_checkpoint(path)
    before = weights(agent)
    learn(agent)

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="No space left"):
        if accelerator.process_index == 1:
            patch.setattr(checkpoint_files, "write_shard", full)
        agent.save_checkpoint(path)
    torch.distributed.barrier()
    beside = sorted(entry.name for entry in path.parent.iterdir() if "failing" in entry.name)
    agent.load_checkpoint(path, load_optimizer=True)
    return {"beside": beside, "same": torch.equal(weights(agent), before)}


def unreadable_on_one_rank(accelerator: Any) -> dict[str, Any]:
    """A file that rank 1 does not see: both ranks refuse, and are as they were."""
    path = Path(sys.argv[1]) / "unreadable"
    agent = trained_agent(accelerator)
    agent.save_checkpoint(path)
    before = weights(agent)
    elsewhere = path if accelerator.process_index == 0 else path / "nowhere"
    with pytest.raises(FileNotFoundError) as caught:
        agent.load_checkpoint(elsewhere, load_optimizer=True)
    learn(agent)
    return {"error": str(caught.value), "moved": not torch.equal(weights(agent), before)}


CHECKPOINT_CASES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "checkpoint_grid": checkpoint_grid,
    "merged_lora_configs": merged_lora_configs,
    "saved_unwrapped": saved_unwrapped,
    "failing_save": failing_save,
    "unreadable_on_one_rank": unreadable_on_one_rank,
}
