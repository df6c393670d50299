"""Where a run's metrics and completions are shown: TensorBoard, W&B, MLflow, Trackio, your own.

The first two are options of the training functions, ``tensorboard=True`` and ``wb=True``; of the
others an object is passed as ``trackers=[...]``. Each package is imported only when asked for.
"""

from agilerl.training.trackers.mlflow import MLflowTracker
from agilerl.training.trackers.protocol import (
    CompletionTable,
    RunStatus,
    TrackedRun,
    Tracker,
    TrackerWaits,
)
from agilerl.training.trackers.trackio import TrackioTracker

__all__ = [
    "CompletionTable",
    "MLflowTracker",
    "RunStatus",
    "TrackedRun",
    "Tracker",
    "TrackerWaits",
    "TrackioTracker",
]
