"""Which run checkpoints are kept, which are refused, and that a full disk costs none of them."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from resume_helpers import (
    TOKENIZER,
    After,
    checkpoints_in,
    dataset,
    files_up_to,
    make_agents,
    make_gym,
    rows_of,
    run_multiturn,
    run_reasoning,
)
from training_fakes import FakeAgent, FakeGym

from agilerl.llm_envs import ReasoningGym
from agilerl.training.checkpoint.run_checkpoint import (
    best_checkpoint,
    complete_checkpoints,
    find_checkpoint,
    write_sums,
)
from agilerl.training.collectors.reasoning_collector import ReasoningCollector
from agilerl.training.train_llm import finetune_llm_reasoning


@pytest.fixture(scope="module")
def run_of_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the checkpoints of iterations 2 and 3."""
    path = tmp_path_factory.mktemp("run")
    run_reasoning(path, pop=make_agents(1), hook=After(3), save_elite=None, elite_path=None)
    # The first evaluation's may be the best one; here only the last two count.
    shutil.rmtree(path / "iteration_00000001", ignore_errors=True)
    return path


@pytest.fixture
def run(run_of_three: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    shutil.copytree(run_of_three, tmp_path / "run")
    return tmp_path / "run"


def resume(path: Path, **options: Any) -> Any:
    settings = {"pop": make_agents(1), "save_elite": None, "elite_path": None}
    return run_reasoning(path, resume_from=path, **(settings | options))


@pytest.mark.parametrize(
    ("skill", "keep", "kept"),
    [
        ([0, 0, 1, 2, 3, 3], 2, [4, 5]),  # the best is among the last
        ([0, 1, 3, 2, 2, 3], 2, [2, 4, 5]),  # the first of equally good ones
        ([3, 0, 0, 0, 0, 0], 1, [1, 5]),  # never again as good as before training
        ([0, 1, 3, 2, 2, 1], 9, [1, 2, 3, 4, 5]),
    ],
)
def test_the_last_and_the_best_are_kept(
    skill: list[int], keep: int, kept: list[int], tmp_path: Path
) -> None:
    finetune_llm_reasoning(
        [FakeAgent(0, skill=skill), FakeAgent(1, skill=[0])],
        FakeGym(rows=99),
        max_steps=10,
        evaluation_interval=1,
        checkpoint_steps=1,
        checkpoint_path=tmp_path,
        keep_checkpoints=keep,
        verbose=False,
    )
    if skill[0] == 3:
        kept = kept[1:]  # no checkpoint was written before training: equal ones go, the first stays
        assert [int(name[-8:]) for name in checkpoints_in(tmp_path)] == [1, *kept]
        return
    assert [int(name[-8:]) for name in checkpoints_in(tmp_path)] == kept
    best = best_checkpoint(tmp_path)
    assert best is not None
    assert int(best.name[-8:]) == 1 + max(range(5), key=lambda i: skill[i + 1])


def test_complete_checkpoints_are_found_by_scanning(run: Path) -> None:
    (run / ".iteration_00000009.0a1b2c3d.tmp").mkdir()
    (run / ".iteration_00000009.0a1b2c3d.tmp" / "run_state.json").write_text("{}")
    (run / "iteration_00000008").mkdir()
    (run / "iteration_notes").mkdir()
    expected = [run / "iteration_00000002", run / "iteration_00000003"]
    assert complete_checkpoints(str(run)) == expected
    assert find_checkpoint(run) == expected[-1]
    assert find_checkpoint(expected[0]) == expected[0]
    assert complete_checkpoints(run / "nowhere") == []


def test_leftovers_of_a_killed_save_are_removed_by_the_resumed_run(run: Path) -> None:
    (run / ".iteration_00000009.0a1b2c3d.tmp").mkdir()
    (run / "iteration_notes").mkdir()
    resume(run, max_steps=7)
    assert not (run / ".iteration_00000009.0a1b2c3d.tmp").exists()
    assert (run / "iteration_notes").is_dir()


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_nothing_to_resume_from(place: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"resume_from='.*{place}' holds no complete run"):
        run_reasoning(tmp_path / "new", resume_from=tmp_path / place)
    assert not (tmp_path / "new").exists()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


FILES = (
    "run_state.json",
    "SHA256SUMS",
    "agent_0/attributes.pt",
    "agent_0/actor/adapter_model.safetensors",
    "agent_0/reference/adapter_config.json",
)


@pytest.mark.parametrize("tamper", [truncate, empty, flip, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_with_the_older_checkpoint(
    name: str, tamper: Callable[[Path], None], run: Path
) -> None:
    newest = run / "iteration_00000003"
    tamper(newest / name)
    if name == "run_state.json" and tamper is Path.unlink:
        # Without it the folder does not count as complete: the older one is taken.
        assert find_checkpoint(run) == run / "iteration_00000002"
        return
    before = (run / "metrics.csv").read_bytes()
    with pytest.raises(ValueError, match=r"damaged|missing|not listed") as caught:
        resume(run)
    said = str(caught.value)
    assert name in said
    assert f"resume_from='{run}/iteration_00000002'" in said
    assert (run / "metrics.csv").read_bytes() == before


@pytest.mark.parametrize("name", FILES[:1] + FILES[2:4])
def test_damage_that_the_sums_agree_with_is_still_found(name: str, run: Path) -> None:
    newest = run / "iteration_00000003"
    truncate(newest / name)
    write_sums(newest)
    with pytest.raises(ValueError, match=rf"{name}.*iteration_00000002'"):
        resume(run)


def test_without_an_older_checkpoint_it_says_so(run: Path) -> None:
    shutil.rmtree(run / "iteration_00000002")
    empty(run / "iteration_00000003" / "agent_0/attributes.pt")
    with pytest.raises(ValueError, match="there is no older checkpoint beside it"):
        resume(run)


@pytest.mark.parametrize(
    "content",
    ['{"format": 2}', "[]", '{"format": 1, "iteration": "3"}', '{"format": 1, "agents": [7]}'],
)
def test_a_state_of_another_shape_is_refused(content: str, run: Path) -> None:
    newest = run / "iteration_00000003"
    (newest / "run_state.json").write_text(content)
    write_sums(newest)
    with pytest.raises(ValueError, match=r"run_state\.json (has format|is damaged)"):
        resume(run)


class Exploit:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_pickle_with_code_in_it_is_refused(run: Path, tmp_path: Path) -> None:
    newest = run / "iteration_00000003"
    file = newest / "agent_0/attributes.pt"
    payload = pickle.dumps({"format": 1, "algo": Exploit(f"touch {tmp_path}/ran")}, 2)
    archive = io.BytesIO()
    with zipfile.ZipFile(file) as whole, zipfile.ZipFile(archive, "w") as changed:
        for entry in whole.namelist():
            changed.writestr(entry, payload if entry.endswith("data.pkl") else whole.read(entry))
    for content in (archive.getvalue(), payload):
        file.write_bytes(content)
        write_sums(newest)  # as whoever tampers would
        with pytest.raises(ValueError, match=r"attributes\.pt cannot be loaded safely"):
            resume(run)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pop": 2}, r"agents: \['GRPO 0'\] there, \['GRPO 0', 'GRPO 1'\] here"),
        ({"rows": 6}, "rows of environment 0: 5 there, 6 here"),
        ({"seed": 1}, "seed of environment 0: 42 there, 1 here"),
        ({"name": "other"}, "environment: 'ReasoningGym' there, 'other' here"),
        ({"word": "brain"}, "questions_and_answers of environment 0"),
        ({"answer": "b"}, "questions_and_answers of environment 0"),
        ({"lora": 4}, "LoRA configs differ .r: agent has 4, checkpoint 2"),
        ({"reference": False}, r"adapters are \['actor', 'reference'\], this agent's \['actor'\]"),
    ],
)
def test_another_run_is_refused(options: dict[str, Any], says: str, run: Path) -> None:
    from peft import LoraConfig

    arguments: dict[str, Any] = {}
    if "lora" in options:
        targets = ["q_proj", "v_proj"]
        arguments["lora_config"] = LoraConfig(r=options["lora"], target_modules=targets)
    if "reference" in options:
        arguments["use_separate_reference_adapter"] = False
    data = {name: options[name] for name in ("rows", "seed", "word", "answer") if name in options}
    env = make_gym(**data)
    env.name = options.get("name", env.name)
    before = sorted(run.rglob("*"))
    with pytest.raises(ValueError, match=says):
        resume(run, pop=make_agents(options.get("pop", 1), **arguments), env=env)
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rows": 4}, "5 there, 4 here. .*train_dataset has 4 rows, fewer than the 5 saved"),
        ({"rows": 8, "word": "brain"}, "the first 5 of the 8 rows of train_dataset are not the 5"),
        ({"word": "brain"}, "the first 5 of the 5 rows of train_dataset are not the 5"),
        ({"rows": 8, "test_rows": 4}, "test_dataset is another one; rows can be appended to train"),
        ({"rows": 8, "template": "{question}!"}, "or other templates make prompts of them"),
        ({"rows": 8, "seed": 1}, "seed of environment 0: 42 there, 1 here. Pass"),
        ({"rows": 8, "name": "other"}, "environment: 'ReasoningGym' there, 'other' here. Pass"),
        ({"rows": 8, "pop": 2}, r"agents: \['GRPO 0'\] there, \['GRPO 0', 'GRPO 1'\] here. Pass"),
    ],
)
@pytest.mark.parametrize("allow", [True, False])
def test_data_that_do_not_begin_with_the_saved_rows_are_refused(
    options: dict[str, Any], says: str, allow: bool, run: Path
) -> None:
    given = {"seed": 42, "test_rows": 3, "template": "{question}", "word": "train", "rows": 5}
    given |= options
    env = ReasoningGym(
        dataset(given["word"], given["rows"]),
        dataset("test", given["test_rows"]),
        TOKENIZER,
        lambda completion: 0.0,
        [{"role": "user", "content": given["template"]}],
        seed=given["seed"],
    )
    env.name = options.get("name", env.name)
    before = sorted(run.rglob("*"))
    pop = make_agents(options.get("pop", 1))
    with pytest.raises(ValueError, match=says if allow else "another run") as caught:
        resume(run, pop=pop, env=env, allow_appended_rows=allow)
    assert ("allow_appended_rows" in str(caught.value)) == (allow and not says.endswith("Pass"))
    assert sorted(run.rglob("*")) == before


