"""LoRA adapters as sets of tensors: their configuration, their parameters, copying them."""

from __future__ import annotations

import copy
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agilerl.checks import require

DEFAULT_LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}


# Others, such as "pissa", take the adapter's first value out of the base's weights.
BASE_PRESERVING_INITS = (True, False, "gaussian", "orthogonal")


def default_lora_config() -> LoraConfig:
    """The adapter used when none is given: rank 16 on every linear layer but the head."""
    return LoraConfig(task_type="CAUSAL_LM", **DEFAULT_LORA)


def scope_lora_config(config: LoraConfig, model: nn.Module, scope: str | None) -> LoraConfig:
    """A copy of ``config`` whose targets lie below the module path ``scope``.

    Args:
        config: The adapter.
        model: The model it is for.
        scope: A part of a module path, such as ``"language_model"``; None: no restriction.

    Raises:
        ValueError: If the config changes base weights, or no target lies in the scope.
    """
    config = copy.deepcopy(config)
    _check_base_stays(config)
    if scope is None:
        return config
    wanted = config.target_modules
    names = [
        name
        for name in _linear_layers(model)
        if scope in name.split(".")[:-1]
        and (wanted is None or wanted == "all-linear" or _matches(name, wanted))
    ]
    require(
        bool(names),
        f"lora_target_scope {scope!r} holds no linear layer that lora_config targets ({wanted})",
    )
    config.target_modules = set(names)
    return config


def adapter_state_dict(model: PeftModel, slot: str) -> dict[str, torch.Tensor]:
    """One adapter's tensors by PEFT's names, on the CPU."""
    state = get_peft_model_state_dict(model, adapter_name=slot, save_embedding_layers=False)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def check_needs_no_weights(config: LoraConfig, model: PreTrainedModel) -> None:
    """Refuse an adapter that reads, copies or wraps weights which a partitioned base lacks.

    Raises:
        ValueError: The config trains whole modules, is of a kind such as DoRA, or targets the head.
    """
    for name in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters"):
        value = vars(config).get(name)
        require(
            not value,
            f"lora_config.{name} is {value!r}, but it needs whole weights of the base, which ZeRO "
            "stage 3 partitions; leave it unset (and experts out of target_modules), or use "
            "zero_stage 2",
        )
    if config.target_modules in (None, "all-linear"):  # neither includes the head
        return
    head = model.get_output_embeddings()
    (path,) = [name for name, module in model.named_modules() if module is head]
    require(
        not check_target_module_exists(config, path),
        f"lora_config.target_modules {config.target_modules!r} include the head ({path}), which "
        "ZeRO stage 3 gathers only while log-probs are computed; leave it out, or use zero_stage 2",
    )


def _check_base_stays(config: LoraConfig) -> None:
    """Raise ValueError for options that train or rewrite weights of the base, which is shared."""
    require(
        config.bias == "none",
        f'lora_config.bias is {config.bias!r}; the base is shared and frozen, use bias="none"',
    )
    require(
        config.init_lora_weights in BASE_PRESERVING_INITS,
        f"lora_config.init_lora_weights is {config.init_lora_weights!r}, which may rewrite the "
        f"base's weights, and these are shared; use one of {BASE_PRESERVING_INITS}",
    )
    require(
        config.layer_replication is None,
        "lora_config.layer_replication changes the shared base; leave it unset",
    )


def _linear_layers(model: nn.Module) -> list[str]:
    """Paths of the linear layers but the head, the same whether or not agents have wrapped them."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    found: list[str] = []
    wrapped: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(wrapped):
            continue  # inside a LoRA layer: its base, or another agent's factors
        if isinstance(module, LoraLayer):
            wrapped = (*wrapped, f"{name}.")
            layer = module.get_base_layer()
        else:
            layer = module
        if isinstance(layer, nn.Linear | Conv1D) and module is not head:
            found.append(name)
    return found


def _matches(name: str, wanted: str | list[str] | set[str]) -> bool:
    if isinstance(wanted, str):
        import re

        return re.fullmatch(wanted, name) is not None
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in wanted)


def wrap_model(model: PreTrainedModel, config: LoraConfig, slot: str) -> PeftModel:
    """A PEFT model with a first adapter; ``unload`` restores the original model.

    Where the model has gradient checkpointing on, PEFT hooks its embedding, so that the outputs
    require gradients. Layers are recomputed in another way here, which does not need that.
    """
    names = ("_require_grads_hooks", "_require_grads_hook")
    own = {name: vars(model)[name] for name in names if name in vars(model)}
    wrapped = get_peft_model(model, config, adapter_name=slot)
    if vars(model).get(names[0]) is not own.get(names[0]):
        model.disable_input_require_grads()
        for name in names:
            vars(model).pop(name, None)
        vars(model).update(own)
    return cast(PeftModel, wrapped)


def adapter_parameters(model: PeftModel, slot: str) -> dict[str, nn.Parameter]:
    """The parameters of one adapter by module path and kind, without the slot's name.

    Found through PEFT's own tables, so that adapter names that contain one another are not
    confused.
    """
    found: dict[str, nn.Parameter] = {}
    for path, module in model.get_base_model().named_modules():
        if isinstance(module, BaseTunerLayer):
            for kind in module.adapter_layer_names:
                table = module._modules.get(kind)
                if isinstance(table, nn.ParameterDict) and slot in table:
                    found[f"{path}.{kind}"] = table[slot]
                elif isinstance(table, nn.ModuleDict) and slot in table:
                    for name, parameter in table[slot].named_parameters():
                        found[f"{path}.{kind}.{name}"] = parameter
        elif isinstance(module, ModulesToSaveWrapper) and slot in module.modules_to_save:
            for name, parameter in module.modules_to_save[slot].named_parameters():
                found[f"{path}.modules_to_save.{name}"] = parameter
    return found


def adds_nothing(parameters: dict[str, nn.Parameter]) -> bool:
    """Whether an adapter, by :func:`adapter_parameters`, adds exactly 0 to what its layers compute.

    A new one does: the second factor of each of its products is 0.
    """
    kinds = {name: name.rsplit(".", 2)[-2:] for name in parameters}
    first, second = {"lora_A", "lora_embedding_B"}, {"lora_B", "lora_embedding_A"}
    if any((first | second).isdisjoint(kind) for kind in kinds.values()):
        return False
    zeros = [p.any() for name, p in parameters.items() if not second.isdisjoint(kinds[name])]
    return not bool(torch.stack(zeros).any())


@torch.no_grad()
def copy_adapter(source: dict[str, nn.Parameter], target: dict[str, nn.Parameter]) -> None:
    """Copy the values of one adapter onto another of the same shape.

    Raises:
        ValueError: If they have different parameters or shapes.
    """
    if source.keys() != target.keys():
        raise ValueError(
            f"adapters differ in parameters: {sorted(source.keys() ^ target.keys())[:6]}"
        )
    for name, parameter in target.items():
        if parameter.shape != source[name].shape:
            raise ValueError(
                f"adapters differ in shape at {name}: {tuple(source[name].shape)} and "
                f"{tuple(parameter.shape)}"
            )
        parameter.copy_(source[name])
