"""The frozen base's tensors under the names they have without PEFT: to save, compare, overwrite."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agilerl.llm.policy import Policy

logger = logging.getLogger(__name__)

SAMPLED = 64
"""Values per tensor that a fingerprint looks at."""


def base_tensors(model: PreTrainedModel | PeftModel) -> dict[str, torch.Tensor]:
    """The base's tensors as they are in the model."""
    slots: set[str] = set()
    if isinstance(model, PeftModel):
        model, slots = model.get_base_model(), set(model.peft_config)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if slots.isdisjoint(parts):
            found[
                ".".join(part for part in parts if part not in ("base_layer", "original_module"))
            ] = tensor
    return found


def base_state_dict(model: PeftModel) -> dict[str, torch.Tensor]:
    """The same on the CPU."""
    return {
        name: tensor.detach().cpu().contiguous() for name, tensor in base_tensors(model).items()
    }


@torch.no_grad()
def fingerprint(model: PreTrainedModel | PeftModel) -> str:
    """A digest that tells a base from others of its shape, 16 hexadecimal digits.

    Of names, kinds, shapes and some values of every tensor: the same on every device, and quick.
    """
    digest = hashlib.sha256()
    values = []
    for name, tensor in sorted(base_tensors(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # In integers: floats cannot count the elements of an embedding.
        count, last = min(SAMPLED, tensor.numel()), tensor.numel() - 1
        at = torch.arange(count, device=tensor.device) * last // max(count - 1, 1)
        values.append(tensor.reshape(-1)[at].float())
    digest.update(torch.cat(values).cpu().numpy().tobytes())  # one transfer
    return digest.hexdigest()[:16]


def base_part(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What of a full actor is not adapter: PEFT's names all start with ``base_model.``."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("base_model.")}


def adapter_part(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rest of it."""
    return {name: tensor for name, tensor in state.items() if name.startswith("base_model.")}


def changed_base(policy: Policy, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What of a full actor's base differs from the policy's; all ranks together.

    Raises:
        ValueError: If it is the base of another model, or differs from one that is partitioned.
    """
    with policy.base.whole():
        changed = _differing(base_part(state), base_tensors(policy.model))
    if changed and policy.base.partition is not None:
        raise ValueError(
            f"the checkpoint's base weights differ from the agent's ({sorted(changed)[:4]}), and "
            "with ZeRO stage 3 these cannot be overwritten; make the agent with load(path), which "
            "takes the base from the checkpoint"
        )
    return changed


@torch.no_grad()
def overwrite_base(policy: Policy, changed: Mapping[str, torch.Tensor]) -> None:
    """Write base weights that differ into the shared base."""
    if not changed:
        return
    logger.warning(
        "%d base tensors are overwritten from the checkpoint, for all agents on this base",
        len(changed),
    )
    live = base_tensors(policy.model)
    for name, tensor in changed.items():
        live[name].copy_(tensor)


def _differing(
    saved: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if saved.keys() != live.keys():
        raise ValueError(
            "the checkpoint's base model is another one than the agent's: they differ in "
            f"{sorted(saved.keys() ^ live.keys())[:4]}"
        )
    for name, tensor in live.items():
        shape = getattr(saved[name], "shape", None)
        if shape != tensor.shape:
            raise ValueError(
                f"the checkpoint's base model is another one than the agent's: {name} is "
                f"{shape and tuple(shape)}, not {tuple(tensor.shape)}"
            )
    return {n: saved[n] for n, t in live.items() if not torch.equal(t.cpu(), saved[n].to(t.dtype))}
