"""The warmed-up models that ship with the package; README.md beside each says how it was made."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from agilerl.checks import OneOf

BUNDLED_MODELS = {
    "spell_backward": "tiny-qwen2-spell-backward",
    "guess_the_number": "tiny-qwen2-guess-the-number",
}
"""Task to folder."""


def bundled_model_path(task: str = "spell_backward") -> Path:
    """Return a bundled model's folder, for ``from_pretrained`` or ``model_name``.

    Args:
        task: What the model was warmed up on, ``"spell_backward"`` or ``"guess_the_number"``.

    Raises:
        ValueError: There is no model for the task.
    """
    OneOf(tuple(BUNDLED_MODELS))("task", task)
    return Path(__file__).parent / "models" / BUNDLED_MODELS[task]


def load_bundled_model(
    task: str = "spell_backward",
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a bundled model (float32, CPU, eval mode) and its tokenizer, without any network.

    Args:
        task: What the model was warmed up on, ``"spell_backward"`` or ``"guess_the_number"``.

    Raises:
        ValueError: There is no model for the task.
    """
    path = bundled_model_path(task)
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    # For the model type qwen2, AutoTokenizer puts a Unicode (NFC) normaliser before whatever was
    # saved: the same ids for normalised text, but other text does not come back unchanged.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    return model, tokenizer
