"""Time rollouts through vLLM and through transformers, and what vLLM adds to a training step.

Both generators serve adapters on one base model and take turns, one rollout each. After each
rollout through vLLM its agent learns, so that the next one begins by sending the changed adapter to
vLLM (sync). Reported are tokens per second, seconds per sync, the difference between the log-probs
of vLLM and of the trainer, the importance weights, and on a GPU the memory in use at each stage.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarking/vllm_rollout.py --out build/vllm-rollout.json
    .venv/bin/python benchmarking/vllm_rollout.py --device cuda --config qwen2.5-1.5b
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from report import run_workloads

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from agilerl.algorithms import GRPO

SIDES = ("transformers", "vllm")
WEIGHTS = ("mean", "max", "capped", "nonfinite")


@dataclass(frozen=True)
class Workload:
    """One model, a Qwen2 with random weights unless bundled, and one shape of a rollout."""

    name: str
    vocab_size: int = 260
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 4
    intermediate_size: int = 512
    bundled: bool = False
    """The package's own model; the sizes above do not count."""
    prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 64
    """Of every completion: the end-of-sequence token is forbidden."""
    rollouts: int = 5
    """Measured ones per side, after one to warm up."""
    lora_rank: int = 16
    seed: int = 0

    @property
    def rows(self) -> int:
        """Completions of a rollout."""
        return self.prompts * self.group_size


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("bundled", bundled=True, prompts=32),
        Workload("vocab32k", 32768, 256, 6, 4, 4, 1024),
        Workload("tiny", rollouts=2, prompts=2, group_size=2),
        Workload("qwen2.5-1.5b", 151936, 1536, 28, 12, 2, 8960, prompts=32, new_tokens=256),
        Workload("qwen2.5-3b", 151936, 2048, 36, 16, 2, 11008, prompts=32, new_tokens=256),
    )
}
ON_CPU = ("bundled", "vocab32k")


