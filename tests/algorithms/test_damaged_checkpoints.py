"""Directories that are no checkpoints, damaged ones, and such as would run code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_helpers import lora, make_agent, randomise, small_model, train, weights
from peft import IA3Config, get_peft_model
from safetensors.torch import load_file, save_file

from agilerl.algorithms import GRPO
from agilerl.llm.checkpoint.atomic_directory import atomic_directory
from agilerl.llm.config import CosineLRScheduleConfig
from agilerl.llm.shared_base import base_tensors

MARKER = "attributes.pt"
TENSORS = Path("actor", "adapter_model.safetensors")
CONFIG = Path("actor", "adapter_config.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    agent = randomise(make_agent())
    train(agent)
    path = tmp_path_factory.mktemp("saved") / "run"
    agent.save_checkpoint(path)
    return path


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def edit_attributes(run: Path, **changes: Any) -> None:
    content = torch.load(run / MARKER, weights_only=True)
    torch.save(content | changes, run / MARKER)


def truncate(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


def state(agent: GRPO) -> list[torch.Tensor]:
    """All that loading may change."""
    base = agent.policy.base.model.get_input_embeddings().weight.detach().clone()
    moments = [v for m in agent.optimizer.state.values() for v in m.values()]
    return [weights(agent), weights(agent, "reference"), base, *(m.clone() for m in moments)]


def refuse(
    run: Path, says: str, error: type[Exception] = ValueError, merge: bool = False, **changes: Any
) -> None:
    """Both ways of loading raise, and the agent is as it was."""
    agent = make_agent(**changes)
    train(agent)
    before, slots = state(agent), dict(agent.policy.slots)
    with pytest.raises(error, match=says):
        agent.load_checkpoint(run, load_optimizer=True, merge_lora_configs=merge)
    assert all(torch.equal(*pair) for pair in zip(state(agent), before, strict=True))
    assert agent.policy.slots == slots and set(agent.policy.model.peft_config) == {*slots.values()}
    assert agent.lora_config is agent.policy.lora_config
    train(agent)
    if not merge:
        with pytest.raises(error, match=says):
            GRPO.load(run, actor_network=small_model())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("file", [MARKER, TENSORS], ids=str)
def test_truncated_files(run: Path, file: Path, share: float) -> None:
    truncate(run / file, share)
    refuse(run, r"(truncated|damaged).*use another checkpoint")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rng_states": [torch.zeros(3)]}, "rng_states are no states of a generator"),
        ({"rng_states": [torch.zeros(3, dtype=torch.uint8)]}, "rng_states are no states"),
        ({"arguments": {"pad_token": "x"}}, r"arguments lack \['pad_token_id', 'lora_config'\]"),
    ],
)
def test_what_only_a_rebuilt_agent_needs(run: Path, changes: dict[str, Any], says: str) -> None:
    edit_attributes(run, **changes)
    with pytest.raises(ValueError, match=rf"damaged.*{says}.*another checkpoint"):
        GRPO.load(run, actor_network=small_model())
    make_agent().load_checkpoint(run)


def test_a_plain_adapter_says_nothing_of_an_agent(run: Path) -> None:
    with pytest.raises(ValueError, match=r"plain PEFT directory.*GRPO\(.*load_checkpoint"):
        GRPO.load(run / "actor", actor_network=small_model())


def test_text_in_place_of_a_file(run: Path) -> None:
    (run / CONFIG).write_text("{not json")
    refuse(run, r"adapter_config.json is damaged.*another checkpoint")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 99}, "format 99.*reads format 2"),
        ({"roles": ["reference"]}, "roles"),
        ({"roles": ["actor", "../../etc"]}, "roles"),
        ({"rng_states": []}, "its rng_states: List should have at least 1 item"),
        ({"arguments": None}, "its arguments: Input should be a valid dictionary .found None"),
        ({"lora_only": False}, "its actor_state_dict: Field required"),
        ({"history": {"index": 0}}, "its history.fitness: Field required"),
        (
            {"rng_states": ["x"]},
            "its rng_states.0: Input should be an instance of Tensor .found 'x'",
        ),
    ],
)
def test_tampered_attributes(run: Path, changes: dict[str, Any], says: str) -> None:
    edit_attributes(run, **changes)
    refuse(run, says)


def test_attributes_of_another_kind(run: Path) -> None:
    torch.save([1, 2], run / MARKER)
    refuse(run, "its content: Input should be a valid dictionary")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.popitem(), "lacks tensors"),
        (lambda t: t.update({next(iter(t)): torch.zeros(2, 2)}), "another shape"),
        (lambda t: t.update({"base_model.model.other": torch.zeros(2)}), "has not"),
    ],
)
@pytest.mark.parametrize("role", ["actor", "reference"])
def test_tampered_tensors(run: Path, role: str, change: Any, says: str) -> None:
    file = run / role / TENSORS.name
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    refuse(run, says)


def test_a_reference_with_a_config_of_its_own(run: Path) -> None:
    file = run / "reference" / CONFIG.name
    file.write_text(file.read_text().replace('"r": 16', '"r": 2'))
    refuse(run, "LoRA configs differ .*r: agent has 16, checkpoint 2")


@pytest.mark.parametrize("lora_only", [True, False])
def test_a_damaged_reference_refuses_the_merge_too(lora_only: bool, tmp_path: Path) -> None:
    agent = randomise(make_agent(lora_config=lora(r=8)))
    agent.save_checkpoint(tmp_path / "run", lora_only)
    if lora_only:
        file = tmp_path / "run" / "reference" / TENSORS.name
        save_file(load_file(file) | {"base_model.model.other": torch.zeros(2)}, file)
    else:
        states = torch.load(tmp_path / "run" / MARKER, weights_only=True)["adapter_state_dicts"]
        states["reference"]["base_model.model.other"] = torch.zeros(2)
        edit_attributes(tmp_path / "run", adapter_state_dicts=states)
    refuse(tmp_path / "run", "reference adapter has tensors", merge=True, lora_config=lora())


def test_targets_that_carry_no_adapter_leave_none_behind(tmp_path: Path) -> None:
    agent = make_agent(lora_config=lora())
    agent.save_checkpoint(tmp_path / "run")
    file = tmp_path / "run" / CONFIG
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"target_modules": ["q_proj", "norm"]}))
    tensors = load_file(tmp_path / "run" / TENSORS)
    of_queries = {name: tensor for name, tensor in tensors.items() if "q_proj" in name}
    save_file(of_queries, tmp_path / "run" / TENSORS)
    before = base_tensors(agent.policy.model).keys()
    with pytest.raises(ValueError, match="not supported"):
        agent.load_checkpoint(tmp_path / "run", merge_lora_configs=True)
    assert base_tensors(agent.policy.model).keys() == before


@pytest.mark.parametrize("change", ["name", "shape", "text"])
def test_a_full_checkpoint_of_a_damaged_base(change: str, tmp_path: Path) -> None:
    randomise(make_agent(model=small_model(seed=5))).save_checkpoint(tmp_path / "run", False)
    full = torch.load(tmp_path / "run" / MARKER, weights_only=True)["actor_state_dict"]
    name = "model.norm.weight"
    full |= {
        "name": {"other": torch.zeros(1)},
        "shape": {name: torch.zeros(1)},
        "text": {name: ""},
    }[change]
    edit_attributes(tmp_path / "run", actor_state_dict=full)
    agent = make_agent()
    before = state(agent)
    says = (
        "instance of Tensor" if change == "text" else "base model is another one than the agent's"
    )
    with pytest.raises(ValueError, match=says):
        agent.load_checkpoint(tmp_path / "run")
    assert all(torch.equal(*pair) for pair in zip(state(agent), before, strict=True))


def damage_optimizer(content: dict[str, Any], how: str) -> None:
    optimizer = content["optimizer"]["optimizer"]
    if how == "missing":
        del content["optimizer"]["scheduler"]
    elif how == "groups":
        optimizer["param_groups"][0]["params"].pop()
    elif how == "text":
        content["optimizer"] = "Adam"
    else:
        optimizer["state"][0]["exp_avg"] = torch.zeros(1, 1)


@pytest.mark.parametrize("how", ["missing", "groups", "text", "shape"])
def test_a_damaged_optimizer(run: Path, how: str) -> None:
    content = torch.load(run / MARKER, weights_only=True)
    damage_optimizer(content, how)
    torch.save(content, run / MARKER)
    schedule = CosineLRScheduleConfig(20, warmup_proportion=0.25)
    agent = make_agent(cosine_lr_schedule_config=schedule)
    train(agent)
    before = state(agent)
    with pytest.raises(ValueError, match=r"its optimizer[.\w]*: |optimizer state is"):
        agent.load_checkpoint(run, load_optimizer=True)
    assert all(torch.equal(*pair) for pair in zip(state(agent), before, strict=True))
    agent.load_checkpoint(run)


def test_missing_files(run: Path, tmp_path: Path) -> None:
    (run / TENSORS).unlink()
    refuse(run, "holds no adapter_model.safetensors", FileNotFoundError)
    refuse(tmp_path / "nowhere", "holds no checkpoint", FileNotFoundError)


def test_arguments_this_version_does_not_know(run: Path) -> None:
    content = torch.load(run / MARKER, weights_only=True)
    edit_attributes(run, arguments=content["arguments"] | {"quantum": True})
    with pytest.raises(ValueError, match=r"does not take: \['quantum'\]"):
        GRPO.load(run, actor_network=small_model())
    # Of a version that saved the default of what is not saved here.
    edit_attributes(run, arguments=content["arguments"] | {"quantization_config": None})
    GRPO.load(run, actor_network=small_model())


def test_a_directory_of_another_peft_method(tmp_path: Path) -> None:
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    get_peft_model(small_model(), config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is that of a IA3 adapter; only LoRA"):
        make_agent(lora_config=lora()).load_checkpoint(tmp_path)


class Bomb:
    """Touches a file when unpickled without care."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_pickled_code_is_refused_and_not_run(run: Path, tmp_path: Path, how: str) -> None:
    trace = tmp_path / "trace"
    if how == "torch":
        edit_attributes(run, history=Bomb(trace))
    else:
        (run / MARKER).write_bytes(pickle.dumps({"format": 1, "x": Bomb(trace)}))
    refuse(run, r"cannot be loaded safely.*another checkpoint")
    assert not trace.exists()


