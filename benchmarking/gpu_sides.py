"""The two sides of ``gpu_step.py``: ``learn`` of this library, TRL's trainer on given completions.

Each case, an option of one of them, is measured in a process of its own.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from measure import MemoryPeak
from vllm_rollout import Workload, build_model

if TYPE_CHECKING:
    import torch

    from agilerl.algorithms import GRPO

PLAIN = {"gradient_checkpointing": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "activation_offload": PLAIN | {"activation_offload": True},
    "use_sequence_packing": PLAIN | {"use_sequence_packing": True},
    "use_liger_loss": PLAIN | {"use_liger_loss": True},
    "torch_compiler": PLAIN | {"torch_compiler": "default"},
    "quantization_config": PLAIN | {"quantization_config": {"load_in_4bit": True}},
    "adamw_8bit": PLAIN | {"optimizer": "adamw_8bit"},
}
"""Of this library, each against ``plain``."""
TRL_OPTIONS: dict[str, dict[str, Any]] = {
    "trl": PLAIN,
    "trl, gradient_checkpointing": {"gradient_checkpointing": True},
}


@dataclass(frozen=True)
class Step:
    """One case: a model, a shape and where it runs."""

    shape: Workload
    micro_batch_size: int
    device: str
    steps: int
    beta: float = 0.04

    @property
    def max_model_len(self) -> int:
        """Tokens of a row."""
        return self.shape.prompt_tokens + self.shape.new_tokens


class DeviceMemoryPeak:
    """Peak of what torch holds on the GPU, over its value at the start."""

    def __init__(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()
        self.start_bytes = torch.cuda.memory_allocated()

    def read(self) -> dict[str, int]:
        """Return ``start``, ``peak`` and ``added`` in bytes, as of now."""
        import torch

        peak = torch.cuda.max_memory_allocated()
        return {"start": self.start_bytes, "peak": peak, "added": peak - self.start_bytes}


def rows_of(step: Step, number: int) -> torch.Tensor:
    """``(P, G, T)`` random ids; the rows of a prompt begin with its tokens."""
    import torch

    shape, generator = step.shape, torch.Generator().manual_seed(number)
    sizes = (shape.prompts, shape.group_size)
    prompts = torch.randint(16, 256, (sizes[0], 1, shape.prompt_tokens), generator=generator)
    completions = torch.randint(16, 256, (*sizes, shape.new_tokens), generator=generator)
    return torch.cat([prompts.expand(*sizes, -1), completions], -1)


def measure(case: str, step: Step) -> dict[str, Any]:
    """Seconds of every step but the first, and the memory they add, in this process.

    Returns:
        The figures, or ``refused`` or ``out_of_memory`` with what was said.
    """
    import torch

    run = trl_steps if case in TRL_OPTIONS else own_steps
    try:
        seconds, memory = run(step, case)
    except (NotImplementedError, ImportError, ValueError) as error:
        return {"refused": str(error)}
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}
    return {
        "median_seconds": statistics.median(seconds[1:]),
        "seconds": seconds,
        "memory_bytes": memory,
    }


def own_steps(step: Step, case: str) -> tuple[list[float], dict[str, int]]:
    """Seconds of ``learn``, and memory."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        agent = build_agent(step, OPTIONS[case], folder)
    memory = start_memory(step)
    action_mask = torch.zeros(step.shape.group_size, step.max_model_len - 1, dtype=torch.bool)
    action_mask[:, step.shape.prompt_tokens - 1 :] = True
    seconds = []
    for number in range(step.steps + 1):
        ids = list(rows_of(step, number).to(step.device))
        masks = [action_mask.to(step.device)] * len(ids)
        rewards = torch.rand(step.shape.prompts, step.shape.group_size)
        with timed(step.device, seconds):
            agent.learn((ids, masks, rewards))
    return seconds, memory.read()


def build_agent(step: Step, options: dict[str, Any], folder: str) -> GRPO:
    """Make the agent; a quantized base is loaded from a folder that it is saved to."""
    from peft import LoraConfig

    from agilerl.algorithms import GRPO

    model = build_model(step.shape, step.device)
    base: dict[str, Any] = {"actor_network": model}
    if "quantization_config" in options:
        model.save_pretrained(folder)
        base = {"model_name": folder, "model_config": {"dtype": model.dtype}}
    rank = step.shape.lora_rank
    return GRPO(
        **base,
        pad_token_id=0,
        pad_token="<pad>",
        device=step.device,
        lora_config=LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        batch_size=step.shape.rows,
        micro_batch_size_per_gpu=step.micro_batch_size,
        group_size=step.shape.group_size,
        beta=step.beta,
        lr=1e-5,
        max_output_tokens=step.shape.new_tokens,
        max_model_len=step.max_model_len,
        **options,
    )


def trl_steps(step: Step, case: str) -> tuple[list[float], dict[str, int]]:
    """Seconds between the step callbacks of TRL's trainer, which is given its rollouts."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from agilerl.testing import byte_tokenizer

    shape, seconds = step.shape, list[float]()
    rollouts = 0

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.timer = timed(step.device, seconds)
            self.timer.__enter__()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.timer.__exit__(None, None, None)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        nonlocal rollouts
        rows = rows_of(step, rollouts).flatten(0, 1)
        rollouts += 1
        cut = shape.prompt_tokens
        return {
            "prompt_ids": rows[:, :cut].tolist(),
            "completion_ids": rows[:, cut:].tolist(),
            "logprobs": None,
        }

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    accumulated = shape.rows // step.micro_batch_size
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=build_model(shape, step.device),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=step.device == "cpu",
                bf16=step.device != "cpu",
                per_device_train_batch_size=step.micro_batch_size,
                gradient_accumulation_steps=accumulated,
                steps_per_generation=accumulated,
                num_generations=shape.group_size,
                max_completion_length=shape.new_tokens,
                max_steps=step.steps + 1,
                beta=step.beta,
                learning_rate=1e-5,
                loss_type="grpo",
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                **TRL_OPTIONS[case],
            ),
            train_dataset=Dataset.from_list([{"prompt": "-"}] * shape.prompts),
            processing_class=byte_tokenizer(),
            peft_config=LoraConfig(
                r=shape.lora_rank,
                lora_alpha=2 * shape.lora_rank,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            ),
            rollout_func=rollout,
            callbacks=[Steps()],
        )
        trainer.remove_callback(PrinterCallback)
        memory = start_memory(step)
        trainer.train()
        return seconds, memory.read()


def start_memory(step: Step) -> MemoryPeak | DeviceMemoryPeak:
    """Begin to record the peak of the device."""
    return MemoryPeak() if step.device == "cpu" else DeviceMemoryPeak()


@contextmanager
def timed(device: str, seconds: list[float]) -> Iterator[None]:
    """Append the seconds of what runs inside; on a GPU until its queue is empty."""
    import torch

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    yield
    wait()
    seconds.append(time.perf_counter() - start)
