"""Directories that are no checkpoints, damaged ones, and such as would run code."""

from __future__ import annotations

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
from agilerl.llm.atomic_directory import atomic_directory

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


def refuse(run: Path, says: str, error: type[Exception] = ValueError) -> None:
    """Both ways of loading raise, and the agent is as it was."""
    agent = make_agent()
    before = weights(agent), weights(agent, "reference")
    with pytest.raises(error, match=says):
        agent.load_checkpoint(run, load_optimizer=True)
    assert torch.equal(weights(agent), before[0])
    assert torch.equal(weights(agent, "reference"), before[1])
    with pytest.raises(error, match=says):
        GRPO.load(run, actor_network=small_model())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("file", [MARKER, TENSORS], ids=str)
def test_truncated_files(run: Path, file: Path, share: float) -> None:
    truncate(run / file, share)
    refuse(run, r"(truncated|damaged).*use another checkpoint")


def test_text_in_place_of_a_file(run: Path) -> None:
    (run / CONFIG).write_text("{not json")
    refuse(run, r"adapter_config.json is damaged.*another checkpoint")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 99}, "format 99.*reads format 1"),
        ({"roles": ["reference"]}, "roles"),
        ({"roles": ["actor", "../../etc"]}, "roles"),
        ({"rng_state": "x"}, "'rng_state' is str"),
        ({"arguments": None}, "'arguments' is NoneType"),
        ({"lora_only": False}, "'actor_state_dict' is NoneType"),
    ],
)
def test_tampered_attributes(run: Path, changes: dict[str, Any], says: str) -> None:
    edit_attributes(run, **changes)
    refuse(run, says)


def test_attributes_of_another_kind(run: Path) -> None:
    torch.save([1, 2], run / MARKER)
    refuse(run, "format 'list'")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.popitem(), "lacks tensors"),
        (lambda t: t.update({next(iter(t)): torch.zeros(2, 2)}), "another shape"),
        (lambda t: t.update({"base_model.model.other": torch.zeros(2)}), "has not"),
    ],
)
def test_tampered_tensors(run: Path, change: Any, says: str) -> None:
    tensors = load_file(run / TENSORS)
    change(tensors)
    save_file(tensors, run / TENSORS)
    refuse(run, says)


def test_missing_files(run: Path, tmp_path: Path) -> None:
    (run / TENSORS).unlink()
    refuse(run, "holds no adapter_model.safetensors", FileNotFoundError)
    refuse(tmp_path / "nowhere", "holds no checkpoint", FileNotFoundError)


def test_arguments_this_version_does_not_know(run: Path) -> None:
    content = torch.load(run / MARKER, weights_only=True)
    edit_attributes(run, arguments=content["arguments"] | {"quantum": True})
    with pytest.raises(ValueError, match=r"does not take: \['quantum'\]"):
        GRPO.load(run, actor_network=small_model())


def test_a_directory_of_another_peft_method(tmp_path: Path) -> None:
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    get_peft_model(small_model(), config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a IA3Config; only LoRA"):
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
