"""Time, FLOPs utilization and peak memory of the learn step of 1.5B and 3B models on a GPU.

Qwen2.5's shapes with random weights in bfloat16; prompts of 512 tokens, groups of 8 completions of
512. The completions are given random tokens, so that a step is what ``learn`` does in this library
and what TRL's trainer does after its rollout. Each memory option runs in a process of its own. No
results of this script are committed. ``--quick`` runs a small model on a CPU.

    .venv/bin/python benchmarking/gpu_step.py --out build/gpu-step.json
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

from alternating import in_a_process
from gpu_sides import OPTIONS, TRL_OPTIONS, Step, measure
from report import benchmark_parser, count, run_workloads
from vllm_rollout import WORKLOADS

MODELS = ("qwen2.5-1.5b", "qwen2.5-3b")
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Per second, dense bfloat16, by a part of the device's name."""


def model_flops(step: Step, *, distinct: bool) -> float:
    """FLOPs that the model needs for one learn step.

    Forward and backward of the policy, whose backward makes gradients of activations only (the
    weights are frozen, LoRA's own are left out), and the forward of the reference: three forwards.

    Args:
        step: Model and shape.
        distinct: Whether the tokens of a prompt count once for its group, as they are the same.
    """
    shape = step.shape
    p, c, g = shape.prompt_tokens, shape.new_tokens, shape.group_size
    key_width = shape.hidden_size * shape.key_value_heads // shape.heads
    weights = 2 * shape.hidden_size * (shape.hidden_size + key_width)
    weights += 3 * shape.hidden_size * shape.intermediate_size
    prompts = 1 if distinct else g
    tokens = prompts * p + g * c
    # Pairs of a query and a key before it, twice 2 FLOPs a channel: for the score and for the sum.
    pairs = prompts * p * p / 2 + g * c * (p + c / 2)
    layers = shape.layers * (2 * weights * tokens + 4 * shape.hidden_size * pairs)
    head = 2 * shape.hidden_size * shape.vocab_size * g * c
    return 3 * shape.prompts * (layers + head)


def run_model(step: Step, cases: list[str], peak_flops: float | None) -> dict[str, Any]:
    """Measure all cases of a model.

    Args:
        step: Model and shape.
        cases: Out of ``OPTIONS`` and ``TRL_OPTIONS``.
        peak_flops: Per second, of the device; None: no utilisation is reported.
    """
    found = {}
    for case in cases:
        figures = found[case] = in_a_process(measure, case, step)
        print(f"  {case}: {figures.get('median_seconds', figures)}", flush=True)
        if "median_seconds" in figures and peak_flops:
            for key, distinct in (("rows", False), ("distinct_tokens", True)):
                rate = model_flops(step, distinct=distinct) / figures["median_seconds"]
                figures[f"model_flops_utilisation_of_{key}"] = rate / peak_flops
    return {"settings": asdict(step), "cases": found, "ratio": ratios(found)}


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Every case that ran over ``plain``: seconds and added memory."""
    plain = found.get("plain", {})
    if "median_seconds" not in plain:
        return {}
    return {
        case: {
            "seconds": figures["median_seconds"] / plain["median_seconds"],
            "memory_added": figures["memory_bytes"]["added"] / plain["memory_bytes"]["added"],
        }
        for case, figures in found.items()
        if "median_seconds" in figures
    }


def print_summary(name: str, result: dict[str, Any]) -> None:
    """Print a line per case."""
    print(f"{name}: seconds of the learn step, memory over the base's, FLOPs utilisation")
    for case, figures in result["cases"].items():
        if "median_seconds" not in figures:
            print(f"  {case:28} {figures}")
            continue
        added = figures["memory_bytes"]["added"] / 1e9
        share = figures.get("model_flops_utilisation_of_rows")
        utilisation = "" if share is None else f", {share:.0%} of rows"
        print(f"  {case:28} {figures['median_seconds']:.3f} s, {added:.2f} GB{utilisation}")


def main() -> None:
    """Measure all cases, print and write the result."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, action="append", help="by default both")
    parser.add_argument("--case", choices=[*OPTIONS, *TRL_OPTIONS], action="append")
    parser.add_argument("--steps", type=count, default=5, help="measured steps of each case")
    parser.add_argument("--micro-batch-size", type=count, default=8, help="rows of a forward")
    parser.add_argument("--peak-flops", type=float, help="per second, of the GPU in bfloat16")
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    if not given.quick and not torch.cuda.is_available():
        parser.error("there is no GPU; --quick runs a small model on the CPU")
    device = "cpu" if given.quick else "cuda"
    name = "cpu" if given.quick else torch.cuda.get_device_name()
    known = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    steps = {
        model: Step(
            replace(WORKLOADS[model], prompts=8, prompt_tokens=512, new_tokens=512),
            given.micro_batch_size,
            device,
            given.steps,
        )
        for model in given.model or MODELS
    }
    if given.quick:
        shape = replace(WORKLOADS["tiny"], prompt_tokens=16, new_tokens=16)
        steps = {"tiny": Step(shape, 2, device, 1)}
    cases = given.case or [*OPTIONS, *TRL_OPTIONS]
    run_workloads(
        steps,
        lambda model: run_model(steps[model], cases, given.peak_flops or known),
        print_summary,
        given.threads,
        given.out,
        device=name,
    )


if __name__ == "__main__":
    main()
