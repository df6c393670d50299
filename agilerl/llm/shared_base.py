"""One frozen base, many adapters.

``SharedBase`` owns a frozen model, wrapped once with PEFT, and the adapter slots of all agents on
it. Two agents built from the same model object, or from the same name and settings, share the base.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import delete_adapter
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from agilerl.checks import require
from agilerl.distributed import Ranks
from agilerl.llm import adapters
from agilerl.llm.causal_lm import check_head
from agilerl.llm.config import RowLayout
from agilerl.llm.engine.partition_checks import check_every_layer_runs
from agilerl.llm.forward.lora_linear import run_in_place
from agilerl.llm.forward.probe import fastest_layout
from agilerl.llm.forward.recomputation import remove_recomputation
from agilerl.llm.quantization import (
    is_quantized,
    loading_arguments,
    run_as_found,
    run_as_in_training,
)

if TYPE_CHECKING:
    from agilerl.llm.engine.partitioned_base import PartitionedBase

# By the model's id, which stays its own as long as the base that holds the model lives.
_bases: weakref.WeakValueDictionary[int, SharedBase] = weakref.WeakValueDictionary()
_loaded: weakref.WeakValueDictionary[str, PreTrainedModel] = weakref.WeakValueDictionary()
_slot_numbers = itertools.count()

SAMPLED = 64  # values per tensor that a fingerprint looks at


class _OriginalState:
    """Training modes and ``requires_grad`` of a model before agents used it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._training = [(module, module.training) for module in model.modules()]
        self._requires_grad = [(p, p.requires_grad) for p in model.parameters()]

    def restore(self) -> None:
        """Put them back, and remove what forwards have kept on layers."""
        for module, training in self._training:
            module.training = training
        for parameter, requires_grad in self._requires_grad:
            parameter.requires_grad_(requires_grad)
        remove_recomputation(self._model)
        run_as_found(self._model)