def test_the_refusal_of_data_with_appended_rows_names_the_option(run: Path) -> None:
    with pytest.raises(ValueError, match=r"rows of environment 0: 5 there, 6 here\.") as caught:
        resume(run, env=make_gym(rows=6))
    assert "allow_appended_rows=True goes on with them, and then with the rest" in str(caught.value)


def test_appended_rows_of_an_environment_that_cannot_tell_them_are_refused() -> None:
    saved = ReasoningCollector(FakeGym(rows=5)).state_dict()
    assert ReasoningCollector(FakeGym(rows=5)).with_appended_rows(saved) == saved
    with pytest.raises(ValueError, match=r"a FakeGym cannot tell .* lacks .*with_appended_rows"):
        ReasoningCollector(FakeGym(rows=6)).with_appended_rows(saved)
    with pytest.raises(ValueError, match="it lacks what it was saved with"):
        ReasoningCollector(make_gym()).with_appended_rows(saved)


def test_data_of_environments_without_fingerprint_are_known_by_their_lengths() -> None:
    class Longer(FakeGym):
        def prompt_lengths(self) -> list[int]:
            return [2 * length for length in super().prompt_lengths()]

    saved, same, longer = (ReasoningCollector(gym()) for gym in (FakeGym, FakeGym, Longer))
    assert saved.state_dict() == same.state_dict()
    assert saved.state_dict()["prompt_lengths"] != longer.state_dict()["prompt_lengths"]


