"""The accelerator that a script makes, and what becomes of ranks that fail or hang."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from rank_launcher import run_ranks

from agilerl.utils.llm_utils import create_llm_accelerator


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"zero_stage": 4}, ValueError, "zero_stage asks for ZeRO stage 4.*0, 1, 2 or 3"),
        ({"offload_optimizer": True}, ValueError, "offload_optimizer.*None.*1, 2 or 3"),
        ({"zero_stage": 0, "offload_optimizer": True}, ValueError, "offload.*0; it must be 1, 2"),
    ],
)
def test_bad_arguments_are_named(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        create_llm_accelerator(**arguments)


def test_a_single_process_needs_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert create_llm_accelerator() is None
    assert create_llm_accelerator(zero_stage=2, offload_optimizer=True) is None


def test_a_rank_that_dies_or_hangs_does_not_hang_the_test(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(3)\ntime.sleep(99)"
    )
    with pytest.raises(RuntimeError, match="rank failed"):
        run_ranks(script, seconds=60)
    script.write_text("import time\nprint('waiting', flush=True)\ntime.sleep(99)")
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="not done after 8 s"):
        run_ranks(script, seconds=8)
    assert time.monotonic() - start < 30
