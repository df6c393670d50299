"""Peak memory and time of a training step of 1, 2, 4 and 8 agents on one base model.

The agents' rollouts run in one batch or one by one. To measure times, the two take turns in one
process, one step each; every memory peak is measured in a process of its own.

    .venv/bin/python benchmarking/population.py --out build/population.json
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from alternating import in_a_process
from measure import MemoryPeak, freed_blocks_returned
from report import benchmark_parser, count, run_workloads
from workloads import (
    WORKLOADS,
    Workload,
    agent_arguments,
    build_model,
    reward,
    shrunk,
    step_prompts,
)

if TYPE_CHECKING:
    import torch

    from agilerl.training.collectors.experience import Experience
    from agilerl.training.population import Population

SIZES = (1, 2, 4, 8)
MODES = ("batched", "one by one")
SHAPES = {
    f"{name}, {prompts} x {group}": replace(
        WORKLOADS[name],
        warmup_steps=1,
        measured_steps=steps,
        prompts=prompts,
        group_size=group,
        new_tokens=32,
    )
    for name, prompts, group, steps in (
        ("tiny", 4, 4, 9),
        ("vocab32k", 4, 4, 5),
        ("vocab32k", 8, 8, 3),
    )
}
"""By prompts x completions of each agent's step."""


class RandomPrompts:
    """Batches of random prompts, a new one each step; see ``agilerl.training.protocols``."""

    name, num_epochs = "random", 0

    def __init__(self, workload: Workload) -> None:
        from agilerl.testing import byte_tokenizer

        self.workload, self.step_number, self.tokenizer = workload, 0, byte_tokenizer()
        self.questions, self.answers = [""] * workload.prompts, [None] * workload.prompts
        self.last_completions = [[""] * workload.group_size] * workload.prompts

    def __len__(self) -> int:
        return self.workload.prompts

    def prompt_lengths(self) -> list[int]:
        """See the protocol."""
        return [self.workload.longest_prompt]

    def upcoming(self, count: int) -> list[list[dict[str, torch.Tensor]]]:
        """See the protocol."""
        steps = range(self.step_number, self.step_number + count)
        texts = [step_prompts(self.workload, step) for step in steps]
        return [[self.tokenizer(text, return_tensors="pt") for text in some] for some in texts]

    def reset(self) -> list[dict[str, torch.Tensor]]:
        """See the protocol."""
        return self.upcoming(1)[0]

    def step(self, completion_ids: list[torch.Tensor]) -> tuple[Any, ...]:
        """Reward the share of even tokens."""
        import torch

        rewards = [[reward(row.tolist()) for row in group] for group in completion_ids]
        self.step_number += 1
        return self.reset(), torch.tensor(rewards)

    def state_dict(self) -> dict[str, int]:
        """See the protocol."""
        return {"position": self.step_number}


def build_population(workload: Workload, size: int) -> Population:
    """Agents on one base, which share their prompts."""
    from agilerl.algorithms import GRPO
    from agilerl.training.collectors.reasoning_collector import ReasoningCollector
    from agilerl.training.population import Population

    agents = GRPO.population(
        size,
        actor_network=build_model(workload),
        pad_token_id=0,
        pad_token="<pad>",
        **agent_arguments(workload),
    )
    return Population(agents, [ReasoningCollector(RandomPrompts(workload))] * size)


def collected(population: Population, mode: str) -> Iterable[Experience]:
    """An experience of each member."""
    from agilerl.training.collectors.rollouts import collect

    if mode == "batched":
        return collect(population.members)
    return (member.collector.collect(member.agent) for member in population)


def roll_out(population: Population, mode: str) -> tuple[list[Experience], float]:
    """The experiences and the CPU seconds they took."""
    start = time.process_time()
    experiences = list(collected(population, mode))
    return experiences, time.process_time() - start


def update(population: Population, experiences: list[Experience]) -> float:
    """CPU seconds of the updates of all members."""
    start = time.process_time()
    for member, experience in zip(population, experiences, strict=True):
        member.agent.learn(experience.experiences, **experience.learn_arguments)
    return time.process_time() - start


