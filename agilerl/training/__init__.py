"""Training: ``train_llm.py`` holds the public functions, ``loop.py`` the loop they share."""

from __future__ import annotations

from agilerl.training.train_llm import finetune_llm_reasoning

__all__ = ["finetune_llm_reasoning"]
