"""Callbacks: code of the user's that is called while a run trains, and can end it."""

from __future__ import annotations

from agilerl.training.callbacks.builtin import HyperparameterSchedule, PrintMetrics, linear
from agilerl.training.callbacks.protocol import Callback, RunProgress
from agilerl.training.callbacks.stopping import EarlyStopping, StopAtFitness

__all__ = [
    "Callback",
    "EarlyStopping",
    "HyperparameterSchedule",
    "PrintMetrics",
    "RunProgress",
    "StopAtFitness",
    "linear",
]
