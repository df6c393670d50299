"""The two sides. Each runs in a process of its own, which does one step whenever it is told to.

Both get the texts of a step before the clock starts (TRL as a dataset, this library as tokens), and
both count the reward function. A step ends after the optimizer step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from measure import MemoryPeak, StepTimer
from workloads import (
    Workload,
    agent_arguments,
    build_model,
    completion_lengths,
    lora_config,
    reward,
    step_prompts,
)

if TYPE_CHECKING:
    from agilerl.llm.generation.decode import PromptBatch
    from agilerl.typing import ActionResult


def run_side(
    side: str, connection: Connection, workload: Workload, steps: int, threads: int
) -> None:
    """Build one side, then answer every message with the report of one step, ``steps`` times.

    Args:
        side: ``"agilerl"`` or ``"trl"``.
        connection: Sends ``{"ready": True}`` once built, then one report per message received.
        workload: What to run.
        steps: Warm-up and measured steps together.
        threads: CPU threads torch may use.
    """
    torch.set_num_threads(threads)
    {"agilerl": run_agilerl, "trl": run_trl}[side](connection, workload, steps)


class OwnSteps:
    """Steps of this library: ``get_action``, the rewards and ``learn``.

    Args:
        workload: What to run.
    """

    def __init__(self, workload: Workload) -> None:
        from agilerl.algorithms import GRPO
        from agilerl.testing import byte_tokenizer

        self.workload = workload
        self.tokenizer = byte_tokenizer()
        model = build_model(workload)
        self.memory = MemoryPeak()
        self.agent = GRPO(
            actor_network=model,
            pad_token_id=self.tokenizer.pad_token_id,
            pad_token=self.tokenizer.pad_token,
            **agent_arguments(workload),
            seed=workload.seed,
        )

    def prompts(self, number: int) -> list[Any]:
        """The prompts of a step, as an environment hands them out."""
        return [
            {**self.tokenizer(text, return_tensors="pt"), "text": text}
            for text in step_prompts(self.workload, number)
        ]

    def rollout(self, prompts: list[Any], number: int) -> ActionResult:
        """Generate the completions of a step, each as long as the workload says."""
        with row_limits(completion_lengths(self.workload, number)):
            return self.agent.get_action(prompts)

    def update(self, result: ActionResult) -> torch.Tensor:
        """Reward completions and learn from them; returns the rewards ``(P, G)``."""
        rewards = torch.tensor(
            [
                [reward(row[1:][mask].tolist()) for row, mask in zip(ids, masks, strict=True)]
                for ids, masks in zip(result.completion_ids, result.action_masks, strict=True)
            ]
        )
        self.agent.learn((result.completion_ids, result.action_masks, rewards))
        return rewards

    def step(self, prompts: list[Any], number: int) -> dict[str, Any]:
        """Do one step and report it."""
        timer = StepTimer()
        with timer.generation():
            result = self.rollout(prompts, number)
        rewards = self.update(result)
        seconds = timer.stop()
        lengths = [int(row.sum()) for masks in result.action_masks for row in masks]
        return _report(seconds, lengths, rewards.flatten().tolist(), self.memory)


def run_agilerl(connection: Connection, workload: Workload, steps: int) -> None:
    """Answer each message with a step of :class:`OwnSteps`."""
    own = OwnSteps(workload)
    connection.send({"ready": True})
    for number in range(steps):
        prompts = own.prompts(number)
        connection.recv()
        connection.send(own.step(prompts, number))


@contextmanager
def row_limits(lengths: Sequence[int]) -> Iterator[None]:
    """Within it, completion i of the next rollout ends at ``lengths[i]`` tokens.

    No public setting does that; with limits that are all the same this changes nothing.
    """
    from agilerl.llm.generation.batching import RequestBatch

    batch_of = RequestBatch._batch

    def limited(self: RequestBatch, chunk: Sequence[int]) -> PromptBatch:
        batch = batch_of(self, chunk)
        own = [min(limit, lengths[i]) for limit, i in zip(batch.limits, chunk, strict=True)]
        return replace(batch, limits=own)

    RequestBatch._batch = limited  # type: ignore[method-assign]
    try:
        yield
    finally:
        RequestBatch._batch = batch_of  # type: ignore[method-assign]


def ending_at(
    lengths: Callable[[], list[int]], generate: Callable[..., Any], eos_token_id: int
) -> Callable[..., Any]:
    """``generate`` of a transformers model, with completions that end at given lengths.

    Args:
        lengths: Returns the tokens of each completion, the end of sequence included.
        generate: The model's method.
        eos_token_id: The only token that is allowed there.
    """
    from transformers import LogitsProcessorList

    def ended(*args: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        last, prompt_width = torch.tensor(lengths()), input_ids.shape[1]

        def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            ends = last == ids.shape[1] - prompt_width + 1
            scores[ends] = -torch.inf
            scores[ends, eos_token_id] = 0.0
            return scores

        processors = LogitsProcessorList([process])
        return generate(*args, input_ids=input_ids, logits_processor=processors, **kwargs)

    return ended


def run_trl(connection: Connection, workload: Workload, steps: int) -> None:
    """One step is what ``GRPOTrainer.train`` does between its step callbacks.

    The trainer owns the loop, so the callback that begins a step waits for the message.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from agilerl.testing import byte_tokenizer

    timer = StepTimer()
    rewards: list[float] = []
    lengths: list[int] = []
    updates = rollouts = 0

    def reward_function(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths[:] = map(len, completion_ids)
        rewards[:] = map(reward, completion_ids)
        return list(rewards)

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal timer
            if updates % workload.optimizer_steps == 0:
                connection.recv()
                timer = StepTimer()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            nonlocal updates, rollouts
            updates += 1
            if updates % workload.optimizer_steps == 0:
                rollouts += 1
                connection.send(_report(timer.stop(), lengths, rewards, memory))

    def timed(generate: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with timer.generation():
                return generate(*args, **kwargs)

        return wrapper

    with tempfile.TemporaryDirectory() as output_dir:
        config = GRPOConfig(**_trl_settings(workload, steps), output_dir=output_dir)
        texts = [text for step in range(steps) for text in step_prompts(workload, step)]
        tokenizer = byte_tokenizer()
        model = build_model(workload)
        memory = MemoryPeak()
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward_function,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
            processing_class=tokenizer,
            peft_config=lora_config(workload),
            callbacks=[Steps()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer._generate_single_turn = timed(trainer._generate_single_turn)
        if workload.mean_new_tokens is not None:
            trainer.model.generate = ending_at(
                lambda: completion_lengths(workload, rollouts),
                trainer.model.generate,
                tokenizer.eos_token_id,
            )
        connection.send({"ready": True})
        trainer.train()


def _trl_settings(workload: Workload, steps: int) -> dict[str, Any]:
    shape = {
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": workload.micro_batch_size,
        "gradient_accumulation_steps": workload.batch_size // workload.micro_batch_size,
        "steps_per_generation": workload.sequences // workload.micro_batch_size,
        "num_generations": workload.group_size,
        "max_steps": steps * workload.optimizer_steps,
        "beta": workload.beta,
        "learning_rate": workload.lr,
        "max_completion_length": workload.new_tokens,
        "generation_kwargs": {"min_new_tokens": workload.new_tokens},
        "shuffle_dataset": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": workload.seed,
    }
    if workload.defaults:
        return shape
    return shape | {
        "gradient_checkpointing": False,
        "num_iterations": 1,
        "loss_type": "grpo",
        "max_grad_norm": workload.max_grad_norm,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "top_k": workload.top_k,
    }


def _report(
    seconds: dict[str, float], lengths: list[int], rewards: list[float], memory: MemoryPeak
) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "lengths": list(lengths),
        "reward_mean": sum(rewards) / len(rewards),
        "memory_bytes": memory.read(),
    }
