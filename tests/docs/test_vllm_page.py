"""What the page on vLLM says of its configuration is so."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from agilerl.utils.algo_utils import VLLMConfig

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()


def test_every_field_is_in_the_table_with_its_default() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `(.*?)` \|", PAGE, flags=re.MULTILINE)
    shown = {name: default for names, default in rows for name in re.findall(r"\w+", names)}
    assert shown == {field.name: repr(field.default) for field in fields(VLLMConfig)}
