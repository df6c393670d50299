"""Configurations of the agents, under the names that user code imports."""

from __future__ import annotations

from agilerl.llm.config import CosineLRScheduleConfig

__all__ = ["CosineLRScheduleConfig"]
