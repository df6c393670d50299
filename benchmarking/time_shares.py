"""Share of each kind of operator in the time of a training step, this library alone.

Each step of a workload of ``grpo_step.py`` runs twice, without torch's profiler and with it. Matrix
products are needed in any implementation; the other kinds are overhead or can be fused.

    .venv/bin/python benchmarking/time_shares.py --out build/time-shares.json
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from alternating import in_a_process
from report import benchmark_parser, count, run_workloads
from workloads import WORKLOADS, Workload, shrunk

if TYPE_CHECKING:
    from sides import OwnSteps

KINDS = {
    "matrix products": "mm addmm bmm baddbmm mv addmv dot",
    "copies": (
        "copy cat index_select index gather scatter index_copy index_put _index_put_impl "
        "masked_select fill zero embedding constant_pad_nd repeat_interleave take nonzero"
    ),
    "views and allocation": (
        "view _unsafe_view reshape _reshape_alias slice select narrow transpose permute t expand "
        "unsqueeze squeeze as_strided empty empty_like empty_strided resize split detach "
        "split_with_sizes chunk unbind to _to_copy contiguous clone linear matmul item "
        "_local_scalar_dense view_as expand_as lift_fresh resolve_conj resolve_neg alias "
        "unflatten flatten new_empty new_zeros zeros zeros_like ones full movedim numpy_T"
    ),
}
"""Operators of torch by kind, without ``aten::`` and the underscore of those in place.

What is not listed is arithmetic per element."""
ATTENTION = ("scaled_dot_product", "flash_attention")
"""Part of the names of fused attention kernels."""
ALL_KINDS = (
    "matrix products",
    "attention kernels",
    "elementwise and reductions",
    "copies",
    "views and allocation",
    "python and dispatch",
)


def kind_of(operator: str) -> str | None:
    """Which of :data:`ALL_KINDS` an event of the profiler counts for; None: not an operator."""
    if not operator.startswith("aten::"):
        return None
    name = operator.removeprefix("aten::").rstrip("_")  # in place or not
    if any(part in name for part in ATTENTION):
        return "attention kernels"
    return next(
        (kind for kind, names in KINDS.items() if name in names.split()),
        "elementwise and reductions",
    )


def measure(workload: Workload, steps: int, threads: int) -> dict[str, Any]:
    """Time plain steps, each followed by the same one under the profiler, in this process.

    Returns:
        Median CPU seconds of the plain steps, and the share of each kind: the median of what an
        operator took under the profiler over the plain step before. What no operator accounts for
        is Python, the dispatch of operators and autograd.
    """
    import torch
    from sides import OwnSteps

    torch.set_num_threads(threads)
    own = OwnSteps(workload)
    first = workload.warmup_steps
    for number in range(first):
        own.step(own.prompts(number), number)
    plain, profiled = [], []
    for number in range(first, first + steps):
        report = own.step(own.prompts(number), number)
        plain.append(report["seconds"]["total"])
        profiled.append(operator_seconds(own, number))
    operators = {
        name: statistics.median(
            seconds[name] / total for seconds, total in zip(profiled, plain, strict=True)
        )
        for name in set().union(*profiled)
    }
    largest = sorted(operators, key=operators.__getitem__, reverse=True)[:12]
    return {
        "median_seconds": statistics.median(plain),
        "seconds": plain,
        "share": shares(operators),
        "largest_operators": {name: operators[name] for name in largest},
        "memory_bytes": report["memory_bytes"],
    }


def operator_seconds(own: OwnSteps, number: int) -> Counter[str]:
    """CPU seconds of every operator of torch in one step, without those that it calls."""
    import torch

    prompts = own.prompts(number)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        wall, cpu = time.perf_counter(), time.process_time()
        own.step(prompts, number)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    # The profiler reads the clock, which goes on while other programs have the processor.
    microsecond = 1e-6 * cpu / wall
    return Counter(
        {
            event.key: event.self_cpu_time_total * microsecond
            for event in profile.key_averages()
            if kind_of(event.key) is not None
        }
    )


def shares(operators: Mapping[str, float]) -> dict[str, float]:
    """Shares by kind of a step without the profiler; what is left is Python and dispatch.

    Args:
        operators: The share of each operator.
    """
    # Where operators under the profiler took longer than the plain step, they are all there is.
    whole = max(1.0, sum(operators.values()))
    found = dict.fromkeys(ALL_KINDS, 0.0)
    for name, share in operators.items():
        found[kind_of(name)] += share / whole
    return found | {"python and dispatch": max(0.0, 1.0 - sum(found.values()))}


def print_summary(name: str, result: dict[str, Any]) -> None:
    """Print the share of every kind, and the largest operators."""
    print(f"{name}: {result['median_seconds']:.2f} CPU s a step")
    for kind, share in result["share"].items():
        print(f"  {share:5.1%} {kind}")
    largest = ", ".join(f"{op} {share:.1%}" for op, share in result["largest_operators"].items())
    print(f"  {largest}")


def main() -> None:
    """Profile all workloads, print and write the result."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="by default all")
    parser.add_argument("--steps", type=count, help="measured steps; by default the workload's")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # read when the children load torch
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    workloads = {name: WORKLOADS[name] for name in given.workload or WORKLOADS}
    if given.quick:
        workloads = {"tiny": shrunk(WORKLOADS["tiny"])}

    def run(name: str) -> dict[str, Any]:
        steps = given.steps or workloads[name].measured_steps
        found = in_a_process(measure, workloads[name], steps, given.threads)
        return {"settings": asdict(replace(workloads[name], measured_steps=steps)), **found}

    run_workloads(workloads, run, print_summary, given.threads, given.out)


if __name__ == "__main__":
    main()
