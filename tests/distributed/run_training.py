"""Started by torchrun: both training functions on several processes.

    torchrun --nproc_per_node 2 run_training.py FOLDER exact
    torchrun --nproc_per_node 2 run_training.py FOLDER go_on RUN ...

``exact`` trains under every setting without interruption, and again in two parts. ``go_on`` trains
the runs, ``reasoning`` and ``multi_turn``, from where they were left; ``reasoning:pause`` waits in
iteration 2. ``reasoning:die`` is a run of its own, in whose iteration 2 rank 1 is killed.
"""

from __future__ import annotations

import atexit
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from learn_from_sampler import learned
from training_runs import (
    RANK,
    RUNS,
    Die,
    FullDisk,
    Pause,
    evolution,
    nothing,
    reasoning,
    result_of,
    seed_all,
    write_result,
)

from agilerl.training.checkpoint.run_checkpoint import complete_checkpoints
from agilerl.utils.llm_utils import create_llm_accelerator

# ZeRO 3 last: DeepSpeed changes torch.nn.functional.linear for all that follows.
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
}


# What is drawn is no matter of the setting.
NAMES = [name for name in RUNS if name not in ("streamed", "resampled", "resampled_turns")]


class Errors(logging.Handler):
    """Keeps the messages of errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def exact(folder: Path) -> None:
    """Every setting: whole, and in two parts."""
    for setting, arguments in SETTINGS.items():
        # Accelerate allows one accelerator per program; the process group lives on.
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = create_llm_accelerator(cpu=True, **arguments)
        for name in RUNS if setting == "ddp" else NAMES:
            whole_and_in_parts(folder / f"{setting}_{name}", name, accelerator)
        evolution_in_parts(folder / f"{setting}_evolution", accelerator)
        if setting == "ddp":
            on_a_full_disk(folder / "full_disk", accelerator)
        torch.save(learned(RANK, accelerator), folder / f"{setting}_sampler_{RANK}.pt")


def whole_and_in_parts(run: Path, name: str, accelerator: Any) -> None:
    """Four iterations; two, and agents made anew that go on to four."""
    train = RUNS[name]
    whole, parts = run.with_name(f"{run.name}_whole"), run.with_name(f"{run.name}_parts")
    seed_all(7)
    write_result(whole, train(whole, accelerator))
    seed_all(7)
    train(parts, accelerator, iterations=2).clean_up()
    seed_all(77)
    write_result(parts, train(parts, accelerator))


def evolution_in_parts(run: Path, accelerator: Any) -> None:
    """The same of a population with evolution."""
    whole, parts = run.with_name(f"{run.name}_whole"), run.with_name(f"{run.name}_parts")
    seed_all(7)
    of_whole = evolution(whole, accelerator)
    write_result(whole, of_whole[0], second=result_of(of_whole[1]))
    seed_all(7)
    for agent in evolution(parts, accelerator, iterations=2):
        agent.clean_up()
    seed_all(77)
    of_parts = evolution(parts, accelerator)
    write_result(parts, of_parts[0], second=result_of(of_parts[1]))
    for agent in (*of_whole, *of_parts):
        agent.clean_up()


def on_a_full_disk(run: Path, accelerator: Any) -> None:
    """The checkpoint of iteration 2 cannot be written."""
    errors, disk = Errors(), FullDisk(run)
    logging.getLogger().addHandler(errors)
    seed_all(7)
    try:
        agent = reasoning(run, accelerator, hook=disk)
    finally:
        disk.over()
        logging.getLogger().removeHandler(errors)
    write_result(run, agent, errors=errors.messages, last_checkpoint=agent.last_checkpoint)


def go_on(folder: Path, runs: list[str]) -> None:
    """As a user's script does, which is started again after an interruption."""
    # What is registered first is run last. One write: all processes have the same pipe.
    group = torch.distributed.is_initialized
    atexit.register(lambda: print(f"group of rank {RANK} at exit: {group()}\n", end=""))
    interruptions = {"pause": Pause(folder, iteration=2), "die": Die(folder, iteration=2)}
    accelerator = create_llm_accelerator(cpu=True)
    for each in runs:
        name, _, interruption = each.partition(":")
        run = folder / ("dying" if interruption == "die" else name)
        seed_all(77 if complete_checkpoints(run) else 7)
        try:
            agent = RUNS[name](run, accelerator, hook=interruptions.get(interruption, nothing))
        except SystemExit as stop:
            (folder / f"exited_{RANK}").write_text(str(stop.code))
            raise
        except Exception:
            # Of two that it finds dead at one look torchrun names the lower rank as the cause: this
            # one, if the launcher has had no time to see that the other died.
            if interruption == "die":
                time.sleep(5)
            raise
        write_result(run, agent)
        agent.clean_up()
    (folder / f"returned_{RANK}").touch()


if __name__ == "__main__":
    if sys.argv[2] == "exact":
        exact(Path(sys.argv[1]))
    else:
        go_on(Path(sys.argv[1]), sys.argv[3:])
