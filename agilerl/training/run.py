"""One run from its directory to its last row: opens the logs, runs the loop, closes the logs."""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import agilerl
from agilerl.training.arguments import LoopOptions
from agilerl.training.elite import check_elite_outside
from agilerl.training.loop import TrainingLoop
from agilerl.training.protocols import Agent, Collector
from agilerl.training.run_directory import RunDirectory, run_name
from agilerl.training.run_logging import RunLog

logger = logging.getLogger(__name__)


def run_training(
    agents: Sequence[Agent],
    collectors: Sequence[Collector],
    options: LoopOptions,
    env_name: str,
    total: int | None,
) -> None:
    """Train agents in a run directory of their own.

    Args:
        agents: The population.
        collectors: One per agent.
        options: Checked options.
        env_name: Names the run.
        total: Steps per agent of the whole run, for the progress bar; None when unknown.
    """
    name = run_name(agents, env_name)
    check_elite_outside(options.elite_path, Path(options.checkpoint_path or Path("runs") / name))
    with RunDirectory(name, options.checkpoint_path) as directory:
        config = _config(agents, options, name, env_name)
        directory.write_config(config)
        log = RunLog(directory.path, name, options, config, total)
        failed = True
        try:
            logger.info("Run directory: %s", directory.path)
            if options.verbose:
                log.say(f"Run directory: {directory.path}")
            TrainingLoop(agents, collectors, options, directory, log).run()
            failed = False
        finally:
            log.close(failed)


def _config(
    agents: Sequence[Agent], options: LoopOptions, name: str, env_name: str
) -> dict[str, Any]:
    """Facts about the run for ``config.json`` and W&B; no secrets."""
    # wandb_kwargs may carry a key in its settings, so neither it nor the key itself is noted.
    noted = [
        field.name
        for field in dataclasses.fields(options)
        if field.name not in ("init_hp", "wandb_kwargs", "wandb_api_key")
    ]
    config = {
        "run": name,
        "environment": env_name,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "population": [{"index": agent.index, "algo": agent.algo} for agent in agents],
        "arguments": {field: getattr(options, field) for field in noted},
        "init_hp": {str(key): value for key, value in (options.init_hp or {}).items()},
        "versions": {
            "agilerl": agilerl.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }
    # Plain JSON from here on: init_hp may hold any object.
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return plain
