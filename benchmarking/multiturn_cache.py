"""Time the generation of multi-turn episodes with and without the cache kept between turns.

The same episodes are played both ways alternately: the model answers, a script adds feedback, and
the whole text is the next prompt. Prints CPU seconds and tokens run per turn, the ratios of the two
ways, and the memory that playing the episodes once adds, each way in a process of its own, in which
glibc returns freed blocks to the system at once.

    .venv/bin/python benchmarking/multiturn_cache.py --out build/multiturn-cache.json
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from alternating import in_a_process
from measure import MemoryPeak, freed_blocks_returned
from report import benchmark_parser, count, run_workloads

if TYPE_CHECKING:
    import torch

    from agilerl.algorithms import GRPO

SIDES = ("kept", "recomputed")


@dataclass(frozen=True)
class Workload:
    """One model and one shape of the episodes; every row plays all turns."""

    name: str
    model: str
    """``"bundled"``, or ``"large"``: random, hidden size 256, 6 layers, 32768 tokens."""
    prompts: int
    group_size: int
    """Episodes that start from the same prompt; the script parts them at the first turn."""
    prompt_tokens: int
    answer_tokens: int
    """Of every answer: the end-of-sequence token is forbidden."""
    feedback_tokens: int
    turns: int
    plays: int
    """Measured plays per side, after one to warm up."""
    lora_rank: int = 32
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of an episode at its end."""
        return self.prompt_tokens + self.turns * (self.answer_tokens + self.feedback_tokens)


_DEMO = Workload("demo-3-turns", "bundled", 16, 8, 150, 8, 40, turns=3, plays=5)
WORKLOADS = {
    workload.name: workload
    for workload in (
        _DEMO,
        replace(_DEMO, name="demo-8-turns", turns=8, plays=3),
        replace(_DEMO, name="demo-32-turns", prompts=4, group_size=4, turns=32, plays=2),
        Workload("large-8-turns", "large", 4, 8, 512, 8, 40, turns=8, plays=3),
    )
}


def build_agent(workload: Workload) -> GRPO:
    """Make an agent whose generation this is about."""
    from peft import LoraConfig

    from agilerl.algorithms import GRPO
    from agilerl.testing import byte_tokenizer, load_bundled_model, tiny_model

    if workload.model == "bundled":
        model, tokenizer = load_bundled_model()
    else:
        model = tiny_model(32768, 256, 6, heads=4, key_value_heads=4, initializer_range=0.02)
        tokenizer = byte_tokenizer()
    rank = workload.lora_rank
    return GRPO(
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        actor_network=model,
        lora_config=LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        max_output_tokens=workload.answer_tokens,
        min_output_tokens=workload.answer_tokens,
        max_model_len=workload.longest,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )


