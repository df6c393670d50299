"""Models by name: loaded once."""

from __future__ import annotations

from pathlib import Path

import torch

from agilerl.llm.shared_base import load_base
from agilerl.testing import tiny_model


def test_the_same_path_is_loaded_once_while_in_use(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    first = load_base(str(tmp_path), {"dtype": torch.float32}, "cpu")
    assert load_base(str(tmp_path), {"dtype": torch.float32}, "cpu") is first
    assert load_base(str(tmp_path), {"dtype": torch.bfloat16}, "cpu") is not first