def build_model(workload: Workload, device: str) -> PreTrainedModel:
    """Make the base: float32 on a CPU, bfloat16 on a GPU."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from agilerl.testing import load_bundled_model

    if workload.bundled:
        return load_bundled_model()[0].to(device)
    config = Qwen2Config(
        vocab_size=workload.vocab_size,
        hidden_size=workload.hidden_size,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.key_value_heads,
        intermediate_size=workload.intermediate_size,
        tie_word_embeddings=True,
    )
    torch.manual_seed(workload.seed)
    config.dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.set_default_dtype(config.dtype)
    try:
        with torch.device(device):
            return Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def build_agent(workload: Workload, model: PreTrainedModel, side: str) -> GRPO:
    """Make the agent of a side; both have the same base."""
    from peft import LoraConfig

    from agilerl.algorithms import GRPO
    from agilerl.utils.algo_utils import VLLMConfig

    rank, cuda = workload.lora_rank, model.device.type == "cuda"
    config = VLLMConfig(max_num_seqs=workload.rows, max_lora_rank=rank, sleep_mode=cuda)
    return GRPO(
        pad_token_id=0,
        pad_token="<pad>",
        actor_network=model,
        lora_config=LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        batch_size=workload.rows,
        micro_batch_size_per_gpu=16,
        group_size=workload.group_size,
        lr=1e-4,
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_output_tokens=workload.new_tokens,
        min_output_tokens=workload.new_tokens,
        max_model_len=workload.prompt_tokens + workload.new_tokens,
        gradient_checkpointing=cuda,
        use_vllm=side == "vllm",
        vllm_config=config if side == "vllm" else None,
        seed=workload.seed,
    )


class Bench:
    """Two agents on one base, which take turns."""

    def __init__(self, workload: Workload, device: str) -> None:
        import torch

        self.workload, self.device = workload, device
        self.memory: dict[str, list[int]] = {}
        self._note_memory("before the model")
        self.model = build_model(workload, device)
        self._note_memory("model")
        self.agents = {side: build_agent(workload, self.model, side) for side in SIDES}
        self._note_memory("agents and engine, between rollouts")
        self.rng = torch.Generator().manual_seed(workload.seed)

    def _note_memory(self, stage: str) -> None:
        """Bytes of the GPU in use by all processes."""
        import torch

        if self.device == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            self.memory.setdefault(stage, []).append(total - free)

    def rollout(self, side: str, prompts: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        """Sample every prompt's group, and with vLLM learn from them."""
        agent, report = self.agents[side], {}
        cpu, start = self._cpu_seconds(), time.perf_counter()
        with agent.rollout():
            report["begin_seconds"] = time.perf_counter() - start
            self._note_memory(f"within a rollout through {side}")
            start = time.perf_counter()
            action = agent.get_action(prompts)
            report["seconds"] = time.perf_counter() - start
        report["cpu_seconds"] = {k: v - cpu[k] for k, v in self._cpu_seconds().items()}
        tokens = sum(int(mask.sum()) for mask in action.action_masks)
        if tokens != self.workload.rows * self.workload.new_tokens:
            raise RuntimeError(f"{tokens} tokens were sampled on the {side} side")
        if side == "vllm":
            self._note_memory("agents and engine, between rollouts")
            report |= self._learn(agent, action)
            self._note_memory("after learn")
        return report

    def _learn(self, agent: GRPO, action: Any) -> dict[str, Any]:
        import torch

        rewards = torch.stack(
            [
                ((ids[:, 1:] % 2 == 0) & mask.bool()).sum(1) / mask.sum(1)  # share of even tokens
                for ids, mask in zip(action.completion_ids, action.action_masks, strict=True)
            ]
        )
        start = time.perf_counter()
        found = agent.learn((*action, rewards), sampling_logps=action.sampling_logps)
        return {
            "learn_seconds": time.perf_counter() - start,
            "sync_seconds": agent.generator.sync_seconds,
            "probe_difference": agent.generator.probe_difference,
            "importance_weight": {name: found[f"importance_weight_{name}"] for name in WEIGHTS},
            "sampler_kl": found["sampler_kl"],
        }

    def _cpu_seconds(self) -> dict[str, float]:
        """Of this process and of the engine's, user and system together."""
        here = psutil.Process()
        processes = {"trainer": [here], "engine": here.children(recursive=True)}
        return {
            name: sum(sum(process.cpu_times()[:2]) for process in found)
            for name, found in processes.items()
        }

    def run(self, rollouts: int) -> dict[str, Any]:
        """Rollouts of each side in turn; the first of each is not counted."""
        import torch

        w = self.workload
        vocabulary = self.model.config.vocab_size
        reports: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for number in range(rollouts + 1):
            shape = (w.prompts, w.prompt_tokens)
            ids = torch.randint(1, vocabulary, shape, generator=self.rng)
            prompts = [{"input_ids": r[None], "attention_mask": r[None] * 0 + 1} for r in ids]
            for side in SIDES:
                report = self.rollout(side, prompts)
                print(f"  rollout {number}: {side} {report['seconds']:.2f} s", flush=True)
                if number:
                    reports[side].append(report)
        for agent in self.agents.values():
            agent.clean_up()
        return self._summary(reports)

    def _summary(self, reports: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        tokens = self.workload.rows * self.workload.new_tokens
        speed = {
            side: tokens / statistics.median(run["seconds"] for run in runs)
            for side, runs in reports.items()
        }
        runs = reports["vllm"]
        return {
            "settings": asdict(self.workload),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "tokens_per_rollout": tokens,
            "median_tokens_per_second": speed,
            "ratio_vllm_to_transformers": speed["vllm"] / speed["transformers"],
            # What other load on the machine disturbs least.
            "fastest_tokens_per_second": {
                side: tokens / min(run["seconds"] for run in runs) for side, runs in reports.items()
            },
            "median_cpu_seconds": {
                side: statistics.median(sum(run["cpu_seconds"].values()) for run in runs)
                for side, runs in reports.items()
            },
            "median_sync_seconds": statistics.median(run["sync_seconds"] for run in runs),
            "median_learn_seconds": statistics.median(run["learn_seconds"] for run in runs),
            "largest_probe_difference": max(run["probe_difference"] for run in runs),
            "importance_weight": {
                "mean": statistics.mean(run["importance_weight"]["mean"] for run in runs),
                **{
                    name: max(run["importance_weight"][name] for run in runs)
                    for name in WEIGHTS[1:]
                },
            },
            "largest_sampler_kl": max(run["sampler_kl"] for run in runs),
            **({"gpu_bytes_in_use": self.memory} if self.memory else {}),
            "rollouts": reports,
        }


def print_summary(name: str, result: dict[str, Any]) -> None:
    """Print the figures of a workload."""
    for side, speed in result["median_tokens_per_second"].items():
        cpu = result["median_cpu_seconds"][side]
        print(f"{name}: {side} {speed:.0f} tokens per second, {cpu:.2f} CPU seconds a rollout")
    weight = ", ".join(f"{k} {v:.6g}" for k, v in result["importance_weight"].items())
    print(
        f"{name}: sync {result['median_sync_seconds']:.3f} s, learn "
        f"{result['median_learn_seconds']:.2f} s, probe {result['largest_probe_difference']:.2g} "
        f"nats, importance weight {weight}"
    )
    for stage, used in result.get("gpu_bytes_in_use", {}).items():
        print(f"{name}: {max(used) / 2**30:.2f} GiB in use, {stage}")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", choices=WORKLOADS, help=f"by default {' and '.join(ON_CPU)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rollouts", type=int, help="measured rollouts of each side and workload")
    parser.add_argument("--out", type=Path, help="where to write the JSON; nowhere by default")
    arguments = parser.parse_args(argv)
    if arguments.rollouts is not None and arguments.rollouts < 1:
        parser.error(f"--rollouts is {arguments.rollouts}; it must be 1 or more")
    return arguments


def main() -> None:
    """Run the workloads asked for, print and write their results."""
    arguments = parse_arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    names = [arguments.config] if arguments.config else ON_CPU

    def run(name: str) -> dict[str, Any]:
        workload = WORKLOADS[name]
        return Bench(workload, arguments.device).run(arguments.rollouts or workload.rollouts)

    run_workloads(names, run, print_summary, threads, arguments.out, device=arguments.device)


if __name__ == "__main__":
    main()
