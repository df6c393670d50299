"""What the two ranks run on a partitioned base (ZeRO stage 3) only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from agents_and_batches import SETTINGS, TOKENIZER, make_agent, weights
from cases_learn import mine
from deepspeed.runtime.zero import parameter_offload
from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.distributed import ranks_of
from agilerl.llm_envs import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.llm_envs.dataset import TrainingBatchSampler
from agilerl.testing import tiny_model
from agilerl.training.collectors.dynamic_sampling import DynamicSampling
from agilerl.training.collectors.experience import zero_variance_statistics
from agilerl.training.collectors.multiturn_collector import MultiTurnCollector

EVERY = ["q_proj", "v_proj", "gate_proj", "down_proj"]
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tie": True, "targets": EVERY},
    "tied_recomputed": {"tie": True, "targets": EVERY, "gradient_checkpointing": True},
    # A recomputation ends in a layer without an adapter here.
    "untied_recomputed": {"tie": False, "targets": EVERY[:2], "gradient_checkpointing": True},
    "last_layer_only": {"tie": True, "targets": EVERY, "layers": [1]},
}


def model_of(tie: bool, seed: int = 0) -> Any:
    return tiny_model(hidden_size=32, layers=2, tie_word_embeddings=tie, seed=seed)


def agent_on(
    tie: bool,
    targets: list[str],
    gradient_checkpointing: bool = False,
    layers: list[int] | None = None,
    accelerator: Any = None,
) -> GRPO:
    """Two epochs, so that there are passes over old and reference log-probs."""
    return make_agent(
        accelerator,
        actor_network=model_of(tie),
        gradient_checkpointing=gradient_checkpointing,
        update_epochs=2,
        lr=2e-3,
        lora_config=LoraConfig(
            r=3,
            target_modules=targets,
            layers_to_transform=layers,
            task_type="CAUSAL_LM",
        ),
    )


def prompts(count: int) -> list[Any]:
    return [dict(TOKENIZER("abcdef"[: 2 + n], return_tensors="pt")) for n in range(count)]


def answers(agent: GRPO, count: int) -> list[torch.Tensor]:
    """Greedy ones, to one prompt after the other."""
    with agent.rollout():
        return [
            agent.get_action([prompt], training=False).completion_ids[0]
            for prompt in prompts(count)
        ]


def elements(agent: GRPO) -> dict[str, int]:
    """How much of the base there is, on this rank, and put together at the moment."""
    model = agent.policy.base.model
    parameters: list[Any] = [p for n, p in model.named_parameters() if "lora_" not in n]
    return {
        "all": sum(p.ds_numel for p in parameters),
        "here": sum(p.ds_tensor.numel() for p in parameters),
        "whole": sum(p.numel() for p in parameters),
    }


def watch(agent: GRPO) -> list[int]:
    """Fills up with the elements that are together when a backward starts."""
    seen: list[int] = []
    backward = agent.engine.backward

    def watched(loss: torch.Tensor) -> None:
        seen.append(elements(agent)["whole"])
        backward(loss)

    agent.engine.backward = watched  # type: ignore[method-assign]
    return seen


def partitioned_models(accelerator: Any) -> dict[str, Any]:
    """Tied and untied heads, recomputed or not: updates and rollouts by turns."""
    result: dict[str, Any] = {}
    for name, settings in MODELS.items():
        agent = agent_on(**settings, accelerator=accelerator)
        found: dict[str, Any] = {"elements": elements(agent)}
        # Ranks answer different numbers of prompts: forwards are not in step in a rollout.
        count = 1 + 3 * accelerator.process_index
        found["answers"] = [answers(agent, count)]
        during = watch(agent)
        for _ in range(2):
            mine(accelerator).learned_by(agent)
            found["answers"].append(answers(agent, count))
        found |= {"weights": weights(agent), "during": max(during), "after": elements(agent)}
        found["stack"] = len(parameter_offload.FWD_MODULE_STACK)
        agent.clean_up()
        result[name] = found
    return result


def partitioned_checkpoints(accelerator: Any) -> dict[str, Any]:
    """Both kinds are written, and both go on: in the same agent, in a new one, in a rebuilt one."""
    folder = Path(sys.argv[1])
    agent = make_agent(accelerator)
    part = mine(accelerator)
    part.learned_by(agent)
    for lora_only in (True, False):
        agent.save_checkpoint(folder / f"lora_only_{lora_only}", lora_only=lora_only)
    base = agent.policy.base.model
    agents = {
        "adapters": GRPO.load(
            folder / "lora_only_True", accelerator=accelerator, actor_network=base
        ),
        "full": GRPO.load(folder / "lora_only_False", accelerator=accelerator),
        "into": make_agent(accelerator),
        "same": agent,
    }
    agents["into"].load_checkpoint(folder / "lora_only_False", load_optimizer=True)
    other = make_agent(accelerator, actor_network=tiny_model(hidden_size=32, layers=1, seed=1))
    refusal = ""
    try:
        other.load_checkpoint(folder / "lora_only_False")
    except ValueError as error:
        refusal = str(error)
    second = {}
    for name, each in agents.items():
        part.learned_by(each)
        second[name] = weights(each)
        each.clean_up()
    # Without an agent the model stays partitioned, and serves the next one.
    late = make_agent(accelerator, actor_network=base)
    part.learned_by(late)
    return {"second": second, "refusal": refusal, "late": weights(late)}


def partition_refusals(accelerator: Any) -> dict[str, str]:
    """What does not go together with a partitioned base."""
    import deepspeed

    alone = make_agent()
    partitioned = make_agent(accelerator)
    elsewhere = tiny_model(hidden_size=32, layers=1)
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    deepspeed.zero.Init(module=elsewhere, config_dict_or_path=config, dtype=torch.float32)

    def lora(**changes: Any) -> LoraConfig:
        return LoraConfig(**({"r": 3, "target_modules": ["q_proj"]} | changes))

    def make(**changes: Any) -> Callable[[], Any]:
        return lambda: make_agent(accelerator, **changes)

    attempts: dict[str, Callable[[], Any]] = {
        "head": make(lora_config=lora(target_modules=["q_proj", "lm_head"])),
        "dora": make(lora_config=lora(use_dora=True)),
        "modules_to_save": make(lora_config=lora(modules_to_save=["norm"])),
        "compiled": make(torch_compiler="default"),
        "offloaded": make(activation_offload=True),
        "auto": make(micro_batch_size_per_gpu="auto"),
        "eight_bits": make(optimizer="adamw_8bit"),
        "in_use": make(actor_network=alone.policy.base.model),
        "elsewhere": make(actor_network=elsewhere),
        "without": lambda: GRPO(**SETTINGS, actor_network=partitioned.policy.base.model),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            messages[name] = str(error)
    return messages


TURNS_OF_RANK = (2, 3)


def sampled(agent: GRPO, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tokens and log-probs of several chunks of rows; the same draws wherever it is called."""
    ids = [prompt["input_ids"][0] for prompt in prompts(count)]
    sampling = replace(agent.sampling_config(), return_logps=True)
    rng = torch.Generator().manual_seed(count)
    done = agent.generator.generate(ids, 2, sampling, rng)
    assert done.logps is not None
    return done.token_ids, done.logps


