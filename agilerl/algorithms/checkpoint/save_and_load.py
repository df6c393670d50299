"""Agents to checkpoints and back.

The files are :mod:`agilerl.llm.checkpoint.grid`'s business, reading them ``checkpoint_content``'s.
"""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from agilerl.algorithms.checkpoint.content import CheckpointContent, read_content
from agilerl.algorithms.checkpoint.plain_values import decode_value, encode_arguments, encode_value
from agilerl.distributed import ranks_of
from agilerl.llm.checkpoint import grid, lora_merging
from agilerl.llm.checkpoint.adapter_files import LoadedAdapter
from agilerl.llm.checkpoint.base_weights import base_part, changed_base, overwrite_base
from agilerl.llm.engine.local import LocalEngine
from agilerl.llm.shared_base import load_base

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from accelerate import Accelerator

    from agilerl.algorithms.core.llm import LLMAlgorithm

    AgentT = TypeVar("AgentT", bound=LLMAlgorithm)


def save(agent: LLMAlgorithm, path: Path, *, lora_only: bool, save_optimizer: bool) -> None:
    """Write one cell of the checkpoint grid; all ranks together."""
    ranks = ranks_of(agent.accelerator)
    attributes = _attributes(agent)
    attributes["rng_states"] = ranks.gather(attributes["rng_state"])
    grid.save_checkpoint(
        path,
        attributes,
        grid.Saved(agent.policy, agent.engine, ranks),
        lora_only=lora_only,
        save_optimizer=save_optimizer,
    )
    agent.skipped_steps.last_checkpoint = str(path)


def load_into(
    agent: LLMAlgorithm,
    path: Path,
    *,
    load_optimizer: bool,
    reference_from_actor: bool,
    merge: bool,
) -> None:
    """Load a checkpoint's weights, and optimizer if asked, into a living agent.

    A checkpoint that is refused leaves the agent as it was.

    Raises:
        FileNotFoundError: If there is no checkpoint, or it lacks a file.
        ValueError: If it is damaged, or does not fit the agent.
    """
    content = read_content(path, ranks_of(agent.accelerator), load_optimizer=load_optimizer)
    _load_content(
        agent,
        content,
        load_optimizer=load_optimizer,
        reference_from_actor=reference_from_actor,
        merge=merge,
        keep_lr=True,
    )


def _load_content(
    agent: LLMAlgorithm,
    content: CheckpointContent,
    *,
    load_optimizer: bool,
    reference_from_actor: bool,
    merge: bool,
    keep_lr: bool,
) -> None:
    saved, optimizer = content.adapters, content.optimizer
    roles = {"actor": saved["actor"]}
    if "reference" in agent.policy.slots:
        own = saved.get("reference")
        roles["reference"] = saved["actor"] if reference_from_actor or own is None else own
    elif (reference_from_actor or "reference" in saved) and not ranks_of(agent.accelerator).rank:
        logger.warning(
            "no reference was loaded from %s: with use_separate_reference_adapter=False it stays "
            "the base model",
            content.path,
        )
    roles = {r: lora_merging.with_live_targets(agent.policy, a) for r, a in roles.items()}
    full = content.attributes.get("actor_state_dict")
    base = {} if full is None else changed_base(agent.policy, full)
    if full is None:
        _warn_of_another_base(agent, content)
    merged = _merged_config(agent, roles, merge)
    rebuilt: AbstractContextManager[None] = nullcontext()
    if merged is not None:
        rebuilt = lora_merging.rebuilt_adapters(agent.policy, merged, agent.seed)
        optimizer = None
    # All that may be refused is refused in here, before the first weight is written.
    with rebuilt:
        fitted = {
            role: lora_merging.fit_adapter(agent.policy, role, adapter.tensors, adapter.config)
            for role, adapter in roles.items()
        }
        engine = None
        if optimizer is not None:
            engine = restored_engine(agent, optimizer, keep_lr=keep_lr)

    overwrite_base(agent.policy, base)
    for role, tensors in fitted.items():
        lora_merging.write_adapter(agent.policy, role, tensors)
    agent.lora_config = agent.policy.lora_config
    if engine is not None:
        agent.engine.close()
        agent.engine = engine
    elif load_optimizer or merged is not None:
        agent.reinit_optimizers()
    if load_optimizer and engine is None:
        reason = "it holds none" if merged is None else "its LoRA config was merged with another"
        warnings.warn(
            f"no optimizer state was loaded from {content.path}: {reason}; the optimizer starts "
            "afresh",
            stacklevel=4,
        )