def test_agents_with_environments_of_their_own_are_told_from_sharing_ones(tmp_path: Path) -> None:
    run_reasoning(tmp_path, hook=After(1))
    with pytest.raises(ValueError, match=r"environment of each agent: \[0, 0\] there, \[0, 1\]"):
        finetune_llm_reasoning(
            make_agents(), env_fn=make_gym, max_steps=2, resume_from=tmp_path, verbose=False
        )


def test_a_run_of_the_other_training_function_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="environment: 'ReasoningGym' there, 'Dice' here"):
        run_multiturn(tmp_path / "other", pop=make_agents(1), resume_from=run)


class FullDisk(ExitStack):
    """From one call to another of the hook no file of this process may grow past ``size``.

    A context, after which files may grow again.
    """

    def __init__(self, first: int, last: int, size: int) -> None:
        super().__init__()
        self.first, self.last, self.size, self.call = first, last, size, 0

    def __call__(self) -> None:
        self.call += 1
        if self.call == self.first:
            self.enter_context(files_up_to(self.size))
        if self.call == self.last:
            self.close()

    def met_by_a_run(self, path: Path) -> FakeAgent:
        """The agent of a run of eight iterations."""
        agent = FakeAgent(on_learn=lambda agent: self())
        with self:
            finetune_llm_reasoning(
                [agent], FakeGym(rows=99), max_steps=16, checkpoint_path=path, verbose=False
            )
        return agent