class SharedBase:
    """One frozen model and the adapter slots of every agent on it.

    While there are agents the model is in evaluation mode and frozen. With the last adapter
    removed, it is as it was found (but a partitioned one stays partitioned).

    Raises:
        ValueError: If the model makes its logits in a way that is not supported.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.peft: PeftModel | None = None
        self._found: _OriginalState | None = None
        self.partition: PartitionedBase | None = None
        self._fingerprint: str | None = None
        self._active: tuple[str | None, bool] | None = None
        self._row_layout: RowLayout | None = None
        self._exclusive: tuple[str, ...] | None = None
        self._to_remove: list[str] = []
        with self.restored_on_error():
            self._freeze()
            check_head(model)

    @classmethod
    def of(cls, model: PreTrainedModel) -> SharedBase:
        """The base that owns ``model``, which is frozen; a new one the first time."""
        base = _bases.get(id(model))
        if base is None:
            base = _bases[id(model)] = cls(model)
        base._remove_pending()
        base._freeze()
        return base

    @staticmethod
    def known(model: PreTrainedModel) -> SharedBase | None:
        """The base that owns ``model``, if there is one already."""
        base = _bases.get(id(model))
        if base is not None:
            base._remove_pending()
        return base

    def _freeze(self) -> None:
        if self._found is None:
            self._found = _OriginalState(self.model)
            self.model.eval().requires_grad_(False)
            run_as_in_training(self.model)

    def _restore(self) -> None:
        if self._found is not None:
            self._found.restore()
            self._found = None

    @contextlib.contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """An error within it leaves a model that has no adapters as it was found."""
        try:
            yield
        except BaseException:
            if self.peft is None:
                self._restore()
            raise

    def partition_over(
        self, ranks: Ranks, *, offload: bool = False, gather_for_generation: bool = True
    ) -> None:
        """Partition the model over the ranks (ZeRO stage 3); a collective.

        Adapters added afterwards are whole on every rank. The model stays partitioned when its last
        agent is gone, and new agents can use it.

        Args:
            ranks: Each holds one partition.
            offload: Keep this rank's partition in CPU memory.
            gather_for_generation: Gather the whole model for rollouts.

        Raises:
            ValueError: If what the model runs depends on the tokens, or it is quantized.
        """
        require(
            not is_quantized(self.model),
            "accelerator asks for ZeRO stage 3, but the base model is quantized, and packed "
            "weights cannot be partitioned; use zero_stage 2, or leave out quantization_config",
        )
        from agilerl.llm.engine.partitioned_base import PartitionedBase

        assert self.peft is None and self.partition is None
        check_every_layer_runs(self.model)
        self._fingerprint = fingerprint(self.model)
        self.partition = PartitionedBase(self.model, ranks, offload, gather_for_generation)
        # The probes of the whole model cannot be run again: this object lives as long as the model.
        self.model.__dict__["_agilerl_base"] = self

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within it a partitioned base is gathered on every rank; entering is a collective."""
        with contextlib.nullcontext() if self.partition is None else self.partition.whole_model():
            yield

    @contextlib.contextmanager
    def offloaded(self) -> Iterator[None]:
        """Within it the model's tensors are in host memory, unless its device is the host."""
        device = self.device
        if device.type == "cpu":
            yield
            return
        self.model.to("cpu")
        try:
            yield
        finally:
            self.model.to(device)

    @property
    def decoder(self) -> nn.Module:
        """The model without its head."""
        return self.model.base_model

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def row_layout(self) -> RowLayout:
        """The fastest layout of training rows that is exact on this model; probed once."""
        if self._row_layout is None:
            config = self.model.config.get_text_config()
            self._row_layout = fastest_layout(self.model.base_model, config.vocab_size)
        return self._row_layout

    def fingerprint(self) -> str:
        """Digest of the base's weights."""
        # That of a partitioned base was taken while it was whole, and stays.
        return self._fingerprint or fingerprint(self.peft or self.model)

    def add_slot(self, role: str, config: LoraConfig) -> str:
        """Add an adapter and return its name.

        Raises:
            ValueError: If the base is partitioned, and the adapter needs whole weights.
        """
        if self.partition is not None:
            adapters.check_needs_no_weights(config, self.model)
        self._remove_pending()
        slot = f"{role}_{next(_slot_numbers)}"
        if self.peft is None:
            self._freeze()
            self.peft = adapters.wrap_model(self.model, config, slot)
        else:
            try:
                self.peft.add_adapter(slot, config)
            except BaseException:  # PEFT leaves what it made before it refused
                delete_adapter(self.peft, slot, self.peft.base_model.prefix)
                raise
        # New layers come in training mode: dropout would make the ratio differ from 1.
        self.peft.eval()
        run_as_in_training(self.model)
        if self.partition is None:  # its weights come and go with the modules' own forwards
            run_in_place(self.peft)
        self._active = None
        if self.partition is not None:
            try:  # again, as PEFT rewrites a config that targets experts
                adapters.check_needs_no_weights(config, self.model)
            except ValueError:
                self.remove_slot(slot)
                raise
        return slot

    def remove_slot(self, slot: str) -> None:
        """Delete an adapter; with the last one the user's model is as it was found.

        Within a rollout, when that ends.
        """
        self._to_remove.append(slot)
        self._remove_pending()

    def remove_slot_later(self, slot: str) -> None:
        """Delete an adapter when this base is used next.

        For finalizers that the garbage collector calls, maybe while someone iterates over modules.
        """
        self._to_remove.append(slot)
        # Until then someone has to know what is left on the user's model.
        self.model.__dict__["_agilerl_base"] = self

    def _remove_pending(self) -> None:
        # In a rollout merged layers are out of the module tree, and would keep adapters' tensors.
        if self._to_remove and self._exclusive is None:
            while self._to_remove:
                self._delete(self._to_remove.pop())
            if self.partition is None:
                self.model.__dict__.pop("_agilerl_base", None)

    def _delete(self, slot: str) -> None:
        assert self.peft is not None
        others = [name for name in self.peft.peft_config if name != slot]
        if others:
            # Only where it must: another policy may be at work with the active one.
            if slot in self.peft.active_adapters:
                self.peft.set_adapter(others[0])
                self._active = None
            self.peft.delete_adapter(slot)
        else:
            self.peft.unload()
            self.peft = None
            self._active = None
            self._restore()

    def activate(self, slot: str | None, trainable: bool) -> None:
        """Make one adapter the model's only one; None: the bare base."""
        if self._exclusive not in (None, (slot,)):
            raise RuntimeError(
                "a rollout with another adapter of this base model is under way; leave "
                "agent.rollout() first, and use one of its agents at a time"
            )
        self._remove_pending()
        if self._active == (slot, trainable):
            return
        assert self.peft is not None
        if slot is None:
            self.peft.base_model.disable_adapter_layers()
        else:
            self.peft.base_model.enable_adapter_layers()
            self.peft.set_adapter(slot, inference_mode=not trainable)
        self._active = (slot, trainable)

    @property
    def in_rollout(self) -> bool:
        """Whether an adapter is active exclusively."""
        return self._exclusive is not None

    @contextlib.contextmanager
    def exclusive(self, *slots: str) -> Iterator[None]:
        """Within it no other adapter can be activated, and none is removed; may be nested.

        With several slots none can be activated.

        For rollouts, which change the module tree. Adapters to be removed go when it ends.
        """
        if self._exclusive is not None:
            yield
            return
        self._exclusive = slots
        try:
            yield
        finally:
            self._exclusive = None
            self._remove_pending()


def base_tensors(model: PreTrainedModel | PeftModel) -> dict[str, torch.Tensor]:
    """The base's tensors as they are in the model, under the names they have without PEFT."""
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


def base_state_dict(model: PreTrainedModel | PeftModel) -> dict[str, torch.Tensor]:
    """The same on the CPU, for files."""
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


def load_base(
    name: str,
    model_config: dict[str, Any] | None,
    device: str | torch.device,
    quantization: BitsAndBytesConfig | dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a model by name or path.

    The same name, settings and device give the same object while it is in use.

    Args:
        name: Of a repository or a directory.
        model_config: Further keyword arguments of ``from_pretrained``.
        device: Where it shall run; a quantized one where a ``device_map`` of ``model_config`` says.
        quantization: How its weights are packed while they are loaded; None: they are not.
    """
    from transformers import AutoModelForCausalLM

    packing = loading_arguments(quantization)
    # Packed where it runs: packed weights need not be movable.
    if packing and "device_map" not in (model_config or {}):
        packing["device_map"] = {"": torch.device(device)}

    # Not part of the key: agents loaded from checkpoints, which set these, share the base.
    safety = ("use_safetensors", "trust_remote_code", "weights_only")
    settings = sorted((n, repr(v)) for n, v in (model_config or {}).items() if n not in safety)
    key = repr((name, settings, str(device), packing))
    model = _loaded.get(key)
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(name, **(model_config or {}), **packing)
        model = model if packing else model.to(device)
        _loaded[key] = model
    return model
