"""MLflow."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from agilerl.training.trackers.protocol import (
    CompletionTable,
    RunStatus,
    TrackedRun,
    require_package,
)

_METRICS_PER_CALL = 1000
_PARAMETERS_PER_CALL = 100
"""As many as MLflow's ``log_batch`` takes."""


class MLflowTracker:
    """Series as metrics of an MLflow run, tables as its artifacts.

    A run that the program has begun itself, with ``mlflow.start_run()``, is used, and not ended.

    Args:
        experiment: Name of the experiment, which is made if there is none.
        tracking_uri: Where MLflow keeps runs; None: MLflow's own setting.

    Raises:
        ImportError: If MLflow is not installed.
    """

    def __init__(self, experiment: str = "agilerl", tracking_uri: str | None = None) -> None:
        require_package("mlflow", "MLflowTracker", "mlflow")
        self._experiment, self._tracking_uri = experiment, tracking_uri
        self._client: Any = None
        self._run_id: str | None = None
        self._is_ours = True

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run; None of one that is the program's own."""
        return self._run_id if self._is_ours else None

    def start(self, run: TrackedRun) -> None:
        """Begin or continue a run, or take the program's own."""
        import mlflow

        self._tracked = run
        self._client = mlflow.MlflowClient(self._tracking_uri)
        active = mlflow.active_run()
        if active is not None:
            self._run_id, self._is_ours = active.info.run_id, False
        elif run.run_id is not None:
            self._run_id = run.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            experiment = self._client.get_experiment_by_name(self._experiment)
            if experiment is None:
                number = self._client.create_experiment(self._experiment)
            else:
                number = experiment.experiment_id
            self._run_id = self._client.create_run(number, run_name=run.name).info.run_id
            self._log_hyperparameters(run)
        self._client.log_text(self._run_id, json.dumps(run.config, indent=2), "config.json")

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Log an iteration's values; ``pass@4`` is called ``pass_at_4``."""
        from mlflow.entities import Metric

        new = self._tracked.new_values(iteration, values)
        now = int(1000 * time.time())
        metrics = [Metric(_metric_name(name), value, now, iteration) for name, value in new.items()]
        for start in range(0, len(metrics), _METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics[start : start + _METRICS_PER_CALL])

    def write_completions(self, iteration: int, table: CompletionTable) -> None:
        """Log a table."""
        if not self._tracked.is_new_table(iteration, table):
            return
        columns = {name: [row[i] for row in table.rows] for i, name in enumerate(table.columns)}
        file = f"completions/{table.name}/iteration_{iteration:08d}.json"
        self._client.log_table(self._run_id, columns, file)

    def close(self, status: RunStatus) -> None:
        """End the run, unless it is the program's own."""
        if self._is_ours and self._run_id is not None:
            self._client.set_terminated(self._run_id, status.upper())

    def _log_hyperparameters(self, run: TrackedRun) -> None:
        """Log those of the agents as parameters, which stay as they were when the run began."""
        from mlflow.entities import Param

        parameters = [
            Param(f"{agent}/{name}", str(value))
            for agent, values in run.config["hyperparameters"].items()
            for name, value in values.items()
        ]
        for start in range(0, len(parameters), _PARAMETERS_PER_CALL):
            batch = parameters[start : start + _PARAMETERS_PER_CALL]
            self._client.log_batch(self._run_id, params=batch)


def _metric_name(name: str) -> str:
    """Without characters that MLflow refuses."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
