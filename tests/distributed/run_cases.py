"""Started by torchrun: runs the cases under every setting and writes what each rank found.

Usage: torchrun --nproc_per_node 2 run_cases.py FOLDER
"""

from __future__ import annotations

import faulthandler
import sys
import traceback
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from case_settings import ARGUMENTS, cases_of
from cases_checkpoints import CHECKPOINT_CASES
from cases_learn import LEARN_CASES
from cases_populations import POPULATION_CASES
from cases_resuming import RESUME_CASES
from cases_zero3 import ZERO3_CASES

from agilerl.utils.llm_utils import create_llm_accelerator

EVERY_CASE = LEARN_CASES | CHECKPOINT_CASES | ZERO3_CASES | POPULATION_CASES | RESUME_CASES


def main(folder: Path) -> None:
    # A rank that hangs says where, before the test's own time limit.
    faulthandler.dump_traceback_later(850, exit=True)
    for setting, arguments in ARGUMENTS.items():
        # Accelerate allows one accelerator per program; the process group lives on.
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = create_llm_accelerator(cpu=True, **arguments)
        assert accelerator is not None and accelerator.num_processes == 2
        for name in cases_of(setting, list(EVERY_CASE)):
            result = EVERY_CASE[name](accelerator)
            torch.save(result, folder / f"{setting}-{name}-{accelerator.process_index}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        raise
