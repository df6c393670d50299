"""An agent made from a checkpoint alone, or from it and a base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file

from agilerl.algorithms.checkpoint.load import adapters_by_role, check_same_shapes, fit
from agilerl.algorithms.checkpoint.save import decode, decode_arguments, saved_state
from agilerl.checks import require
from agilerl.distributed import ranks_of
from agilerl.llm.checkpoint import checkpoint_files, lora_merging, schema
from agilerl.llm.quantization import check_quantization_config
from agilerl.llm.shared_base import base_tensors, load_base

SAFE_LOADING = {"use_safetensors": True, "trust_remote_code": False, "weights_only": True}
"""How a base that a checkpoint names is loaded; it cannot ask for anything else."""
# Would have transformers import code, or look for some.
_CODE_IN_CONFIG = ("auto_map", "attn_implementation", "_attn_implementation", "quantization_config")


def rebuild(
    cls: Any,
    path: Path,
    device: str | torch.device,
    accelerator: Accelerator | None,
    actor_network: PreTrainedModel | None,
    **process: Any,
) -> Any:
    """Make an agent of class ``cls``; see ``LLMAlgorithm.load``."""
    ranks = ranks_of(accelerator)
    saved = checkpoint_files.read_checkpoint(path, ranks, load_optimizer=True)
    require(
        bool(saved.attributes),
        f"{path} is a plain PEFT directory, and says nothing of an agent; make one with "
        f"{cls.__name__}(...), then call its load_checkpoint",
    )
    algo = saved.attributes["algo"]
    require(
        algo == cls.__name__,
        f"{path} is a checkpoint of {algo}, not {cls.__name__}; use {algo}.load",
    )
    arguments = decode_arguments(saved, cls.argument_table())
    state = saved_state(saved, cls._history, ranks)
    # Before the agent allocates what the config asks for.
    lora_merging.check_same_config(
        arguments["lora_config"],
        saved.adapters["actor"].config,
        "its adapter",
        "The checkpoint is damaged; use another checkpoint",
    )
    if actor_network is None:
        actor_network = ranks.on_all_ranks(lambda: _saved_base(saved, arguments, device))
    arguments |= {"actor_network": actor_network, "device": device, "accelerator": accelerator}
    agent = cls(**(arguments | process))
    fit(agent, saved, adapters_by_role(agent, saved)).restore()
    agent.set_attributes(state)
    return agent


def _saved_base(
    saved: checkpoint_files.SavedCheckpoint, arguments: dict[str, Any], device: str | torch.device
) -> PreTrainedModel:
    """The base model: from the full actor if the checkpoint holds it, else by its name or path."""
    path, attributes = saved.path, saved.attributes
    file = path / checkpoint_files.ATTRIBUTES_FILE
    dtype = decode(attributes["base_dtype"])
    schema.check(file, dtype, schema.DType, "base_dtype")
    if saved.base is not None:
        return _base_of_full_actor(file, attributes, saved.base, dtype)
    name = attributes["base_name"]
    given = arguments.get("model_name") is not None
    settings = dict(arguments.get("model_config") or {}) if given else {"dtype": dtype}
    refused = sorted({str(field) for field, *_ in schema.mismatches(settings, schema.BaseLoading)})
    require(
        not refused,
        f"{path} asks for its base model to be loaded with {refused}, which a checkpoint may not "
        "decide, as loading it must not run code; load the model yourself and pass it as "
        "actor_network",
    )
    quantization = attributes.get("base_quantization")
    if quantization is not None:
        schema.check(file, quantization, schema.Quantization, "base_quantization")
        check_quantization_config("base_quantization", quantization)
    remedy = f"{path} holds adapters only, and their base model ({name!r}) cannot be loaded"
    require(name is not None, f"{remedy}: it recorded no model name; pass it as actor_network")
    where = {n: settings[n] for n in ("revision", "subfolder") if settings.get(n)}
    try:
        adapter = find_adapter_config_file(name, **where)
        require(adapter is None, f"it is an adapter itself ({adapter})")
        return load_base(str(name), settings | SAFE_LOADING, device, quantization)
    except (OSError, ValueError) as error:
        raise ValueError(f"{remedy} safely ({error}); pass it as actor_network") from error


def _base_of_full_actor(
    file: Path, attributes: dict[str, Any], state: dict[str, torch.Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    with schema.reading(file, "no model can be built from its model_config and weights"):
        content = json.loads(attributes["model_config"])
        schema.check(file, content, schema.ModelConfig, "model_config")
        content = {n: v for n, v in content.items() if n not in _CODE_IN_CONFIG}
        config = AutoConfig.for_model(content.pop("model_type"), **content)
        with torch.device("meta"):  # compared before anything of its sizes is allocated
            empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        check_same_shapes(base_tensors(empty), state)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        model.load_state_dict(state)
        generation = GenerationConfig.from_dict(json.loads(attributes["generation_config"]))
        schema.check(file, generation.eos_token_id, int | list[int] | None, "eos_token_id")
        model.generation_config = generation
        return model
