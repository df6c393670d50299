"""The page's code runs, with a tiny model and rows of the same columns in place of the Hub's."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agilerl.testing import bundled_model_path

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
NAME = "Qwen/Qwen2.5-1.5B-Instruct"
# Less training than on the page.
SHORT = {
    NAME: str(bundled_model_path()),
    "max_steps=16 * 200": "max_steps=4",
    "data_batch_size_per_gpu=16": "data_batch_size_per_gpu=4",
    "group_size=8": "group_size=2",
    "batch_size=64": "batch_size=4",
    "max_output_tokens=512": "max_output_tokens=8",
    "range(200)": "range(2)",
}


def gsm8k(path: str, name: str) -> datasets.DatasetDict:
    assert (path, name) == ("openai/gsm8k", "main")
    rows = [
        {"question": f"{i} + {i}?", "answer": f"Twice {i} is {2 * i}.\n#### {2 * i:,}"}
        for i in range(600, 608)
    ]
    split = datasets.Dataset.from_list(rows)
    return datasets.DatasetDict(train=split, test=split)


@pytest.mark.slow
def test_code_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", gsm8k)
    recipe, *others = re.findall(
        r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, flags=re.DOTALL
    )
    code = recipe[0]
    for as_written, short in SHORT.items():
        assert as_written in code
        code = code.replace(as_written, short)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "recipes.md", "exec"), names)
    assert len(names["agent"].fitness) == 2
    assert (tmp_path / "runs/gsm8k/metrics.csv").is_file()
    correct = names["correct"]
    assert correct(r"so \boxed{1,204}", "1,204") == correct(r"\boxed{\$1204.0}", "1,204") == 1.0
    assert correct(r"\boxed{12}", "1,204") == correct("1204", "1,204") == 0.0
    for code, shown in others:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "recipes.md", "exec"), names)
        assert printed.getvalue() == shown


def test_memory_is_that_of_the_shapes() -> None:
    """Of the model's architecture: https://huggingface.co/Qwen/Qwen2.5-1.5B-Instruct."""
    layers, hidden, ffn, kv_heads, heads = 28, 1536, 8960, 2, 12
    with torch.device("meta"):
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=151_936,
                hidden_size=hidden,
                intermediate_size=ffn,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                tie_word_embeddings=True,
            )
        )
    assert f"{model.num_parameters() / 1e9:.2f} billion" in PAGE
    linears = [
        module.weight.shape
        for name, module in model.named_modules()
        if name.startswith("model.layers.") and hasattr(module, "in_features")
    ]
    adapter = 16 * sum(sum(shape) for shape in linears)
    assert f"{adapter / 1e6:.1f} million" in PAGE
    per_token = 2 * 2 * layers * kv_heads * hidden // heads
    assert per_token == 28 * 1024
    assert f"{128 * 768 * per_token / 1e9:.1f} GB" in PAGE
    assert f"{8 * 768 * layers * hidden * 2 / 1e9:.1f} GB" in PAGE
