"""The README's Python block runs as it stands, and what it promises of itself is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert (tmp_path / "my_checkpoint" / "actor" / "adapter_model.safetensors").is_file()
    assert list(tmp_path.glob("runs/*/metrics.csv"))


def test_files_named_in_the_documentation_exist() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for name in re.findall(
            r"`((?:agilerl|examples|docs|benchmarking|scripts)/[\w./-]+)`", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_length() -> None:
    assert len(README.splitlines()) <= 200