def rebuild(
    cls: type[AgentT],
    path: Path,
    device: str | torch.device,
    accelerator: Accelerator | None,
    actor_network: PreTrainedModel | PeftModel | None,
) -> AgentT:
    """Make an agent from a checkpoint alone, or from it and a base model."""
    ranks = ranks_of(accelerator)
    content = read_content(path, ranks, load_optimizer=True)
    if not content.attributes:
        raise ValueError(
            f"{path} is a plain PEFT directory, and says nothing of an agent; make one with "
            f"{cls.__name__}(...), then call its load_checkpoint"
        )
    algo, arguments = content.attributes["algo"], content.arguments()
    if algo != cls.__name__:
        raise ValueError(f"{path} is a checkpoint of {algo}, not {cls.__name__}; use {algo}.load")
    unknown = sorted(arguments.keys() - set(cls.argument_names()))
    if unknown:
        raise ValueError(
            f"{path} holds arguments that {cls.__name__} does not take: {unknown}; load it with "
            "the version that saved it"
        )
    if actor_network is None:
        actor_network = ranks.on_all_ranks(lambda: _base_from(content, arguments, device))
    arguments |= {"actor_network": actor_network, "device": device, "accelerator": accelerator}
    agent = cls(**arguments)
    _load_content(
        agent,
        content,
        load_optimizer=content.optimizer is not None,
        reference_from_actor=False,
        merge=False,
        keep_lr=False,
    )
    for name, value in content.history(("index", *agent._history)).items():
        setattr(agent, name, value)
    agent.rng.set_state(content.generator(ranks).get_state())
    return agent


def _attributes(agent: LLMAlgorithm) -> dict[str, Any]:
    """What every cell of the grid holds."""
    model = agent.policy.base.model
    history = {name: getattr(agent, name) for name in ("index", *agent._history)}
    return {
        "algo": agent.algo,
        "arguments": encode_arguments(agent.saved_arguments()),
        "history": {name: encode_value(value, name) for name, value in history.items()},
        "rng_state": agent.rng.get_state(),
        "bad_steps": agent.skipped_steps.in_a_row,
        "base_name": agent.model_name or model.name_or_path or None,
        "base_dtype": encode_value(model.dtype, "base_dtype"),
        "base_fingerprint": agent.policy.base.fingerprint(),
    }


def _warn_of_another_base(agent: LLMAlgorithm, content: CheckpointContent) -> None:
    saved = content.attributes.get("base_fingerprint")  # of a PEFT directory there is none
    if saved is None or ranks_of(agent.accelerator).rank:
        return
    if saved != agent.policy.base.fingerprint():
        logger.warning(
            "the adapters of %s were trained on other base weights (of %r) than this agent's",
            content.path,
            content.attributes["base_name"],
        )


def _merged_config(
    agent: LLMAlgorithm, roles: dict[str, LoadedAdapter], merge: bool
) -> LoraConfig | None:
    """The LoRA config that the agent needs to hold ``roles``; None: the one it has."""
    live = agent.policy.lora_config
    if not merge:
        for adapter in roles.values():
            lora_merging.check_same_config(live, adapter.config)
        return None
    merged = lora_merging.merge_configs(live, roles["actor"].config)
    return merged if lora_merging.differing_fields(live, merged) else None


def restored_engine(agent: LLMAlgorithm, state: Any, *, keep_lr: bool = False) -> LocalEngine:
    """A new engine for the agent with a saved optimizer and schedule.

    Raises:
        ValueError: If the state is damaged or that of other parameters.
    """
    engine = agent._build_engine()
    try:
        engine.load_state_dict(state, keep_lr=keep_lr)
        fits = all(
            value.shape == parameter.shape
            for parameter, moments in engine.optimizer.state.items()
            for value in moments.values()
            if value.dim()  # but for the count of steps
        )
    except Exception as error:  # whatever torch runs into in content that is not its own
        engine.close()
        raise ValueError(
            f"the checkpoint's optimizer state is damaged, or that of another model ({error!r}); "
            "load without load_optimizer, or use another checkpoint"
        ) from error
    if not fits:
        engine.close()
        raise ValueError(
            "the checkpoint's optimizer state is that of another model: its moments have other "
            "shapes than this agent's parameters; load without load_optimizer"
        )
    return engine


def _base_from(
    content: CheckpointContent, arguments: dict[str, Any], device: str | torch.device
) -> PreTrainedModel:
    """The base model: from the full actor if the checkpoint holds it, else by its name or path."""
    attributes, path = content.attributes, content.path
    if "actor_state_dict" in attributes:
        return _base_from_state(attributes)
    name, settings = attributes.get("base_name"), arguments.get("model_config")
    if (settings or {}).get("trust_remote_code"):
        raise ValueError(
            f"{path} asks for a base model with trust_remote_code, and loading a checkpoint must "
            "not run code; load the model yourself and pass it as actor_network"
        )
    if arguments.get("model_name") is None:
        settings = {"dtype": decode_value(attributes.get("base_dtype"))}
    try:
        if name is None:
            raise OSError("the checkpoint recorded no model name")
        return load_base(name, settings, device)
    except OSError as error:
        raise ValueError(
            f"{path} holds adapters only, and their base model ({name!r}) cannot be loaded "
            f"({error}); pass it as actor_network"
        ) from error


def _base_from_state(attributes: dict[str, Any]) -> PreTrainedModel:
    state = base_part(attributes["actor_state_dict"])
    content = json.loads(attributes["model_config"])
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    dtype = decode_value(attributes.get("base_dtype"))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(state)
    model.generation_config = GenerationConfig.from_dict(
        json.loads(attributes["generation_config"])
    )
    return model