def play(agent: GRPO, workload: Workload, side: str) -> dict[str, Any]:
    """Play all episodes; returns CPU seconds and tokens run per turn, and what was sampled."""
    import torch

    from agilerl.llm.generation.merged_weights import rollout_weights

    script = torch.Generator().manual_seed(workload.seed)
    agent.rng.manual_seed(workload.seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(16, 256, shape, generator=script)

    starts = draw(workload.prompts, workload.prompt_tokens)
    rows = list(starts.repeat_interleave(workload.group_size, 0))
    report: dict[str, Any] = {"seconds": [], "tokens_run": []}
    context = agent.rollout() if side == "kept" else nullcontext()
    # The adapter is merged once on both sides: only the cache differs.
    with rollout_weights(agent.policy), context, _counted(agent) as count:
        for _ in range(workload.turns):
            before, start = count[0], time.process_time()
            done = agent.generator.generate(rows, 1, agent.sampling_config(), agent.rng)
            report["seconds"].append(time.process_time() - start)
            report["tokens_run"].append(count[0] - before)
            feedback = draw(len(rows), workload.feedback_tokens)
            rows = [torch.cat(parts) for parts in zip(rows, done.token_ids, feedback, strict=True)]
    if any(len(row) != workload.longest for row in rows):
        raise RuntimeError("an answer has another length than asked for")
    report["rows"] = torch.stack(rows)
    return report


@contextmanager
def _counted(agent: GRPO) -> Iterator[list[int]]:
    """Count the tokens that go through the decoder, padding included."""
    count = [0]

    def add(module: Any, args: Any, kwargs: dict[str, torch.Tensor]) -> None:
        count[0] += kwargs["input_ids"].numel()

    handle = agent.policy.base.decoder.register_forward_pre_hook(add, with_kwargs=True)
    yield count
    handle.remove()


def measure_memory(workload: Workload, side: str, threads: int) -> dict[str, int]:
    """Bytes that one play adds in this process."""
    import torch

    torch.set_num_threads(threads)
    agent = build_agent(workload)
    peak = MemoryPeak()
    play(agent, workload, side)
    return peak.read()


def run_workload(workload: Workload, threads: int) -> dict[str, Any]:
    """Play both ways in turn.

    Args:
        workload: What to play.
        threads: CPU threads of torch where memory is measured.

    Returns:
        Settings, medians per turn and per play, memory, ratios, and the seconds of every play.
    """
    with freed_blocks_returned():
        memory = {side: in_a_process(measure_memory, workload, side, threads) for side in SIDES}
    agent = build_agent(workload)
    reports: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    equal_rows = 1.0
    for number in range(workload.plays + 1):
        sampled = []
        for side in SIDES:
            report = play(agent, workload, side)
            sampled.append(report.pop("rows"))
            print(f"  play {number}: {side} {sum(report['seconds']):.2f} s", flush=True)
            if number:
                reports[side].append(report)
        equal_rows = min(equal_rows, float((sampled[0] == sampled[1]).all(1).float().mean()))
    return _summary(workload, reports, memory, equal_rows)


def _summary(
    workload: Workload,
    reports: dict[str, list[dict[str, Any]]],
    memory: dict[str, dict[str, int]],
    equal_rows: float,
) -> dict[str, Any]:
    sides = {}
    for side, runs in reports.items():
        turns = zip(*(run["seconds"] for run in runs), strict=True)
        sides[side] = {
            "median_seconds_per_play": statistics.median(sum(run["seconds"]) for run in runs),
            "median_seconds_per_turn": [statistics.median(turn) for turn in turns],
            "tokens_run_per_turn": runs[0]["tokens_run"],
            "memory_bytes": memory[side],
            "seconds_of_plays": [run["seconds"] for run in runs],
        }
    kept, recomputed = sides["kept"], sides["recomputed"]
    last = "median_seconds_per_turn"
    return {
        "settings": asdict(workload),
        # Rounding may turn a draw that lies on the edge between two tokens.
        "share_of_equal_episodes": equal_rows,
        "sides": sides,
        "ratio": {
            "seconds": kept["median_seconds_per_play"] / recomputed["median_seconds_per_play"],
            "seconds_last_turn": kept[last][-1] / recomputed[last][-1],
            "tokens_run": sum(kept["tokens_run_per_turn"]) / sum(recomputed["tokens_run_per_turn"]),
            "memory_added": memory["kept"]["added"] / memory["recomputed"]["added"],
        },
    }


def print_summary(name: str, result: dict[str, Any]) -> None:
    """Print one line per side and one with the ratios."""
    print(f"{name}: median CPU seconds of each turn, memory added")
    for side, summary in result["sides"].items():
        turns = " ".join(f"{seconds:.2f}" for seconds in summary["median_seconds_per_turn"])
        added = summary["memory_bytes"]["added"] / 1e6
        print(f"  {side:10} {summary['median_seconds_per_play']:.2f} s = {turns}, {added:.0f} MB")
    print("  ratio      " + ", ".join(f"{k} {v:.2f}" for k, v in result["ratio"].items()))


def main() -> None:
    """Run the workloads asked for, print and write their results."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--plays", type=count, help="measured plays of each side and workload")
    arguments = parser.parse_args()
    # Read when torch is loaded, which is only below.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    workloads = WORKLOADS
    if arguments.workload != "all":
        workloads = {arguments.workload: WORKLOADS[arguments.workload]}
    if arguments.quick:
        few = {"prompts": 2, "group_size": 2, "prompt_tokens": 16, "turns": 3, "plays": 1}
        workloads = {"quick": replace(_DEMO, name="quick", **few)}

    def run(name: str) -> dict[str, Any]:
        workload = workloads[name]
        workload = replace(workload, plays=arguments.plays or workload.plays)
        return run_workload(workload, arguments.threads)

    run_workloads(
        workloads, run, print_summary, arguments.threads, arguments.out, steps=arguments.plays
    )


if __name__ == "__main__":
    main()
