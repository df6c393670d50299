"""The frozen base's tensors under the names they have without PEFT: to save, compare, overwrite."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from agilerl.checks import require

logger = logging.getLogger(__name__)

SAMPLED = 64
"""Values per tensor that a fingerprint looks at."""
ADAPTER_PREFIX = "base_model."
"""PEFT's, of all adapter tensors."""


def base_tensors(model: PreTrainedModel | PeftModel) -> dict[str, torch.Tensor]:
    """The base's tensors as they are in the model."""
    slots: set[str] = set()
    if isinstance(model, PeftModel):
        model, slots = model.get_base_model(), set(model.peft_config)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if slots.isdisjoint(parts):
            wrappers = ("base_layer", "original_module")
            found[".".join(part for part in parts if part not in wrappers)] = tensor
    return found


def base_state_dict(model: PeftModel) -> dict[str, torch.Tensor]:
    """The same on the CPU."""
    return {n: tensor.detach().cpu().contiguous() for n, tensor in base_tensors(model).items()}


@torch.no_grad()
def fingerprint(model: PreTrainedModel | PeftModel) -> str:
    """A digest that tells a base from others of its shape, 16 hexadecimal digits.

    Of names, dtypes, shapes and some values of every tensor: the same on every device, and quick.
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


def without_adapter(full_actor: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The base's tensors of a full actor."""
    return {n: tensor for n, tensor in full_actor.items() if not n.startswith(ADAPTER_PREFIX)}


def changed_tensors(
    model: PreTrainedModel | PeftModel, saved: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Which tensors of a saved base differ in value from those of ``model``, which is whole.

    Raises:
        ValueError: If it is the base of another model.
    """
    live = base_tensors(model)
    check_same_shapes(live, saved)
    return {n: saved[n] for n, t in live.items() if not torch.equal(t.cpu(), saved[n].to(t.dtype))}


def check_same_shapes(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError if two bases differ in names or shapes of tensors."""
    shapes = [{n: tuple(t.shape) for n, t in tensors.items()} for tensors in (saved, live)]
    theirs, own = (sorted(a.items() - b.items())[:4] for a, b in (shapes, shapes[::-1]))
    require(
        shapes[0] == shapes[1],
        "the checkpoint's base model is another one than the agent's: of tensors and shapes, it "
        f"has {theirs} where the agent's has {own}",
    )


@torch.no_grad()
def overwrite_base(model: PreTrainedModel | PeftModel, changed: Mapping[str, torch.Tensor]) -> None:
    """Write base weights that differ into the shared base."""
    if not changed:
        return
    logger.warning(
        "%d base tensors are overwritten from the checkpoint, for all agents on this base",
        len(changed),
    )
    live = base_tensors(model)
    for name, tensor in changed.items():
        live[name].copy_(tensor)
