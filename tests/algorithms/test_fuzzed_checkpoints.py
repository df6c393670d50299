"""Damage anywhere in a checkpoint: it is refused with ValueError, or what is loaded can be used."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_helpers import lora, make_agent, small_model, train
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.algorithms import GRPO
from agilerl.llm.checkpoint.optimizer_shards import Fragment, write_shard
from agilerl.llm.config import CosineLRScheduleConfig

MARKER = "attributes.pt"
Keys = tuple[Any, ...]
VALUES: list[Any] = [
    None, True, -1, 0, 3, 1.5, float("nan"), "x", "", [], [None], ["x", 1], {}, {"x": 1}, {0: {}},
    (), (1, 2), torch.zeros(2), torch.zeros(0), torch.tensor(1, dtype=torch.uint8),
    torch.zeros(1).expand(10**9),
]  # fmt: skip
DROP = object()


def small_agent(**changes: Any) -> GRPO:
    schedule = CosineLRScheduleConfig(20, warmup_proportion=0.25)
    network = {"model": small_model(layers=1)} | changes
    config = lora(target_modules=["q_proj"])
    return make_agent(lora_config=config, cosine_lr_schedule_config=schedule, **network)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with adapters in folders, in the attributes, and the optimizer in shards."""
    agent = small_agent()
    train(agent)
    folder = tmp_path_factory.mktemp("saved")
    paths = {name: folder / name for name in ("folders", "full", "shards")}
    for name, path in paths.items():
        agent.save_checkpoint(path, lora_only=name != "full")
    content = torch.load(paths["shards"] / MARKER, weights_only=True)
    moments = content["optimizer"]["optimizer"].pop("state")
    content["optimizer"]["optimizer"]["state"] = {}
    torch.save(content | {"optimizer_shards": 2}, paths["shards"] / MARKER)
    for rank in range(2):
        fragments = {}
        for number, entry in moments.items():
            half = entry["exp_avg"].numel() // 2
            cut = slice(half) if rank == 0 else slice(half, None)
            flat = {n: entry[n].flatten()[cut] for n in ("exp_avg", "exp_avg_sq")}
            flat["step"] = entry["step"]
            fragments[number] = Fragment(tuple(entry["exp_avg"].shape), half * rank, flat)
        write_shard(paths["shards"], rank, fragments)
    return paths


@pytest.fixture(scope="module")
def agent() -> GRPO:
    return small_agent()


def entries(content: Any, path: Keys = ()) -> Iterator[Keys]:
    """Paths of everything in nested dicts and lists; of long ones the first few."""
    inner: list[Any] = []
    if isinstance(content, dict):
        inner = list(content)
    elif isinstance(content, list | tuple):
        inner = list(range(len(content)))[:3]
    for key in inner:
        yield (*path, key)
        yield from entries(content[key], (*path, key))


def damage(content: Any, path: Keys, value: Any) -> Any:
    """A copy with another value, or none, at a path."""
    content = copy.deepcopy(content)
    holders = [content]
    for key in path[:-1]:
        holders.append(holders[-1][key])
    holder = holders[-1]
    if isinstance(holder, tuple):
        changed = [item for i, item in enumerate(holder) if value is not DROP or i != path[-1]]
        if value is not DROP:
            changed[path[-1]] = value
        holders[-2][path[-2]] = tuple(changed)
    elif value is DROP:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return content


REFUSALS = (ValueError, FileNotFoundError)


def survives(agent: GRPO, run: Path, learns: bool = True) -> None:
    """Both ways of loading refuse it, or give an agent that learns and can be saved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            agent.load_checkpoint(run, load_optimizer=True)
        except REFUSALS:
            pass
        else:
            if learns:
                train(agent)
        try:
            loaded = GRPO.load(run, actor_network=agent.policy.base.model)
        except REFUSALS:
            return
        loaded.save_checkpoint(run.with_name("again"))
        loaded.clean_up()


def copied(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(source, tmp_path_factory.mktemp("run") / "run"))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), name=st.sampled_from(["folders", "full", "shards"]))
def test_damaged_attributes(
    saved: dict[str, Path],
    agent: GRPO,
    tmp_path_factory: pytest.TempPathFactory,
    data: Any,
    name: str,
) -> None:
    run = copied(saved[name], tmp_path_factory)
    content = torch.load(run / MARKER, weights_only=True)
    path = data.draw(st.sampled_from(list(entries(content))))
    value = data.draw(st.sampled_from([DROP, *VALUES]))
    torch.save(damage(content, path, value), run / MARKER)
    survives(agent, run)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_damaged_adapter_configs(
    saved: dict[str, Path], agent: GRPO, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    run = copied(saved["folders"], tmp_path_factory)
    file = run / "actor" / "adapter_config.json"
    content = json.loads(file.read_text())
    path = data.draw(st.sampled_from(list(entries(content))))
    plain = [value for value in VALUES if not isinstance(value, torch.Tensor)]
    value = data.draw(st.sampled_from([DROP, *plain]))
    file.write_text(json.dumps(damage(content, path, value), skipkeys=True))
    survives(agent, run)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(
        [
            ("folders", MARKER),
            ("folders", "actor/adapter_model.safetensors"),
            ("folders", "actor/adapter_config.json"),
            ("shards", "save_checkpoint/optimizer_rank_00001.safetensors"),
        ]
    ),
    start=st.floats(0, 1),
    length=st.integers(1, 4),
    cut=st.booleans(),
)
def test_damaged_bytes(
    saved: dict[str, Path],
    agent: GRPO,
    tmp_path_factory: pytest.TempPathFactory,
    name: tuple[str, str],
    start: float,
    length: int,
    cut: bool,
) -> None:
    run = copied(saved[name[0]], tmp_path_factory)
    content = bytearray((run / name[1]).read_bytes())
    at = int(start * (len(content) - length))
    for place in range(at, at + length):
        content[place] ^= 0xFF
    (run / name[1]).write_bytes(content[:at] if cut else content)
    survives(agent, run, learns=False)  # a changed number may be any number
