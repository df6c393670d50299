"""What the processes of a run must have in common before it starts: options, data, and storage."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agilerl.distributed import Ranks
from agilerl.training.collectors import MultiTurnCollector
from agilerl.training.options import LoopOptions
from agilerl.training.population import Population
from agilerl.training.protocols import Agent, Collector

logger = logging.getLogger(__name__)

STEERING = (
    "max_steps",
    "num_epochs",
    "max_wall_seconds",
    "evaluation_interval",
    "checkpoint_steps",
    "checkpoint_path",
    "keep_checkpoints",
    "resume_from",
    "save_elite",
    "elite_path",
)
"""Options that say what processes do together; what is shown and logged is rank 0's affair."""
PLACE = ("rows", "seed", "epoch", "offset")
"""What ``position`` of a collector's state may hold that is the same in every process."""
PATIENCE = 5.0
"""Seconds after which a file that another process wrote is taken not to come."""


def check_agreement(agents: Sequence[Agent], options: LoopOptions, ranks: Ranks) -> None:
    """Check that all processes are about to do the same; else they would wait for each other.

    Raises:
        ValueError: On all of them, naming the first difference.
    """
    own: dict[str, Any] = {"pop": [f"{agent.algo} {agent.index}" for agent in agents]}
    for name in STEERING:
        value = getattr(options, name)
        own[name] = str(value) if isinstance(value, Path) else value
    _check_same(
        ranks.gather(own),
        "Where a script looks at the disk to decide (complete_checkpoints), use storage that all "
        "processes see, or let process 0 decide and tell the others with "
        "torch.distributed.broadcast_object_list.",
    )


def check_data(population: Population, ranks: Ranks) -> None:
    """Check that all processes have the same data in the same order, of which each takes a part.

    Raises:
        ValueError: On all of them, naming the first difference.
    """
    own = {
        f"{name} of the environment of agent {member.agent.index}": value
        for member in population
        for name, value in _data_facts(member.collector).items()
    }
    _check_same(
        ranks.gather(own),
        "Every process takes its part of the same rows in the same order: others would be trained "
        "on twice or not at all. Build the environment alike on all, and shuffle with a seed: "
        "dataset.shuffle(seed=42).",
    )


def _data_facts(collector: Collector) -> dict[str, Any]:
    """Options and data of an environment, under the names that a user gave them."""
    facts: dict[str, Any] = {}
    if isinstance(collector, MultiTurnCollector):
        order = collector.order
        facts["groups_per_iteration"] = order.batch_size * order.num_processes
        facts["train_seeds"], facts["seed"] = order.rows, order.seed
    for name in ("max_turns", "evaluation_episodes", "data_batch_size_per_gpu"):
        facts[name] = getattr(getattr(collector, "env", None), name, None)
    state = dict(collector.state_dict())
    position = state.pop("position", None)
    if isinstance(position, Mapping):
        facts |= {name: position[name] for name in PLACE if name in position}
    # It stands for the data of an environment without fingerprint(), which may hold its part only.
    state.pop("prompt_lengths", None)
    return facts | state


def _check_same(of_ranks: Sequence[dict[str, Any]], remedy: str) -> None:
    for rank, theirs in enumerate(of_ranks):
        for name in of_ranks[0] | theirs:
            first, value = of_ranks[0].get(name), theirs.get(name)
            if value != first:
                raise ValueError(
                    f"{name} is {first!r} on process 0 but {value!r} on process {rank}, and all "
                    f"have to be given the same. {remedy}"
                )


def check_storage(agents: Sequence[Agent], options: LoopOptions, ranks: Ranks) -> None:
    """Check that all processes see the folders of the run, by a file that rank 0 writes there.

    Raises:
        ValueError: On all of them, if one does not and every process writes a part of checkpoints.
    """
    if ranks.world_size == 1:
        return
    all_write = any(ranks.gather(any(_saves_on_all_ranks(agent) for agent in agents)))
    folders = {"checkpoint_path": Path(options.checkpoint_path or "runs")}
    if all_write and options.elite_path is not None:
        folders["elite_path"] = Path(options.elite_path).resolve().parent
    for name, folder in folders.items():
        blind = _ranks_that_do_not_see(folder, ranks)
        if not blind:
            continue
        listed = f"process {blind[0]}" if len(blind) == 1 else f"processes {blind}"
        problem = f"what process 0 writes to {str(folder)!r} is not seen by {listed}"
        if all_write:
            raise ValueError(
                f"{name}={str(getattr(options, name))!r}: {problem}, and under ZeRO 2 and 3 every "
                "process writes its part of a checkpoint. Name a folder on storage that all "
                "processes see, with the same absolute path, or train with ZeRO stage 0 or 1."
            )
        if ranks.rank == 0:
            logger.warning(
                "%s: %s. Checkpoints are written, but to go on from them all processes have to "
                "see them: copy them to the others' machines then, or use shared storage",
                name,
                problem,
            )


def _saves_on_all_ranks(agent: Agent) -> bool:
    return bool(getattr(getattr(agent, "engine", None), "sharded", False))


def _ranks_that_do_not_see(folder: Path, ranks: Ranks) -> list[int]:
    def write() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=".seen_by_all_", dir=folder)
        os.close(descriptor)
        return Path(path).name

    name = ranks.on_rank_zero(write)
    seen = ranks.gather(_appears(folder, name))
    ranks.on_rank_zero(lambda: (folder / name).unlink(missing_ok=True))
    return [rank for rank, sees in enumerate(seen) if not sees]


def _appears(folder: Path, name: str) -> bool:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if name in os.listdir(folder):  # asks a network file system anew
                return True
        except OSError:
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
