"""The page's code runs as it is there, and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from documentation_page import run_page
from memory_options import options_table
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from agilerl.testing import tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
PLAIN, HEADING, QUANTIZED = PAGE.partition("## A quantized base")


def test_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(PLAIN, shown=2)


@pytest.mark.slow
def test_table_of_options_is_what_is_predicted() -> None:
    assert options_table() in PAGE


@pytest.mark.process
@pytest.mark.needs("bitsandbytes")
def test_code_with_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # DeepSpeed, where there is one, writes to the output when transformers first asks for it.
    tiny_model().save_pretrained("first")
    config = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained("first", quantization_config=config)
    assert HEADING and run_page(PAGE, shown=4)
