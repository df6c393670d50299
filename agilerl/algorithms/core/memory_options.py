"""Which combinations of the options that save memory are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agilerl.checks import require
from agilerl.llm.engine.accelerator_config import partitions_base
from agilerl.llm.quantization import require_bitsandbytes

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes of ``torch.compile``."""


def check_memory_options(arguments: Mapping[str, Any]) -> None:
    """Refuse combinations that cannot work, or save nothing.

    Raises:
        ImportError: If one needs a library that is not installed.
        ValueError: Naming both options and the remedy.
    """
    _check_quantization(arguments)
    _check_offload(arguments)
    _check_fused(arguments)
    require(
        arguments["micro_batch_size_per_gpu"] != "auto"
        or not partitions_base(arguments["accelerator"]),
        "micro_batch_size_per_gpu is 'auto', but with ZeRO stage 3 what a forward gathers is not "
        "estimated; pass a number of sequences, or use zero_stage 2",
    )


def _check_quantization(arguments: Mapping[str, Any]) -> None:
    """Refuse to quantize a model that is loaded already, and a second place to say how."""
    require(
        arguments["quantization_config"] is None
        or arguments["actor_network"] is None
        or arguments["clone"],
        "quantization_config is given, but weights are quantized while they are loaded, and "
        "actor_network is loaded already; pass model_name instead, or load actor_network with it: "
        "from_pretrained(..., quantization_config=...)",
    )
    require(
        "quantization_config" not in (arguments["model_config"] or {}),
        "model_config has a quantization_config; pass it as the argument quantization_config",
    )
    if arguments["quantization_config"] is not None:
        require_bitsandbytes("quantization_config")


def _check_offload(arguments: Mapping[str, Any]) -> None:
    """Refuse what would keep the activations that are offloaded, or offload weights."""
    if not arguments["activation_offload"]:
        return
    require(
        not partitions_base(arguments["accelerator"]),
        "activation_offload is True, but with ZeRO stage 3 the weights that a layer gathers for "
        "its forward cannot be told from activations; use gradient_checkpointing=True alone, or "
        "zero_stage 2",
    )
    mode = arguments["torch_compiler"]
    require(
        mode not in CUDA_GRAPH_MODES,
        f"activation_offload is True, but torch_compiler is {mode!r}, which runs CUDA graphs, and "
        "these keep the memory of their activations; use torch_compiler='default' or "
        "'max-autotune-no-cudagraphs'",
    )


def _check_fused(arguments: Mapping[str, Any]) -> None:
    """Refuse two sizes of the same tiles, and two ways of fusing the same layers."""
    given = {arguments[name] for name in ("fused_logprobs_chunk_rows", "fused_loss_chunk_rows")}
    require(
        len(given - {None}) < 2,
        f"fused_loss_chunk_rows is {arguments['fused_loss_chunk_rows']}, but "
        f"fused_logprobs_chunk_rows is {arguments['fused_logprobs_chunk_rows']}; both are the rows "
        "of one tile, so pass one of them",
    )
    require(
        not arguments["use_liger_loss"] or arguments["torch_compiler"] is None,
        f"use_liger_loss is True, but torch_compiler is {arguments['torch_compiler']!r}, which "
        "fuses the same layers itself; use one of them",
    )
