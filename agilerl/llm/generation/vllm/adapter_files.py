"""Versions of an adapter on disk, for vLLM to load."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from agilerl.checks import require
from agilerl.llm.adapters import adapter_state_dict
from agilerl.llm.generation.vllm.engine import StagedAdapter
from agilerl.llm.policy import Policy

# What vLLM's LoRA layers do not compute.
_NOT_SERVED = (
    "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "target_parameters",
    "trainable_token_indices", "layers_to_transform", "lora_bias", "fan_in_fan_out",
)  # fmt: skip
_numbers = itertools.count(1)
MEMORY = "/dev/shm"


def check_served(config: LoraConfig, limit: int) -> None:
    """Refuse an adapter that vLLM cannot serve.

    Raises:
        ValueError: Naming the setting.
    """
    for name in _NOT_SERVED:
        value = vars(config).get(name)
        require(
            not value,
            f"lora_config.{name} is {value!r}, which vLLM does not serve; leave it unset, or use "
            "use_vllm=False",
        )
    require(
        config.r <= limit,
        f"vllm_config.max_lora_rank is {limit}, but lora_config.r is {config.r}; it must be at "
        "least that",
    )


class AdapterFiles:
    """Writes versions of a policy's adapters below one directory, which is removed at the end.

    Args:
        directory: Where to make it; None: in memory where there is such a file system with room
            for them.
        size: Bytes of a version.
    """

    def __init__(self, directory: str | None, size: int) -> None:
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
        # Two versions lie there at a time; containers often have 64 MB.
        elif os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 * size:
            directory = MEMORY
        self._directory = Path(tempfile.mkdtemp(prefix="agilerl-lora-", dir=directory))
        # Servers may run as other users.
        self._directory.chmod(0o755)
        self.close = weakref.finalize(self, _remove, os.getpid(), self._directory)

    def write(self, policy: Policy, tensors: dict[str, torch.Tensor]) -> StagedAdapter:
        """Write the adapter of a policy's role under a new name."""
        number = next(_numbers)
        name = f"{self._directory.name}-{number}"
        path = self._directory / str(number)
        path.mkdir(mode=0o755)
        save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
        config = policy.model.peft_config[policy.slot(policy.role)]
        config.save_pretrained(path, inference_mode=True)
        return StagedAdapter(name, number, str(path))

    @staticmethod
    def remove(adapter: StagedAdapter) -> None:
        """Delete a version that is no longer served."""
        shutil.rmtree(adapter.path, ignore_errors=True)


def _remove(process: int, directory: Path) -> None:
    if os.getpid() == process:  # not at the end of a fork
        shutil.rmtree(directory, ignore_errors=True)


def current_tensors(policy: Policy) -> tuple[dict[str, torch.Tensor], str]:
    """The adapter of a policy's role, on the CPU, and a digest of it."""
    tensors = adapter_state_dict(policy.model, policy.slot(policy.role))
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return tensors, digest.hexdigest()
