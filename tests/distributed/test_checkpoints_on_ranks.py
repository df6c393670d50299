"""The checkpoint grid under DeepSpeed and without: what lies on disk, and that every cell loads."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_and_batches import data, every_weight, make_agent, weights
from case_settings import each_setting, settings_of
from cases_checkpoints import (
    ATTENTION_RANK_3,
    CELLS,
    LOADERS,
    cells_of,
    learn,
    loaded_into,
    third_step,
    trained_agent,
)
from peft import PeftModel
from safetensors.torch import load_file, save_file

from agilerl.algorithms import GRPO
from agilerl.testing import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.process]

Ranks = list[dict[str, Any]]
TOLERANCE = 1e-6
WRITERS = settings_of("checkpoint_grid")
SHARDS = {f"save_checkpoint/optimizer_rank_0000{rank}.safetensors" for rank in (0, 1)}
ADAPTERS = {
    f"{role}/{name}"
    for role in ("actor", "reference")
    for name in ("adapter_config.json", "adapter_model.safetensors")
}


@functools.cache
def expected(save_optimizer: bool) -> torch.Tensor:
    """A single process after three steps, the optimizer afresh for the third if not saved."""
    agent = trained_agent()
    if not save_optimizer:
        agent.reinit_optimizers()
    return third_step(agent)


@each_setting("checkpoint_grid")
def test_every_cell_loads_on_ranks_whoever_saved_it(ranks: Ranks) -> None:
    assert ranks[0]["third"].keys() == ranks[1]["third"].keys()
    assert len(ranks[0]["third"]) >= 8
    for rank in ranks:
        for (_, (_, save_optimizer), _), values in rank["third"].items():
            torch.testing.assert_close(values, expected(save_optimizer), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("how", LOADERS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("writer", WRITERS)
def test_every_cell_of_ranks_loads_in_a_single_process(
    folder: Path, writer: str, cell: tuple[bool, bool], how: str
) -> None:
    agent = LOADERS[how](cells_of(folder, writer)[cell])
    torch.testing.assert_close(third_step(agent), expected(cell[1]), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("writer", ["alone", *WRITERS])
def test_what_lies_on_disk(folder: Path, writer: str, cell: tuple[bool, bool]) -> None:
    lora_only, save_optimizer = cell
    path = cells_of(folder, writer)[cell]
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    sharded = save_optimizer and writer in ("zero2", "zero3")
    wanted = {"attributes.pt"} | (ADAPTERS if lora_only else set()) | (SHARDS if sharded else set())
    assert {name for name in found if not name.endswith("README.md")} == wanted
    attributes = torch.load(path / "attributes.pt", weights_only=True)
    assert ("optimizer" in attributes) == save_optimizer
    if save_optimizer:
        assert bool(attributes["optimizer"]["optimizer"]["state"]) != sharded
    if sharded:
        for name in SHARDS:
            kinds = {key.partition(".")[2] for key in load_file(path / name)}
            assert kinds == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("writer", WRITERS)
def test_plain_peft_reads_the_actor(folder: Path, writer: str) -> None:
    path = cells_of(folder, writer)[True, True]
    agent = loaded_into(path)
    base = tiny_model(hidden_size=32, layers=1)
    ids = data().ids[0]
    with torch.no_grad():
        plain = PeftModel.from_pretrained(base, path / "actor")(input_ids=ids).logits
        torch.testing.assert_close(agent.actor(input_ids=ids).logits, plain)


@each_setting("merged_lora_configs")
def test_merged_lora_configs(ranks: Ranks, folder: Path, request: pytest.FixtureRequest) -> None:
    """The function is the checkpoint's; weights and next step are those of a single process."""
    setting = request.node.callspec.params["ranks"][0]
    alone = make_agent(lora_config=ATTENTION_RANK_3)
    learn(alone)
    alone.load_checkpoint(folder / f"small-{setting}", merge_lora_configs=True)
    close = functools.partial(torch.testing.assert_close, atol=TOLERANCE, rtol=0)
    for rank in ranks:
        small, merged = rank["functions"]
        assert merged.keys() == {"actor", "reference"}
        for role, expected_logits in small.items():
            torch.testing.assert_close(merged[role], expected_logits, atol=1e-4, rtol=0)
    for when in ("loaded", "learned"):
        assert torch.equal(ranks[0][when], ranks[1][when])
        close(ranks[0][when], every_weight(alone))
        learn(alone)
    assert (ranks[0]["learned"] - ranks[0]["loaded"]).abs().max() > 100 * TOLERANCE


@each_setting("saved_unwrapped")
def test_a_checkpoint_of_an_unwrapped_agent(
    ranks: Ranks, folder: Path, request: pytest.FixtureRequest
) -> None:
    """It goes on as the agent itself does, wherever loaded, and no shards are left of before."""
    for rank in ranks:
        loaded, itself = rank["third"]
        assert torch.equal(loaded, itself)
        torch.testing.assert_close(itself, expected(True), atol=TOLERANCE, rtol=0)
    path = folder / f"unwrapped-{request.node.callspec.params['ranks'][0]}"
    assert not (path / "save_checkpoint").exists()
    torch.testing.assert_close(
        third_step(loaded_into(path)), expected(True), atol=TOLERANCE, rtol=0
    )


@each_setting("failing_save")
def test_a_rank_that_cannot_write_fails_the_save_on_all(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank == {"beside": ["failing"], "same": True}


@each_setting("unreadable_on_one_rank")
def test_a_rank_that_cannot_read_refuses_on_all(ranks: Ranks) -> None:
    for rank in ranks:
        assert "nowhere" in rank["error"] and rank["moved"]


def delete(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def tamper(file: Path) -> None:
    save_file(load_file(file), file, metadata={"places": '{"0": {"shape": [1], "start": 7}}'})


def take_another(file: Path) -> None:
    shutil.copy(file.with_name("optimizer_rank_00000.safetensors"), file)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (delete, "optimizer_rank_00001.safetensors is damaged: it is missing"),
        (truncate, "optimizer_rank_00001.safetensors is damaged"),
        (empty, "optimizer_rank_00001.safetensors is damaged"),
        (tamper, "optimizer_rank_00001.safetensors is damaged"),
        (take_another, "lack elements of the parameters .* or hold them twice"),
    ],
)
def test_damaged_shards(folder: Path, tmp_path: Path, damage: Any, says: str) -> None:
    path = tmp_path / "run"
    shutil.copytree(cells_of(folder, "zero2")[True, True], path)
    damage(path / "save_checkpoint" / "optimizer_rank_00001.safetensors")
    agent = make_agent()
    before = weights(agent)
    with pytest.raises(ValueError, match=f"{says}.*another checkpoint"):
        agent.load_checkpoint(path, load_optimizer=True)
    assert torch.equal(weights(agent), before)
    with pytest.raises(ValueError, match=says):
        GRPO.load(path, actor_network=tiny_model(hidden_size=32, layers=1))
    agent.load_checkpoint(path)
    assert not torch.equal(weights(agent), before), "the weights are whole"
