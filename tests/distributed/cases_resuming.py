"""What two ranks run of runs that go on with another number of processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases_checkpoints import setting_of
from training_runs import reasoning, seed_all, write_result


def another_number_of_ranks(accelerator: Any) -> dict[str, Any]:
    """A run for a single process to go on with, and the run of a single process gone on with.

    Each is 14 rows of 7 a pass, left in the middle of a pass; ``<run>_<rank>.json`` say what was
    there then, and ``<run>_taken_over_<rank>.json`` what is there on these ranks.
    """
    of_two, of_one = (Path(sys.argv[1]) / f"{n}-{setting_of(accelerator)}" for n in ("two", "one"))
    seed_all(7)
    write_result(of_two, reasoning(of_two, accelerator, iterations=3))
    if accelerator.is_main_process:
        write_result(of_one, reasoning(of_one, None, iterations=1))
    torch.distributed.barrier()
    # At first there is nothing left to do.
    found = reasoning(of_one, accelerator, iterations=1)
    write_result(of_one.with_name(f"{of_one.name}_taken_over"), found)
    reasoning(of_one, accelerator)
    return {}


RESUME_CASES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "another_number_of_ranks": another_number_of_ranks
}
