"""What two ranks run of runs that go on, with another number of processes too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from agents_and_batches import COSINE, make_agent, weights
from cases_checkpoints import setting_of
from cases_learn import mine
from training_runs import reasoning, seed_all, write_result

from agilerl.algorithms import GRPO
from agilerl.algorithms.checkpoint.load import read_saved_agent


def another_number_of_ranks(accelerator: Any) -> dict[str, Any]:
    """A run for a single process to go on with, and the run of a single process gone on with.

    Each is 14 rows of 7 a pass, left in the middle of a pass; ``<run>_<rank>.json`` say what was
    there then, and ``<run>_taken_over_<rank>.json`` what is there on these ranks.
    """
    of_two, of_one = (Path(sys.argv[1]) / f"{n}-{setting_of(accelerator)}" for n in ("two", "one"))
    seed_all(7)
    write_result(of_two, reasoning(of_two, accelerator, iterations=3))
    if accelerator.is_main_process:
        with patch.dict(os.environ):
            del os.environ["RANK"]  # as in a process of its own
            write_result(of_one, reasoning(of_one, None, iterations=1))
    torch.distributed.barrier()
    # At first there is nothing left to do.
    found = reasoning(of_one, accelerator, iterations=1)
    write_result(of_one.with_name(f"{of_one.name}_taken_over"), found)
    reasoning(of_one, accelerator)
    return {}


def appended_rows(accelerator: Any) -> dict[str, Any]:
    """A run of 7 rows that goes on with 10 from the middle of its first pass.

    And what is said without the option.
    """
    run = Path(sys.argv[1]) / "appended"
    seed_all(7)
    reasoning(run, accelerator, iterations=1)
    refusal = ""
    try:
        reasoning(run, accelerator, rows=10)
    except ValueError as error:
        refusal = str(error)
    write_result(run, reasoning(run, accelerator, rows=10, allow_appended_rows=True))
    return {"refusal": refusal}


def set_back(accelerator: Any) -> dict[str, Any]:
    """A rate set on the optimizer, in copies and in an agent set back to a checkpoint.

    And what that agent says to a checkpoint whose batches do not divide.
    """
    path = Path(sys.argv[1]) / f"set-back-{setting_of(accelerator)}"
    agent = make_agent(accelerator, cosine_lr_schedule_config=COSINE)
    other = make_agent(accelerator, cosine_lr_schedule_config=COSINE, lr=0.5)
    mine(accelerator).learned_by(agent)
    GRPO.update_lr(agent.optimizer, 5e-3)
    agent.save_checkpoint(path)
    twin, unwrapped = agent.clone(), agent.clone(wrap=False)
    unwrapped.wrap_models()
    read_saved_agent(other, path).restore()
    mine(accelerator).learned_by(agent)
    found = {}
    for name, each in {"clone": twin, "wrapped again": unwrapped, "set back": other}.items():
        mine(accelerator).learned_by(each)
        rates = [each.optimizer.param_groups[0][rate] for rate in ("lr", "initial_lr")]
        found[name] = (torch.equal(weights(each), weights(agent)), *rates)
    agent.batch_size = 15
    agent.save_checkpoint(path)
    refusal = ""
    try:
        read_saved_agent(other, path)
    except ValueError as error:
        refusal = str(error)
    for each in (agent, twin, unwrapped, other):
        each.clean_up()
    return {"found": found, "refusal": refusal}


RESUME_CASES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "another_number_of_ranks": another_number_of_ranks,
    "appended_rows": appended_rows,
    "set_back": set_back,
}
