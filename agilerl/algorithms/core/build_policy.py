"""From the ``actor_network`` argument to an agent's adapters on a shared base."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel

from agilerl.algorithms.core.argument_rules import check_network
from agilerl.checks import require
from agilerl.distributed import Ranks, ranks_of
from agilerl.llm.adapters import adapter_state_dict, default_lora_config, scope_lora_config
from agilerl.llm.causal_lm import check_pad_token
from agilerl.llm.checkpoint.checkpoint_files import SavedAdapter
from agilerl.llm.checkpoint.lora_merging import check_same_config, fit_adapter, write_adapter
from agilerl.llm.engine.accelerator_config import (
    gathers_for_generation,
    offloads_base,
    partitions_base,
)
from agilerl.llm.engine.partition_checks import is_partitioned
from agilerl.llm.policy import Policy
from agilerl.llm.quantization import prepare_quantized
from agilerl.llm.shared_base import SharedBase, load_base

if TYPE_CHECKING:
    from accelerate import Accelerator

    from agilerl.algorithms.core.arguments import LLMArguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PretrainedAdapter:
    """An adapter trained elsewhere, from which an agent starts."""

    config: LoraConfig
    tensors: dict[str, torch.Tensor]
    """By PEFT's names, without the adapter's."""
    model: PreTrainedModel
    """The plain model it was on."""


# A PEFT model may be given to several agents, and is unwrapped for the first.
_unwrapped: WeakKeyDictionary[PeftModel, PretrainedAdapter] = WeakKeyDictionary()


def build_policy(
    agent: LLMArguments,
    network: PreTrainedModel | PeftModel | None,
    adapter_configs: Callable[[LoraConfig], Mapping[str, LoraConfig]],
    trained: Collection[str],
) -> Policy:
    """The agent's adapters on a shared base.

    Args:
        agent: Its arguments.
        network: The base, or a PEFT model whose adapter is where actor and reference start; None:
            the model that the arguments name.
        adapter_configs: From the actor's LoRA config to every role's.
        trained: The roles that are trained.

    Raises:
        TypeError: The network carries an adapter that is not LoRA.
        ValueError: An argument does not fit the model.
    """
    gathers = gathers_for_generation(agent.accelerator)
    if network is None:
        assert agent.model_name is not None
        network = load_base(
            agent.model_name, agent.model_config, agent.device, agent.quantization_config
        )
        check_network("model_name", network)
    partitioned = check_partitioning(network, agent.accelerator)
    model, pretrained = without_peft(network)
    prepare_quantized("actor_network" if agent.model_name is None else "model_name", model)
    check_pad_token(agent.pad_token_id, model)
    move_to_device(model, torch.device(agent.device))
    if not partitioned:
        check_same_weights(model, ranks_of(agent.accelerator))
    base = SharedBase.of(model)
    with base.restored_on_error():
        lora_config = resolve_lora_config(
            agent.lora_config, pretrained, model, agent.lora_target_scope
        )
        if partitions_base(agent.accelerator) and not partitioned:
            base.partition_over(
                ranks_of(agent.accelerator),
                offload=offloads_base(agent.accelerator),
                gather_for_generation=gathers,
            )
        policy = Policy(base, adapter_configs(lora_config), trained=trained, seed=agent.seed)
    if pretrained is not None:
        saved = SavedAdapter(pretrained.config, pretrained.tensors)
        for role in [role for role in ("actor", "reference") if role in policy.slots]:
            write_adapter(policy, role, fit_adapter(policy, role, saved))
    return policy


def check_partitioning(
    network: PreTrainedModel | PeftModel, accelerator: Accelerator | None
) -> bool:
    """Whether agents have partitioned a model already.

    Raises:
        ValueError: It is partitioned although the accelerator is not for ZeRO stage 3, or was not
            partitioned by agents; or it is to be partitioned, but agents use it unpartitioned.
    """
    model = network.get_base_model() if isinstance(network, PeftModel) else network
    base = SharedBase.known(model)
    partitioned = any(is_partitioned(parameter) for parameter in model.parameters())
    wanted = partitions_base(accelerator)
    require(
        not partitioned or (base is not None and base.partition is not None),
        "actor_network was partitioned when it was made, as transformers does where an Accelerator "
        "is for ZeRO stage 3; use agilerl.utils.llm_utils.create_llm_accelerator, or call "
        "transformers.integrations.unset_hf_deepspeed_config() before loading the model: agents "
        "partition it themselves",
    )
    require(
        wanted or not partitioned,
        "actor_network is partitioned over processes, but accelerator is not for ZeRO stage 3; "
        "pass the accelerator of the agents that it was partitioned for, or another model",
    )
    require(
        partitioned or not wanted or base is None or base.peft is None,
        "accelerator asks for ZeRO stage 3, but actor_network serves other agents without it; "
        "clean these up first, or pass another model",
    )
    return partitioned


def move_to_device(model: PreTrainedModel, device: torch.device) -> None:
    """Move a model to the agent's device, unless other agents use it.

    Raises:
        ValueError: It is spread over several devices, or in use on another one.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    spread = {parameter.device for parameter in model.parameters()}
    require(
        len(spread) == 1,
        f"actor_network is spread over {sorted(map(str, spread))}; load it onto one device",
    )
    (here,) = spread
    if here == device:
        return
    base = SharedBase.known(model)
    require(
        base is None or (base.peft is None and base.partition is None),
        f"device is {str(device)!r}, but actor_network is in use by another agent on "
        f"{str(here)!r}; pass device={str(here)!r}",
    )
    logger.warning("the model moves from %s to %s, the agent's device", here, device)
    model.to(device)


