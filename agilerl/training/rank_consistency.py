"""What the processes of a run must have in common: accelerator, options, data and storage."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agilerl.checks import require
from agilerl.distributed import Ranks, ranks_of
from agilerl.llm.engine.accelerator_config import check_accelerator
from agilerl.training.options import TrainingOptions
from agilerl.training.population import Population
from agilerl.training.protocols import Agent

logger = logging.getLogger(__name__)

SHARED_OPTIONS = (
    "max_steps",
    "num_epochs",
    "max_wall_seconds",
    "exit_code_on_sigterm",
    "evaluation_interval",
    "evaluation_rows",
    "evaluation_samples",
    "zero_variance",
    "max_resamples",
    "checkpoint_steps",
    "checkpoint_path",
    "keep_checkpoints",
    "resume_from",
    "allow_appended_rows",
    "save_elite",
    "elite_path",
    "evo_steps",
)
"""Options that have to be the same in all processes; showing and logging is done by rank 0."""
FILE_WAIT_SECONDS = 5.0
"""Seconds to wait for a file that another process wrote."""


def training_ranks(accelerator: Any, agents: Sequence[Agent]) -> Ranks:
    """The processes that train together: the accelerator's, which has to be that of the agents.

    Raises:
        TypeError: If it is no accelerator.
        ValueError: If agents and training function have different accelerators; if a launcher
            started several processes, and there is no accelerator.
    """
    check_accelerator("accelerator", accelerator)
    expected = accelerator or agents[0].accelerator
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    require(
        expected is not None or launched == 1,
        f"accelerator is None, but this is one of {launched} processes (WORLD_SIZE), each of which "
        "would train a copy of its own: make one with agilerl.utils.llm_utils."
        "create_llm_accelerator() and pass it to the agents, the environment and the training "
        "function, or start a single process.",
    )
    require(
        all(agent.accelerator is expected for agent in agents),
        "accelerator is not the one that the agents were built with: pass the same object to the "
        "agents, the environment and the training function.",
    )
    return ranks_of(expected)


def per_process(name: str, count: int, ranks: Ranks) -> int:
    """One process's share of a number that counts over all of them.

    Raises:
        ValueError: If it does not divide.
    """
    require(
        count % ranks.world_size == 0,
        f"{name}={count} counts over all {ranks.world_size} processes, so it must be a multiple of "
        f"{ranks.world_size}.",
    )
    return count // ranks.world_size


def check_same_options(population: Population, options: TrainingOptions, ranks: Ranks) -> None:
    """Check that all processes do the same thing; otherwise they would wait for each other.

    Raises:
        ValueError: On all of them, naming the first difference.
    """
    own: dict[str, Any] = {"pop": [f"{each.algo} {each.index}" for each in population.agents]}
    for name in SHARED_OPTIONS:
        value = vars(options)[name]
        own[name] = str(value) if isinstance(value, Path) else value
    own["callbacks"] = [repr(callback) for callback in options.callbacks or ()]
    for name in ("tournament", "mutation"):
        if (part := vars(options)[name]) is not None:
            plain = (int, float, str, type(None))
            settings = {n: v for n, v in vars(part).items() if isinstance(v, plain)}
            own[name] = f"{type(part).__name__} {settings}"
    _check_same(
        ranks.gather(own),
        "Where a script looks at the disk to decide (complete_checkpoints), use storage that all "
        "processes see, or let process 0 decide and tell the others with "
        "torch.distributed.broadcast_object_list.",
    )


def check_same_data(population: Population, ranks: Ranks) -> None:
    """Check that all processes have the same data in the same order, of which each takes a share.

    Raises:
        ValueError: On all of them, naming the first difference.
    """
    own = {
        f"{name} of the environment of agent {member.agent.index}": value
        for member in population
        for name, value in member.collector.facts().items()
    }
    _check_same(
        ranks.gather(own),
        "Every process takes its share of the same rows in the same order: others would be trained "
        "on twice or not at all. Build the environment alike on all, and shuffle with a seed: "
        "dataset.shuffle(seed=42).",
    )


def _check_same(of_ranks: Sequence[dict[str, Any]], remedy: str) -> None:
    for rank, theirs in enumerate(of_ranks):
        for name in of_ranks[0] | theirs:
            first, value = of_ranks[0].get(name), theirs.get(name)
            require(
                value == first,
                f"{name} is {first!r} on process 0 but {value!r} on process {rank}, and all have "
                f"to be given the same. {remedy}",
            )


def check_shared_storage(population: Population, options: TrainingOptions, ranks: Ranks) -> None:
    """Check that all processes see the folders of the run, by a file that rank 0 writes there.

    Raises:
        ValueError: On all of them, if one does not and every process writes its share of
            checkpoints.
    """
    if ranks.world_size == 1:
        return
    all_write = any(ranks.gather(any(agent.engine.sharded for agent in population.agents)))
    folders = {"checkpoint_path": Path(options.checkpoint_path or "runs")}
    if all_write and options.elite_path is not None:
        folders["elite_path"] = Path(options.elite_path).resolve().parent
    for name, folder in folders.items():
        unseeing = _ranks_that_do_not_see(folder, ranks)
        if not unseeing:
            continue
        listed = f"process {unseeing[0]}" if len(unseeing) == 1 else f"processes {unseeing}"
        problem = f"what process 0 writes to {str(folder)!r} is not seen by {listed}"
        require(
            not all_write,
            f"{name}={str(vars(options)[name])!r}: {problem}, and under ZeRO 2 and 3 every process "
            "writes its share of a checkpoint. Name a folder on storage that all processes see, "
            "with the same absolute path, or train with ZeRO stage 0 or 1.",
        )
        if ranks.rank == 0:
            logger.warning(
                "%s: %s. Checkpoints are written, but to resume from them all processes have to "
                "see them: copy them to the others' machines then, or use shared storage",
                name,
                problem,
            )


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
    end = time.monotonic() + FILE_WAIT_SECONDS
    while True:
        try:
            if name in os.listdir(folder):  # asks a network file system anew
                return True
        except OSError:
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
