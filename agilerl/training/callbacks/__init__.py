"""Callbacks: code of the user's that is called while a run trains, and can end it."""

from __future__ import annotations

from agilerl.training.callbacks.builtin import (
    EarlyStopping,
    HyperparameterSchedule,
    PrintMetrics,
    StopAtFitness,
    linear,
)
from agilerl.training.callbacks.protocol import Callback, RunProgress

__all__ = [
    "Callback",
    "EarlyStopping",
    "HyperparameterSchedule",
    "PrintMetrics",
    "RunProgress",
    "StopAtFitness",
    "linear",
]