def turns(agent: GRPO, count: int, number: int) -> list[torch.Tensor]:
    """The rows after some turns that go on from kept keys and values."""
    rows = [prompt["input_ids"] for prompt in prompts(count)]
    agent.rng.manual_seed(0)
    agent.hf_generate_chunk_size = None
    with agent.rollout():
        for _ in range(number):
            said = agent.get_action(list(map(as_prompt, rows)), repeat_prompts=False)
            rows = [torch.cat([ids, torch.tensor([[65, 66]])], 1) for ids in said.completion_ids]
    return rows


def as_prompt(ids: torch.Tensor) -> Any:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "text": ""}


def rolled_out(agent: GRPO, rank: int) -> dict[str, Any]:
    """What a rank generates; another number of rows, lengths, chunks and turns on each."""
    count = 1 + 2 * rank
    agent.max_output_tokens, agent.hf_generate_chunk_size = 4, 2
    with agent.rollout(), agent.rollout():
        found: dict[str, Any] = {"one_by_one": answers(agent, count)}
    together = agent.get_action(prompts(count), training=False).completion_ids
    found |= {"together": together, "sampled": sampled(agent, count)}
    with agent.rollout():
        found["only_rank_1"] = answers(agent, 1) if rank else []
    return found


def watch_forwards(agent: GRPO) -> tuple[list[int], list[int]]:
    """Elements that are together when a module runs, and the columns that the decoder runs."""
    whole: list[int] = []
    columns: list[int] = []
    base = agent.policy.base
    parameters = [p for p in base.model.parameters() if hasattr(p, "ds_numel")]
    for module in base.model.modules():
        if any(hasattr(p, "ds_numel") for p in module.parameters(recurse=False)):
            module.register_forward_pre_hook(
                lambda *_: whole.append(sum(p.numel() for p in parameters))
            )
    base.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: columns.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return whole, columns