def test_a_checkpoint_cannot_ask_for_remote_code(run: Path) -> None:
    content = torch.load(run / MARKER, weights_only=True)
    arguments = content["arguments"] | {"model_name": "x", "model_config": {"trust_remote_code": 1}}
    edit_attributes(run, arguments=arguments, base_name="x")
    with pytest.raises(ValueError, match=r"trust_remote_code.*actor_network"):
        GRPO.load(run)


def test_saving_never_replaces_what_is_no_checkpoint(tmp_path: Path) -> None:
    agent = make_agent()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "precious.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match=r"holds files but no checkpoint.*new directory"):
        agent.save_checkpoint(tmp_path / "models")
    with pytest.raises(FileExistsError, match="is a file"):
        agent.save_checkpoint(str(tmp_path / "file"))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "models", "precious.txt"]
    (tmp_path / "empty").mkdir()
    agent.save_checkpoint(tmp_path / "empty")
    make_agent().load_checkpoint(tmp_path / "empty")


def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead, other = tmp_path / ".run.0123abcd.tmp", tmp_path / ".run2.0123abcd.tmp"
    dead.mkdir()
    other.mkdir()
    with atomic_directory(tmp_path / "run", MARKER) as living:
        (living / MARKER).write_text("first")
        assert not dead.exists() and other.exists()
        with atomic_directory(tmp_path / "run", MARKER) as second:
            assert living.exists()
            (second / MARKER).write_text("second")
        assert (tmp_path / "run" / MARKER).read_text() == "second"
    assert (tmp_path / "run" / MARKER).read_text() == "first"
    assert sorted(p.name for p in tmp_path.iterdir()) == [other.name, "run"]


def test_an_error_while_writing_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    agent = make_agent()
    agent.save_checkpoint(tmp_path / "run")
    agent.mut = object()
    with pytest.raises(TypeError, match="mut holds"):
        agent.save_checkpoint(tmp_path / "run")
    with pytest.raises(OSError, match="full"), atomic_directory(tmp_path / "run", MARKER):
        raise OSError("disk full")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    make_agent().load_checkpoint(tmp_path / "run")
