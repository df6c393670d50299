"""Two real gloo ranks, started once for all workers; the tests read what they wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launched_once import launched_once
from torchrun import HERE, torchrun


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks found, all cases under all settings; they are started for the first test."""
    return launched_once(
        tmp_path_factory, "ranks", lambda path: print(torchrun(HERE / "run_cases.py", str(path)))
    )


@pytest.fixture
def ranks(folder: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank found, in their order, for a ``(setting, case)``."""
    setting, case = request.param
    paths = [folder / f"{setting}-{case}-{rank}.pt" for rank in range(2)]
    return [torch.load(path, weights_only=False) for path in paths]