@pytest.mark.parametrize("name", ["attributes.pt", "actor/adapter_model.safetensors"])
def test_a_full_disk_costs_one_checkpoint_and_not_the_run(
    name: str, run: Path, tmp_path: Path, caplog: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    size = (run / "iteration_00000003" / "agent_0" / name).stat().st_size
    disk = FullDisk(first=2, last=3, size=size - 100)
    pop = make_agents(1)
    with disk:
        run_reasoning(tmp_path / "full", pop=pop, hook=disk, evaluation_interval=1)
    path = tmp_path / "full"
    assert len(pop[0].scores) == 4
    assert "iteration_00000002" not in checkpoints_in(path)
    assert checkpoints_in(path)[-2:] == ["iteration_00000003", "iteration_00000004"]
    assert not list(path.glob(".*.tmp"))
    assert [row["iteration"] for row in rows_of(path)] == ["0", "1", "2", "3", "4"]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert any("checkpoint of iteration 2 could NOT be saved" in e.getMessage() for e in errors)
    assert str(path / "iteration_00000001") in caplog.text
    assert "checkpoint of iteration 2 could NOT be saved" in capfd.readouterr().out
    assert pop[0].last_checkpoint == str(path / "iteration_00000004" / "agent_0")
    resume(path, max_steps=7)


def test_rows_that_could_not_be_written_are_written_later(tmp_path: Path, caplog: Any) -> None:
    FullDisk(first=3, last=6, size=600).met_by_a_run(tmp_path)
    assert [row["iteration"] for row in rows_of(tmp_path)] == [str(i) for i in range(9)]
    lines = (tmp_path / "completions.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [
        i for i in range(1, 9) for _ in "ab"
    ]
    assert caplog.text.count("cannot be written") == 2  # once for rows, once for samples
    assert "are lost" not in caplog.text


def test_rows_that_found_no_room_to_the_end_are_said_to_be_lost(
    tmp_path: Path, caplog: Any
) -> None:
    agent = FullDisk(first=2, last=99, size=600).met_by_a_run(tmp_path)
    assert len(agent.learned) == 8
    assert caplog.text.count("are lost") == 1


def test_a_stop_that_cannot_save_says_what_there_is(tmp_path: Path) -> None:
    def cannot(agent: FakeAgent) -> None:
        if len(agent.learned) == 3:
            raise OSError(28, "No space left on device")

    stop = After(3)
    agent = FakeAgent(on_learn=lambda agent: stop(), on_save=cannot)
    with pytest.raises(OSError, match="No space") as caught:
        finetune_llm_reasoning(
            [agent],
            FakeGym(rows=99),
            max_steps=90,
            checkpoint_steps=1,
            checkpoint_path=tmp_path,
            verbose=False,
        )
    (note,) = caught.value.__notes__
    assert note.endswith(f"The newest checkpoint: {tmp_path}/iteration_00000002")
