"""Compare ``estimate_memory`` with the measured peak of every workload of the benchmark.

Each workload runs some steps in a process of its own. Measured is what the resident memory of the
process rises to over its value before the agent is made, the model loaded: separately in
``get_action`` and in ``learn``. So that this is the memory of live tensors, the process returns
freed blocks at once (``MALLOC_MMAP_THRESHOLD_``; by default glibc keeps many, and steps take up to
twice as much), and before it starts to count it has run a step on another model, as libraries load
code and make buffers on first use. Predicted is the estimate without the base's weights.

    python benchmarking/memory_estimate.py --out benchmarking/results/memory-estimate-cpu.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import MemoryPeak, describe_machine
from workloads import (
    WORKLOADS,
    Workload,
    agent_arguments,
    build_model,
    completion_lengths,
    reward,
    step_prompts,
)

RETURNED_AT_ONCE = 65536
"""Blocks from this many bytes on are given back to the system when they are freed."""


def measured(workload: Workload, steps: int) -> list[dict[str, int]]:
    """Peaks of each step's rollout and update, in bytes over the process with its model."""
    import torch

    torch.set_num_threads(1)
    agent = _agent(workload)
    _peaks(agent, workload, 0)
    agent.clean_up()
    del agent
    model = build_model(workload)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    start = MemoryPeak().start_bytes
    agent = _agent(workload, model)
    peaks = [_peaks(agent, workload, step) for step in range(steps)]
    return [{part: peak - start for part, peak in each.items()} for each in peaks]


def _agent(workload: Workload, model: Any = None) -> Any:
    from agilerl.algorithms import GRPO
    from agilerl.testing import byte_tokenizer

    tokenizer = byte_tokenizer()
    return GRPO(
        actor_network=model or build_model(workload),
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        **agent_arguments(workload),
        seed=workload.seed,
    )


def _peaks(agent: Any, workload: Workload, step: int) -> dict[str, int]:
    """Resident memory at the peaks of one step."""
    import torch
    from sides import row_limits

    from agilerl.testing import byte_tokenizer

    tokenizer = byte_tokenizer()
    prompts = [tokenizer(text, return_tensors="pt") for text in step_prompts(workload, step)]
    memory = MemoryPeak()
    with row_limits(completion_lengths(workload, step)):
        result = agent.get_action([dict(prompt) for prompt in prompts])
    rollout = memory.read()["peak"]
    rewards = torch.tensor(
        [
            [reward(row[1:][mask].tolist()) for row, mask in zip(ids, masks, strict=True)]
            for ids, masks in zip(result.completion_ids, result.action_masks, strict=True)
        ]
    )
    memory = MemoryPeak()
    agent.learn((result.completion_ids, result.action_masks, rewards))
    return {"rollout": rollout, "update": memory.read()["peak"]}


def predicted(workload: Workload, step: int) -> dict[str, int]:
    """The same by the estimate."""
    from agilerl.utils import MemorySettings, estimate_memory

    arguments = agent_arguments(workload)
    names = MemorySettings.__dataclass_fields__
    settings = MemorySettings(
        prompt_tokens=workload.longest_prompt,
        completion_tokens=completion_lengths(workload, step),
        **{name: value for name, value in arguments.items() if name in names},
    )
    estimate = estimate_memory(build_model(workload).config, settings)
    weights = estimate.base_weights
    return {
        "rollout": estimate.rollout_peak - weights,
        "update": estimate.update_peak - weights,
    }


def compare(name: str, steps: int) -> dict[str, Any]:
    """Run a workload in a process of its own, and predict the step whose peak was highest."""
    command = [sys.executable, __file__, "--measure", name, "--steps", str(steps)]
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": str(RETURNED_AT_ONCE),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    peaks: list[dict[str, int]] = json.loads(run.stdout.splitlines()[-1])
    # The first step has no optimizer state yet.
    step = max(range(1, steps), key=lambda each: max(peaks[each].values()))
    estimate = predicted(WORKLOADS[name], step)
    ratio = max(estimate.values()) / max(peaks[step].values())
    return {"measured": peaks[step], "predicted": estimate, "ratio": ratio, "steps": peaks}


def main() -> None:
    """Compare the workloads asked for; print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--steps", type=int, default=3, help="steps measured of each, 2 or more")
    parser.add_argument("--out", type=Path, help="where to write the JSON; nowhere by default")
    parser.add_argument("--measure", choices=list(WORKLOADS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps is {arguments.steps}; it must be 2 or more")
    if arguments.measure:
        print(json.dumps(measured(WORKLOADS[arguments.measure], arguments.steps)))
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    names = list(WORKLOADS) if arguments.workload == "all" else [arguments.workload]
    machine, results = describe_machine(threads=1), {}
    print("bytes over the model, in MB: measured / predicted")
    for name in names:
        results[name] = found = compare(name, arguments.steps)
        parts = ", ".join(
            f"{part} {found['measured'][part] / 1e6:.1f} / {found['predicted'][part] / 1e6:.1f}"
            for part in ("rollout", "update")
        )
        print(f"{name:13} {parts}; predicted peak {found['ratio']:.2f} of measured", flush=True)
    if arguments.out is not None:
        text = json.dumps({"machine": machine, "workloads": results}, indent=1)
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
