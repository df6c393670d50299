"""Counting the bytes of tensors while code runs on tensors that hold nothing.

The code that a training step runs is run on fake tensors: they have shapes and types, and are freed
when real ones would be. So what is counted follows the code, for any architecture, and costs
neither memory nor arithmetic.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from agilerl.llm.forward.lora_linear import run_in_place


class LiveBytes(TorchDispatchMode):
    """Within it, counts the bytes of all storages that operations make.

    Args:
        known: Tensors whose storages do not count, such as weights.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._sizes: dict[int, int] = {}
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """Most bytes that were alive since the last :meth:`reset_peak`."""

    def reset_peak(self) -> None:
        """Count the peak from now on."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._known:
            return
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def meta_model(model: PreTrainedModel, lora: LoraConfig) -> PeftModel:
    """Add an adapter to a model without memory (on the meta device), which is frozen."""
    model.requires_grad_(False)
    with torch.device("meta"):
        peft: PeftModel = get_peft_model(model, lora)
    run_in_place(peft.eval())
    return peft


def make_fake(model: nn.Module, mode: FakeTensorMode) -> list[torch.Tensor]:
    """Replace the tensors of a model on the meta device by fake ones of a CPU; returns all.

    Those that are trained get a gradient, as where several micro-batches accumulate.
    """
    made: dict[int, torch.Tensor] = {}
    gradients = []
    with mode:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, old in tensors.items():
                    if old is None:
                        continue
                    if id(old) not in made:
                        new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                        if isinstance(old, nn.Parameter):
                            new = nn.Parameter(new, requires_grad=old.requires_grad)
                        if new.requires_grad:
                            new.grad = torch.empty_like(new)
                            gradients.append(new.grad)
                        made[id(old)] = new
                    tensors[name] = made[id(old)]  # type: ignore[assignment]
    return [*made.values(), *gradients]
