"""Questions that are answered with tools."""

from __future__ import annotations

from agilerl.llm_envs.tools.environment import ToolEnv, shown_tools

__all__ = ["ToolEnv", "shown_tools"]