def largest_module(agent: GRPO) -> int:
    """Elements of the module with most weights of its own."""
    modules = agent.policy.base.model.modules()
    return max(sum(getattr(p, "ds_numel", 0) for p in m.parameters(recurse=False)) for m in modules)


def rollouts_in_parts(accelerator: Any) -> dict[str, Any]:
    """Generation that never puts the whole base together, then an update."""
    result: dict[str, Any] = {}
    rank = accelerator.process_index
    for name in ("tied", "untied_recomputed"):
        agent = agent_on(**MODELS[name], accelerator=accelerator)
        whole, columns = watch_forwards(agent)
        found = rolled_out(agent, rank)
        before = len(columns)
        found["turns"] = turns(agent, 1 + rank, TURNS_OF_RANK[rank])
        found |= {"columns": list(columns), "turn_columns": columns[before:], "whole": max(whole)}
        found |= {"largest": largest_module(agent), "elements": elements(agent)}
        try:
            with agent.rollout(), agent.policy.base.whole():
                pass
        except RuntimeError as error:
            found["refusal"] = str(error)
        mine(accelerator).learned_by(agent)
        found |= {"weights": weights(agent), "answer": answers(agent, 1)}
        agent.clean_up()
        result[name] = found
    return result


class PaysEveryOther:
    """Games of one turn more on rank 1; on rank 0 the episodes of the first seeds all get 0."""

    def __init__(self, rank: int, flat: list[int], resets: list[int]) -> None:
        self.rank, self.flat, self.resets = rank, flat, resets

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        assert seed is not None
        self.turn, self.reward = 0, 0.0 if seed in self.flat else float(self.resets.count(seed) % 2)
        self.resets.append(seed)
        return f"game {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        over = self.turn == 1 + self.rank
        return "on", self.reward * over, over, False, {}


def resampled_in_parts(accelerator: Any) -> dict[str, Any]:
    """Rank 0 lacks groups with variance; within a rollout no rank may ask the others about it."""
    rank, resets = accelerator.process_index, list[int]()
    order = TrainingBatchSampler(12, 2, 1, rank, 2)
    flat = order.current() if rank == 0 else []
    env = SyncMultiTurnVecEnv(
        lambda: TokenObservationWrapper(PaysEveryOther(rank, flat, resets), TOKENIZER, max_turns=2),
        *(2, 2),
        max_turns=2,
    )
    agent = agent_on(**MODELS["tied"], accelerator=accelerator)
    sampling = DynamicSampling("resample", max_resamples=3)
    collector = MultiTurnCollector(env, order, sampling, ranks_of(accelerator))
    upcoming = [seed for batch in order.upcoming(2) for seed in batch]
    collected = collector.collect(agent)
    result = {
        "seeds": (resets[:: agent.group_size], upcoming),
        "rewards": collected.experiences[2],
        "metrics": collected.metrics | zero_variance_statistics(collected),
        "steps": collected.steps,
        "learned": agent.learn(collected.experiences, **collected.learn_arguments),
    }
    env.close()
    agent.clean_up()
    return result


ZERO3_CASES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "partitioned_models": partitioned_models,
    "partitioned_checkpoints": partitioned_checkpoints,
    "partition_refusals": partition_refusals,
    "rollouts_in_parts": rollouts_in_parts,
    "resampled_in_parts": resampled_in_parts,
}
