"""Compare the peak memory that ``estimate_memory`` predicts with the measured one.

Each workload of ``grpo_step.py`` runs in a process of its own, this library alone. Measured is by
how much the peak resident memory of ``get_action`` (rollout) and of ``learn`` (update) exceeds that
of the process with the base model and without an agent. Predicted is the estimate without the
weights of the base model.

The estimate counts live tensors. So that the resident memory does too:

* glibc returns freed blocks to the system at once (``MALLOC_MMAP_THRESHOLD_``; by default it keeps
  many of them);
* a step of another agent runs first, because libraries allocate buffers on first use.

    .venv/bin/python benchmarking/memory_estimate.py --out build/memory-estimate.json
"""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from alternating import in_a_process
from measure import MemoryPeak, freed_blocks_returned
from report import benchmark_parser, count, run_workloads
from workloads import WORKLOADS, Workload, agent_arguments, build_model, completion_lengths, shrunk

if TYPE_CHECKING:
    from sides import OwnSteps


def measure(workload: Workload, steps: int, threads: int) -> list[dict[str, int]]:
    """Peaks of the rollout and the update of each step in this process.

    Args:
        workload: What to run.
        steps: Measured steps, after one that creates the optimizer state.
        threads: CPU threads of torch.

    Returns:
        Of each measured step, bytes above the process with the model and without an agent.
    """
    import torch
    from sides import OwnSteps

    torch.set_num_threads(threads)
    first = OwnSteps(workload)
    _peaks(first, 0)
    first.agent.clean_up()
    del first
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    own = OwnSteps(workload)
    peaks = [_peaks(own, step) for step in range(steps + 1)]
    start = own.memory.start_bytes
    return [{stage: peak - start for stage, peak in each.items()} for each in peaks[1:]]


def _peaks(own: OwnSteps, step: int) -> dict[str, int]:
    """Peaks of the resident memory in the rollout and in the update of one step."""
    prompts = own.prompts(step)
    memory = MemoryPeak()
    result = own.rollout(prompts, step)
    rollout = memory.read()["peak"]
    memory = MemoryPeak()
    own.update(result)
    return {"rollout": rollout, "update": memory.read()["peak"]}


def predict(workload: Workload, step: int) -> dict[str, int]:
    """The same for one step by ``estimate_memory``."""
    from agilerl.utils import MemorySettings, estimate_memory

    names = MemorySettings.__dataclass_fields__
    settings = MemorySettings(
        prompt_tokens=workload.longest_prompt,
        completion_tokens=completion_lengths(workload, step),
        **{name: value for name, value in agent_arguments(workload).items() if name in names},
    )
    estimate = estimate_memory(build_model(workload).config, settings)
    weights = estimate.base_weights
    return {
        "rollout": estimate.rollout_peak - weights,
        "update": estimate.update_peak - weights,
    }


def summary(
    workload: Workload, measured: list[dict[str, int]], predicted: list[dict[str, int]]
) -> dict[str, Any]:
    """The result of a workload: its measured step with the highest peak, and the ratios.

    Args:
        workload: What ran.
        measured: Bytes of each step by stage.
        predicted: The same by the estimate.

    Returns:
        Settings; ``measured`` and ``predicted`` of that step, in bytes, ``peak`` being the larger
        of rollout and update; ``ratio``, predicted over measured; all measured ``steps``.
    """
    highest = max(range(len(measured)), key=lambda step: max(measured[step].values()))
    found, estimate = (
        {**steps[highest], "peak": max(steps[highest].values())} for steps in (measured, predicted)
    )
    return {
        "settings": asdict(replace(workload, warmup_steps=1, measured_steps=len(measured))),
        "measured": found,
        "predicted": estimate,
        "ratio": {stage: estimate[stage] / found[stage] for stage in found},
        "steps": measured,
    }


def print_summary(name: str, result: dict[str, Any]) -> None:
    """Print a line per stage."""
    print(f"{name}: predicted / measured bytes above the model")
    for stage, ratio in result["ratio"].items():
        predicted, measured = (result[key][stage] / 1e6 for key in ("predicted", "measured"))
        print(f"  {stage:8} {predicted:.1f} MB / {measured:.1f} MB = {ratio:.2f}")


def main() -> None:
    """Measure and predict the workloads asked for, print and write the result."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="by default all")
    parser.add_argument("--steps", type=count, default=2, help="measured steps of each workload")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # read when the children load torch
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    workloads = {name: WORKLOADS[name] for name in given.workload or WORKLOADS}
    steps = given.steps
    if given.quick:
        workloads, steps = {"tiny": shrunk(WORKLOADS["tiny"])}, 1

    def run(name: str) -> dict[str, Any]:
        workload = workloads[name]
        with freed_blocks_returned():
            measured = in_a_process(measure, workload, steps, given.threads)
        predicted = [predict(workload, step) for step in range(1, steps + 1)]
        return summary(workload, measured, predicted)

    run_workloads(workloads, run, print_summary, given.threads, given.out, steps=steps)


if __name__ == "__main__":
    main()
