"""What importing loads, needs and says, and what it must not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched_once import launched_once

pytestmark = pytest.mark.process

HEAVY = ("torch", "transformers", "peft", "datasets", "accelerate", "numpy")
OPTIONAL = (
    "vllm", "deepspeed", "liger_kernel", "bitsandbytes", "wandb", "tensorboard", "gem", "gymnasium",
)  # fmt: skip
ENTRIES = ["from agilerl.algorithms import GRPO, GSPO, CISPO", "import agilerl.training.train_llm"]
CORE = "import agilerl.llm.prompts"

# One interpreter for all: dependencies are imported once, and each statement is run by a fork of it
# in which nothing of this package has been imported. Prints what each fork found.
SCRIPT = f"""
import json, os, sys, traceback, warnings

def report(statement, missing=()):
    reader, writer = os.pipe()
    if os.fork() == 0:
        # None makes an import fail, as if the package were not installed.
        sys.modules.update(dict.fromkeys(missing))
        found = {{"error": None}}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                exec(statement, {{}})
            except BaseException:
                found["error"] = traceback.format_exc()
        found["warnings"] = [str(warning) for warning in caught]
        found["modules"] = [name for name, module in sys.modules.items() if module is not None]
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        found = json.load(pipe)
    os.wait()
    return found

reports = {{"package": report("import agilerl")}}
import accelerate, datasets, peft, torch, transformers
reports["core"] = report({CORE!r})
reports["without"] = {{entry: report(entry, {OPTIONAL!r}) for entry in {ENTRIES!r}}}
reports["with"] = {{entry: report(entry) for entry in {ENTRIES!r}}}
print(json.dumps(reports))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    def launch(folder: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        (folder / "reports.json").write_text(done.stdout)

    folder = launched_once(tmp_path_factory, "imports", launch)
    found: dict[str, Any] = json.loads((folder / "reports.json").read_text())
    return found


def test_agilerl_loads_no_torch_and_no_testing(reports: dict[str, Any]) -> None:
    loaded = set(reports["package"]["modules"])
    assert "agilerl" in loaded
    assert not {*HEAVY, "agilerl.testing"} & loaded


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_optional_package_is_needed(reports: dict[str, Any], entry: str) -> None:
    assert reports["without"][entry]["error"] is None


@pytest.mark.parametrize("entry", ENTRIES)
def test_nothing_is_said_and_no_optional_package_loaded(
    reports: dict[str, Any], entry: str
) -> None:
    found = reports["with"][entry]
    assert found["error"] is None
    assert found["warnings"] == []
    assert not set(OPTIONAL) & set(found["modules"])


def test_the_core_does_not_load_what_stands_on_it(reports: dict[str, Any]) -> None:
    found = reports["core"]
    assert found["error"] is None
    above = tuple(f"agilerl.{part}" for part in ("llm_envs", "algorithms", "training", "hpo"))
    assert not [name for name in found["modules"] if name.startswith(above)]
