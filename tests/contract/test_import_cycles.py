"""No module of the package imports itself through others, not even for type checking."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import agilerl

PACKAGE = Path(agilerl.__file__).parent


def module_name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(source: str, modules: Mapping[str, str]) -> set[str]:
    """The modules that a source imports anywhere: in functions, and for type checking."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules.keys() or {str(node.module)}
    return found & modules.keys()


def check_no_cycle(modules: Mapping[str, str]) -> None:
    graph = {name: imported_by(source, modules) - {name} for name, source in modules.items()}
    TopologicalSorter(graph).prepare()


def test_no_module_imports_itself_through_others() -> None:
    modules = {module_name(file, PACKAGE): file.read_text() for file in PACKAGE.rglob("*.py")}
    assert len(modules) > 50 and "agilerl.llm.policy" in modules
    check_no_cycle(modules)


@pytest.mark.parametrize(
    "way_back",
    [
        "from a import x",
        "import a",
        "def f():\n    import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import x",
    ],
)
def test_a_cycle_is_found(way_back: str) -> None:
    with pytest.raises(CycleError):
        check_no_cycle({"a": "from p import b", "p": "", "p.b": "import c", "c": way_back})
    check_no_cycle({"a": "from p import b", "p": "", "p.b": "import c", "c": "import torch"})