def check_same_weights(model: PreTrainedModel, ranks: Ranks) -> None:
    """Refuse a base model that is not the same on all ranks; only adapters are kept equal.

    A few weights of each tensor are compared. All ranks must call it.

    Raises:
        ValueError: The weights differ.
    """
    sample = [
        p.detach().flatten()[:: p.numel() // 64 + 1].double().sum() for p in model.parameters()
    ]
    own = torch.stack(sample).nan_to_num()
    require(
        torch.equal(ranks.max(own), -ranks.max(-own)),
        "actor_network has other weights on other processes; load the same checkpoint on all of "
        "them, or seed its initialisation alike",
    )


def without_peft(
    network: PreTrainedModel | PeftModel,
) -> tuple[PreTrainedModel, PretrainedAdapter | None]:
    """The plain model, and the LoRA adapter that it carried if it was a PEFT model.

    The PEFT model is unloaded, and must not be used afterwards.

    Raises:
        TypeError: The PEFT model's active adapter is not LoRA.
        ValueError: It is the model of living agents.
    """
    if not isinstance(network, PeftModel):
        return network, None
    adapter = _unwrapped.get(network)
    if adapter is None:
        adapter = _unwrapped[network] = _unwrap(network)
    return adapter.model, adapter


def _unwrap(network: PeftModel) -> PretrainedAdapter:
    base = SharedBase.known(network.get_base_model())
    require(
        base is None or base.peft is None,
        "actor_network already has adapters of other agents; pass their plain base model "
        "(agent.policy.base.model) instead, or use agent.clone()",
    )
    slot = network.active_adapters[0]
    config = network.peft_config[slot]
    if not isinstance(config, LoraConfig):
        raise TypeError(
            f"actor_network carries a {type(config).__name__}; it must be a LoRA adapter, or pass "
            "the plain base model"
        )
    tensors = {name: t.clone() for name, t in adapter_state_dict(network, slot).items()}
    return PretrainedAdapter(config, tensors, network.unload())


def resolve_lora_config(
    given: LoraConfig | None,
    pretrained: PretrainedAdapter | None,
    model: PreTrainedModel,
    scope: str | None,
) -> LoraConfig:
    """The actor's LoRA config: as given, else the pretrained adapter's, else the default.

    Raises:
        ValueError: The config does not fit the model, the scope or the pretrained adapter.
    """
    fallback = default_lora_config() if pretrained is None else pretrained.config
    chosen = given or fallback
    if scope is not None and isinstance(chosen.target_modules, set):
        # A clone's targets are within the scope already, and their modules are wrapped by PEFT.
        scope = None if all(scope in t.split(".") for t in chosen.target_modules) else scope
    config = scope_lora_config(chosen, model, scope)
    if pretrained is not None:
        remedy = "Leave lora_config out: the agent takes that of the adapter"
        check_same_config(config, pretrained.config, "actor_network", remedy)
    if given is not None and given.lora_dropout:
        logger.warning(
            "lora_dropout=%s has no effect: all forwards run without dropout, so that the "
            "importance ratio of fresh rollouts is exactly 1",
            given.lora_dropout,
        )
        config.lora_dropout = 0.0
    return config
