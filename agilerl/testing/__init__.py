"""Tokenizers, models, tasks and tools for tests, docs and dry runs; small, and without network.

* :func:`byte_tokenizer` and :func:`tiny_model`: one id per byte, and a Qwen2 with random weights.
* :func:`load_bundled_model`: a warmed-up model that ships with this package; it can learn.
* :func:`spell_backward_datasets` and the two reward functions: the single-turn task.
* :func:`guess_the_number_env`: GEM's game, the multi-turn task.
* :func:`countdown_rows` and :func:`countdown_model`: numbers to make a target of, and a model that
  is warmed up for it when called.
* :func:`calculator`: a tool for ``ToolEnv``.
"""

from __future__ import annotations

from agilerl.testing.arithmetic import calculator
from agilerl.testing.bundled import bundled_model_path, load_bundled_model
from agilerl.testing.countdown import COUNTDOWN_CONVERSATION, countdown_model, countdown_rows
from agilerl.testing.guess_the_number import guess_the_number_env
from agilerl.testing.tasks import (
    SPELL_BACKWARD_CONVERSATION,
    spell_backward_correct,
    spell_backward_datasets,
    spell_backward_reward,
)
from agilerl.testing.tiny import tiny_model
from agilerl.testing.tokenizer import byte_tokenizer

__all__ = [
    "COUNTDOWN_CONVERSATION",
    "SPELL_BACKWARD_CONVERSATION",
    "bundled_model_path",
    "byte_tokenizer",
    "calculator",
    "countdown_model",
    "countdown_rows",
    "guess_the_number_env",
    "load_bundled_model",
    "spell_backward_correct",
    "spell_backward_datasets",
    "spell_backward_reward",
    "tiny_model",
]
