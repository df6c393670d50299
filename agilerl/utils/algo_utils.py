"""Configurations of the agents, under the names that user code imports."""

from __future__ import annotations

from agilerl.llm.config import CosineLRScheduleConfig
from agilerl.llm.generation.vllm.config import VLLMConfig

__all__ = ["CosineLRScheduleConfig", "VLLMConfig"]