def measure_memory(workload: Workload, size: int, mode: str, threads: int) -> dict[str, int]:
    """Bytes of model, agents and two steps over what the process had after its imports."""
    import torch

    import agilerl.algorithms
    import agilerl.training.collectors.rollouts  # noqa: F401

    torch.set_num_threads(threads)
    peak = MemoryPeak()
    population = build_population(workload, size)
    for _ in range(2):
        update(population, roll_out(population, mode)[0])
    return peak.read()


def measure_time(workload: Workload, size: int, threads: int) -> dict[str, list[float]]:
    """CPU seconds of each stage of every measured step."""
    import torch

    torch.set_num_threads(threads)
    population = build_population(workload, size)
    seconds: dict[str, list[float]] = {stage: [] for stage in (*MODES, "updates")}
    for number in range(workload.warmup_steps + workload.measured_steps):
        taken = {}
        for mode in MODES:
            experiences, taken[mode] = roll_out(population, mode)
        taken["updates"] = update(population, experiences)
        for stage in seconds if number >= workload.warmup_steps else ():
            seconds[stage].append(taken[stage])
    return seconds


def run_workload(workload: Workload, sizes: Iterable[int], threads: int) -> Any:
    """All figures of a workload, by population size."""
    by_size = {}
    for size in sizes:
        with freed_blocks_returned():
            memory = {
                mode: in_a_process(measure_memory, workload, size, mode, threads) for mode in MODES
            }
        seconds = in_a_process(measure_time, workload, size, threads)
        median = {stage: statistics.median(taken) for stage, taken in seconds.items()}
        by_size[str(size)] = {
            "memory_bytes": memory,
            "median_cpu_seconds": median,
            "rollouts_one_by_one_over_batched": median["one by one"] / median["batched"],
            "cpu_seconds": seconds,
        }
        print(f"  {size} agents done", flush=True)
    smallest = min(by_size, key=int)
    for found in by_size.values():
        found["memory_ratio_to_smallest"] = {
            mode: found["memory_bytes"][mode]["added"]
            / by_size[smallest]["memory_bytes"]["one by one"]["added"]
            for mode in MODES
        }
    return {"settings": asdict(workload), "population": by_size}


def print_summary(name: str, result: dict[str, Any]) -> None:
    """Print the figures of a workload."""
    for size, found in result["population"].items():
        cpu, memory = found["median_cpu_seconds"], found["memory_bytes"]
        ratios = found["memory_ratio_to_smallest"]
        for mode in MODES:
            print(
                f"{name}: {size} agents, {mode}: rollouts {cpu[mode]:.2f} CPU s, "
                f"{memory[mode]['added'] / 1e6:.0f} MB ({ratios[mode]:.2f} of the smallest)"
            )
        faster = found["rollouts_one_by_one_over_batched"]
        print(f"{name}: {size} agents: {faster:.2f} times as fast; updates {cpu['updates']:.2f} s")


def main() -> None:
    """Run the workloads asked for, print and write their results."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--workload", choices=SHAPES, action="append", help="by default all")
    parser.add_argument("--sizes", type=count, nargs="+", default=SIZES, help="of the population")
    parser.add_argument("--steps", type=count, help="measured steps; by default 3 to 9")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # read when the children load torch
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    shapes = {name: SHAPES[name] for name in given.workload or SHAPES}
    if given.steps:
        shapes = {name: replace(w, measured_steps=given.steps) for name, w in shapes.items()}
    sizes = given.sizes
    if given.quick:
        name = next(iter(shapes))
        shapes, sizes = {name: replace(shrunk(shapes[name]), measured_steps=1)}, (2,)
    run_workloads(
        shapes,
        lambda name: run_workload(shapes[name], sizes, given.threads),
        print_summary,
        given.threads,
        given.out,
    )


if __name__ == "__main__":
    main()
