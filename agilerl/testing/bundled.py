"""The warmed-up model that ships with the package; the README.md beside it says how it was made."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

BUNDLED_MODEL_NAME = "tiny-qwen2-spell-backward"


def bundled_model_path() -> Path:
    """Return the bundled model's folder, fit for ``from_pretrained`` and for ``model_name``."""
    return Path(__file__).parent / "models" / BUNDLED_MODEL_NAME


def load_bundled_model() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load the bundled model (float32, CPU, eval mode) and its tokenizer, without any network."""
    path = bundled_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    # For the model type qwen2, AutoTokenizer puts a Unicode (NFC) normaliser before whatever was
    # saved: the same ids for normalised text, but other text does not come back unchanged.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    return model, tokenizer
