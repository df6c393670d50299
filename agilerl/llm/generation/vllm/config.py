"""VLLMConfig: how vLLM is run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from agilerl.checks import COUNT, FLAG, OPTIONAL_COUNT, InstanceOf, Number, OneOf, require

_POSITIVE = Number(0, open_low=True)
_TEXT = InstanceOf(str, "a string")
_RULES: dict[str, Any] = {
    "tensor_parallel_size": COUNT,
    "gpu_memory_utilization": Number(0, 1, open_low=True),
    "max_num_seqs": COUNT,
    "max_num_batched_tokens": OPTIONAL_COUNT,
    "enforce_eager": InstanceOf(bool, "a bool"),
    "sleep_mode": FLAG,
    "sleep_mode_level": OneOf((1, 2)),
    "dtype": _TEXT,
    "quantization": _TEXT,
    "vllm_model_name_or_path": _TEXT,
    "kv_cache_dtype": _TEXT,
    "max_lora_rank": COUNT,
    "max_loras": COUNT,
    "presence_penalty": Number(-2, 2),
    "frequency_penalty": Number(-2, 2),
    "kv_cache_memory_bytes": OPTIONAL_COUNT,
    "lora_staging_dir": _TEXT,
    "request_timeout": _POSITIVE,
    "startup_timeout": _POSITIVE,
    "max_retries": Number(0, integer=True),
    "probe_tolerance": Number(0, open_low=True, finite=False, optional=True),
}


@dataclass(frozen=True)
class VLLMConfig:
    """How vLLM is run: in an engine process of each rank's own, or on servers (``server_urls``).

    With ``server_urls`` the arguments of the engine itself, such as ``tensor_parallel_size``, have
    no effect: a server has its own.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A value out of range.
    """

    tensor_parallel_size: int = 1
    """GPUs of the engine. More than 1 only where the trainer is a single process."""
    gpu_memory_utilization: float = 0.3
    """Share of a GPU's memory for weights, activations and the cache of keys and values."""
    max_num_seqs: int = 8
    """Most completions that are generated at a time."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one forward pass; None: vLLM's default."""
    enforce_eager: bool | None = None
    """Run without CUDA graphs; None: where there is no GPU."""
    sleep_mode: bool = False
    """Free the engine's GPU memory between rollouts."""
    sleep_mode_level: int = 1
    """1 keeps the weights in host memory, 2 discards them and loads them again."""
    dtype: str | None = None
    """The engine's; None: the trainer's."""
    quantization: str | None = None
    """A method of vLLM, such as ``"fp8"`` or ``"bitsandbytes"``."""
    vllm_model_name_or_path: str | None = None
    """The base model that vLLM loads; None: the one that the agent was made from."""
    kv_cache_dtype: str | None = None
    """Of the cached keys and values; None: the model's."""
    max_lora_rank: int = 16
    """Largest rank of an adapter."""
    max_loras: int = 1
    """Adapters held on the device; ``population`` raises it to the number of members."""
    stop_sequences: tuple[str, ...] | None = None
    """Texts that end a completion; see the agent's ``stop_sequences``."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    kv_cache_memory_bytes: int | None = None
    """Of the cache of keys and values; None: what ``gpu_memory_utilization`` leaves, and 1 GiB
    without a GPU."""
    lora_staging_dir: str | None = None
    """Where adapters are written for vLLM; None: in memory where there is such a file system. With
    ``server_urls`` a directory that trainer and servers share under the same path."""
    server_urls: tuple[str, ...] | None = None
    """Addresses of vLLM servers, such as ``"http://127.0.0.1:8000"``; None: an engine process of
    its own."""
    request_timeout: float = 600.0
    """Seconds without progress after which the engine, or a server, counts as hung."""
    max_retries: int = 3
    """How often a request to a server is tried again."""
    startup_timeout: float = 1800.0
    """Seconds that the engine has to load the model, or servers to become reachable."""
    probe_tolerance: float | None = None
    """Largest mean difference, in nats, between the engine's and the trainer's log-probs of a fixed
    sequence; None: 1e-3 in float32, 0.1 in half precision, 0.5 for a quantized engine."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            rule(name, getattr(self, name))
        for name in ("stop_sequences", "server_urls"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = (value,)
            if value is not None:
                # Hashable, and the same after a checkpoint's JSON-like encoding.
                object.__setattr__(self, name, tuple(value))
                bad = [item for item in value if not isinstance(item, str) or not item]
                require(not bad, f"{name} holds {bad!r}; it must be made of non-empty strings")
        require(
            self.server_urls is None or len(self.server_urls) > 0,
            "server_urls is empty; name at least one server, or leave it None",
        )
        bad = [url for url in self.server_urls or () if not url.startswith(("http://", "https://"))]
        require(
            not bad,
            f"server_urls holds {bad!r}; it must be made of addresses such as "
            '"http://127.0.0.1:8000"',
        )
        require(
            self.server_urls is None or self.lora_staging_dir is not None,
            "server_urls needs lora_staging_dir: a directory that trainer and servers share under "
            "the same path, through which they get the adapters",
        )
        require(
            self.server_urls is None or not self.sleep_mode,
            "sleep_mode=True has no effect on servers, which keep their memory; leave it False",
        )

    def tolerance(self, dtype: str) -> float:
        """The probe's, for a trainer of this dtype, in nats."""
        if self.probe_tolerance is not None:
            return self.probe_tolerance
        if self.quantization is not None or self.kv_cache_dtype not in (None, "auto"):
            return 0.5
        exact = dtype == "float32" and self.dtype in (None, "auto", "float32")
        return 1e-3 if exact else 0.1

    @property
    def probes(self) -> bool:
        """Whether sampled and trained policy are compared."""
        return self.probe_tolerance is None or math.isfinite(self.probe_tolerance)
