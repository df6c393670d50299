"""``config.json``: what a run was started with, which its trackers show too."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from collections.abc import Sequence
from typing import Any

import torch

import agilerl
from agilerl.algorithms.checkpoint.save import encode
from agilerl.training.checkpoint.run_checkpoint import RunCheckpoint
from agilerl.training.options import TrainingOptions
from agilerl.training.protocols import Agent

# wandb_kwargs may carry a key in its settings, so neither it nor the key itself is noted.
_OPTIONS_LEFT_OUT = ("init_hp", "wandb_kwargs", "wandb_api_key", "trackers")
# model_config may carry a token of the model hub.
_ARGUMENTS_LEFT_OUT = ("index", "model_config")


def run_config(
    agents: Sequence[Agent],
    options: TrainingOptions,
    name: str,
    env_name: str,
    checkpoint: RunCheckpoint | None = None,
) -> dict[str, Any]:
    """Plain JSON, without secrets.

    Args:
        agents: Who trains.
        options: Of the training function.
        name: Of the run.
        env_name: Of the environment.
        checkpoint: What the run is resumed from; its hyperparameters are the agents'.
    """
    noted = [
        field.name for field in dataclasses.fields(options) if field.name not in _OPTIONS_LEFT_OUT
    ]
    config: dict[str, Any] = {
        "run": name,
        "environment": env_name,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "population": [{"index": agent.index, "algo": agent.algo} for agent in agents],
        "hyperparameters": _hyperparameters(agents, checkpoint),
        "arguments": {field: vars(options)[field] for field in noted},
        "init_hp": {str(key): value for key, value in (options.init_hp or {}).items()},
        "versions": {
            "agilerl": agilerl.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }
    if checkpoint is not None:
        config["resumed"] = _resumptions(checkpoint)
    # Plain JSON from here on: init_hp may hold any object.
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return plain


def _hyperparameters(
    agents: Sequence[Agent], checkpoint: RunCheckpoint | None
) -> dict[str, dict[str, Any]]:
    """The constructor's arguments of every agent, by the prefix of its series."""
    noted: dict[str, dict[str, Any]] = {}
    for place, agent in enumerate(agents):
        own = agent.saved_arguments()
        if checkpoint is not None:
            saved = checkpoint.agents[place].attributes
            own = {name: saved.get(name, value) for name, value in own.items()}
        noted[f"agent_{agent.index}"] = {
            argument: encode(value, argument)
            for argument, value in own.items()
            if argument not in _ARGUMENTS_LEFT_OUT
        }
    return noted


def _resumptions(checkpoint: RunCheckpoint) -> list[dict[str, Any]]:
    """For ``config.json``: this resumption, after those that the run had already."""
    try:
        earlier = json.loads((checkpoint.path.parent / "config.json").read_text(encoding="utf-8"))
        resumed = list(earlier.get("resumed", []))
    except (OSError, ValueError, AttributeError, TypeError):
        resumed = []  # it is for reading only
    this: dict[str, Any] = {
        "from": str(checkpoint.path),
        "iteration": checkpoint.state["iteration"],
        "run": checkpoint.state["run"],
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if checkpoint.appended:
        this["appended_rows"] = checkpoint.appended
    return [*resumed, this]
