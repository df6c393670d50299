"""One frozen base, many adapters.

``SharedBase`` owns a frozen model, wrapped once with PEFT; ``Policy`` is one agent's view of it: an
adapter slot per role. Two agents built from the same model object, or from the same name and
settings, share the base.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from agilerl.llm import adapters
from agilerl.llm.batch import Batch
from agilerl.llm.config import ForwardConfig
from agilerl.llm.engine.ranks import Ranks
from agilerl.llm.forward import action_hidden_states, supports_shared_prefixes
from agilerl.llm.logprobs import LogitHead, TokenLogProbs, token_logprobs

if TYPE_CHECKING:
    from agilerl.llm.engine.partition import PartitionedBase

logger = logging.getLogger(__name__)

Role = Literal["actor", "reference"]
# By the model's id, which stays its own as long as the base that holds the model lives.
_bases: weakref.WeakValueDictionary[int, SharedBase] = weakref.WeakValueDictionary()
_loaded: weakref.WeakValueDictionary[str, PreTrainedModel] = weakref.WeakValueDictionary()
_slot_numbers = itertools.count()


class SharedBase:
    """One frozen model and the adapter slots of every agent on it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self.model.requires_grad_(False)
        self.peft: PeftModel | None = None
        self.partition: PartitionedBase | None = None
        self._active: tuple[str | None, bool] | None = None
        self._shares_prefixes: bool | None = None
        self._folded: str | None = None
        self._removed_meanwhile: list[str] = []
        check_head(model)

    @classmethod
    def of(cls, model: PreTrainedModel) -> SharedBase:
        """The base that owns ``model``; a new one the first time."""
        base = _bases.get(id(model))
        if base is None:
            base = _bases[id(model)] = cls(model)
        return base

    @staticmethod
    def known(model: PreTrainedModel) -> SharedBase | None:
        """The base that owns ``model``, if there is one already."""
        return _bases.get(id(model))

    def partition_over(self, ranks: Ranks, *, offload: bool = False) -> None:
        """Keep one part of the model per rank from now on (ZeRO stage 3); all ranks together.

        Adapters added afterwards are whole on every rank. The model stays partitioned when its last
        agent is gone, and serves new ones as it is.

        Args:
            ranks: Who holds the parts.
            offload: Keep this rank's part in CPU memory.
        """
        from agilerl.llm.engine.partition import PartitionedBase

        assert self.peft is None and self.partition is None
        self.partition = PartitionedBase(self.model, ranks, offload)
        # What was found out about the whole model cannot be found out again.
        self.model.__dict__["_agilerl_base"] = self

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within it a partitioned base is whole on every rank; all ranks together, then alone."""
        with contextlib.nullcontext() if self.partition is None else self.partition.whole_model():
            yield

    @property
    def decoder(self) -> nn.Module:
        """The model without its head."""
        return self.model.base_model

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def shares_prefixes(self) -> bool:
        """Whether running a prompt once for its completions is exact on this model; probed once."""
        if self._shares_prefixes is None:
            config = self.model.config.get_text_config()
            self._shares_prefixes = supports_shared_prefixes(self.decoder, config.vocab_size)
        return self._shares_prefixes

    def add_slot(self, role: str, config: LoraConfig) -> str:
        """Add an adapter and return its name.

        Raises:
            ValueError: If the base is partitioned, and the adapter needs whole weights.
        """
        if self.partition is not None:
            adapters.check_needs_no_weights(config, self.model)
        slot = f"{role}_{next(_slot_numbers)}"
        if self.peft is None:
            self.peft = get_peft_model(self.model, config, adapter_name=slot)
        else:
            self.peft.add_adapter(slot, config)
        # New layers come in training mode: their dropout would part the ratio from 1.
        self.peft.eval()
        self._active = None
        if self.partition is not None:
            try:  # again, as PEFT rewrites a config that targets experts
                adapters.check_needs_no_weights(config, self.model)
            except ValueError:
                self.remove_slot(slot)
                raise
        return slot

    def remove_slot(self, slot: str) -> None:
        """Delete an adapter; with the last one the user's model is plain again."""
        if self._folded is not None:
            # Folded layers are out of the tree now, and would keep the adapter's tensors.
            self._removed_meanwhile.append(slot)
            return
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

    def activate(self, slot: str | None, trainable: bool) -> None:
        """Make one adapter the model's only one; None: the bare base."""
        if self._active == (slot, trainable):
            return
        if self._folded not in (None, slot):
            raise RuntimeError(
                "another adapter is rolling out on this base; use one agent of a base at a time"
            )
        assert self.peft is not None
        if slot is None:
            self.peft.base_model.disable_adapter_layers()
        else:
            self.peft.base_model.enable_adapter_layers()
            self.peft.set_adapter(slot, inference_mode=not trainable)
        self._active = (slot, trainable)

    @contextlib.contextmanager
    def folded(self, slot: str) -> Iterator[None]:
        """Within it the active adapter is folded into copies of the weights; may be nested."""
        if self._folded is not None:
            yield
            return
        assert self.peft is not None
        with adapters.folded_adapter(self.peft, slot):
            self._folded = slot
            try:
                yield
            finally:
                self._folded = None
        while self._removed_meanwhile:
            self.remove_slot(self._removed_meanwhile.pop())


class Policy:
    """One agent's adapters on a shared base."""

    def __init__(
        self, base: SharedBase, lora_config: LoraConfig, *, separate_reference: bool, seed: int
    ) -> None:
        self.base = base
        self.lora_config = lora_config
        self.slots: dict[str, str] = {}
        self.role = "actor"
        self._decoder: nn.Module | None = None
        # The same seed gives the same first adapter, whatever ran before.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.slots["actor"] = base.add_slot("actor", lora_config)
            if separate_reference:
                self.slots["reference"] = base.add_slot("reference", lora_config)
        # A policy that is dropped without release() must not leave its slots on the user's model.
        self._drop = weakref.finalize(self, _remove_slots, base, self.slots)
        self._drop.atexit = False
        if separate_reference:
            self.copy_role("actor", "reference")
        self.activate("actor")

    @property
    def model(self) -> PeftModel:
        """The PEFT model all agents on this base share."""
        assert self.base.peft is not None
        return self.base.peft

    @property
    def roles(self) -> list[str]:
        """The roles this policy has an adapter for."""
        return list(self.slots)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.base.device

    def slot(self, role: str) -> str:
        """The PEFT adapter name behind a role.

        Raises:
            ValueError: For a role this policy does not have.
        """
        if role not in self.slots:
            raise ValueError(
                f"adapter_name {role!r} is not a role of this agent; it has {self.roles}"
            )
        return self.slots[role]

    def activate(self, role: str) -> None:
        """Make a role's adapter the active one; only the actor's parameters require gradients."""
        self.base.activate(self.slot(role), trainable=role != "reference")

    def use(self, role: str) -> None:
        """Act with this role from now on; the first is the actor."""
        self.activate(role)
        self.role = role

    @contextlib.contextmanager
    def active(self, role: str | None) -> Iterator[None]:
        """Within it ``role`` is active (None: the bare base), afterwards the one in use."""
        if role is None:
            self.base.activate(None, trainable=False)
        else:
            self.activate(role)
        try:
            yield
        finally:
            self.activate(self.role)

    def parameters(self, role: str = "actor") -> dict[str, nn.Parameter]:
        """A role's parameters by name, the slot's name left out, in a fixed order."""
        return adapters.adapter_parameters(self.model, self.slot(role))

    def copy_role(self, source: str, target: str) -> None:
        """Copy one role's weights onto another's."""
        adapters.copy_adapter(self.parameters(source), self.parameters(target))

    def release(self) -> None:
        """Delete this policy's slots; the base goes with its last user."""
        self._drop()

    @contextlib.contextmanager
    def rollout_weights(self) -> Iterator[None]:
        """Within it the role in use is folded into copies of the weights, where that is exact.

        A partitioned base is put together once, and ranks may then run as often as each likes; it
        takes the memory of the whole base while it lasts. All ranks must enter together.
        """
        self.activate(self.role)
        with self.base.whole(), self.base.folded(self.slot(self.role)):
            yield

    def compile(self, mode: str | None) -> None:
        """Run training forwards through ``torch.compile`` with this mode; None: as they are.

        Raises:
            ValueError: If the base is partitioned.
        """
        self._decoder = None
        if mode is not None:
            if self.base.partition is not None:
                raise ValueError(
                    f"torch_compiler is {mode!r}, but with ZeRO stage 3 layers are put together "
                    "while they run, which cannot be compiled; use torch_compiler=None or "
                    "zero_stage 2"
                )
            compiled = torch.compile(self.base.decoder, mode=mode, dynamic=True)
            self._decoder = cast(nn.Module, compiled)

    def head(self) -> LogitHead:
        """The head as it stands now."""
        return find_head(self.base.model)

    def logprobs(
        self, batch: Batch, config: ForwardConfig, *, entropy: bool = True
    ) -> TokenLogProbs:
        """Log-probs of a batch's actions under the active adapter.

        Flat ``(N,)``, in the order of ``batch.targets``; entropies too unless not asked for. On a
        partitioned base all ranks together.
        """
        if self.base.partition is not None:
            return self._partitioned_logprobs(batch, config, entropy, self.base.partition)
        # A compiled forward keeps to plain rows: one shape-generic graph, not one per kind of call.
        share = self._decoder is None and config.use_position_ids and self.base.shares_prefixes
        decoder = self.base.decoder if self._decoder is None else self._decoder
        hidden = action_hidden_states(decoder, batch, config, share_prefixes=share)
        return self._through_head(hidden, batch, config, entropy)

    def _partitioned_logprobs(
        self, batch: Batch, config: ForwardConfig, entropy: bool, partition: PartitionedBase
    ) -> TokenLogProbs:
        # Plain rows: sharing prompts is one call of the decoder or two, depending on the rows.
        hidden = action_hidden_states(self.base.decoder, batch, config, share_prefixes=False)
        with partition.whole_head():
            return self._through_head(hidden, batch, config, entropy)

    def _through_head(
        self, hidden: torch.Tensor, batch: Batch, config: ForwardConfig, entropy: bool
    ) -> TokenLogProbs:
        return token_logprobs(
            hidden,
            batch.targets,
            self.head(),
            temperature=config.temperature,
            fp32=config.fp32_logits,
            tile_rows=config.tile_rows,
            entropy=entropy,
        )

    @torch.no_grad()
    def frozen_logprobs(
        self,
        batch: Batch,
        role: str | None,
        config: ForwardConfig,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Log-probs ``(B, S)`` of a batch under a role, without gradients.

        Args:
            batch: The batch.
            role: Whose; None: the bare base's.
            config: How; ``micro_batch_size`` rows at a time.
            rows: Long index of the rows wanted; None: all.

        Returns:
            0 outside the action mask, and in rows that are not wanted. On a partitioned base all
            ranks must ask together, each for as many rows as it likes.
        """
        if rows is None:
            rows = torch.arange(len(batch), device=batch.token_ids.device)
        result = torch.zeros(batch.action_mask.shape, device=batch.token_ids.device)
        parts = rows.split(config.micro_batch_size) if len(rows) else ()
        partition = self.base.partition
        runs = len(parts) if partition is None else partition.most(len(parts))
        if runs == 0:
            return result
        with self.active(role):
            for _ in range(runs - len(parts)):
                # Only for the ranks that have more rows.
                self.logprobs(batch.select(rows.new_zeros(1)), config, entropy=False)
            for part in parts:
                chosen = batch.select(part)
                logp = self.logprobs(chosen, config, entropy=False).logp
                result = result.to(logp.dtype)
                scattered = scatter_actions(logp, chosen.action_mask)
                result[part, : scattered.shape[1]] = scattered
        return result


def _remove_slots(base: SharedBase, slots: dict[str, str]) -> None:
    for slot in slots.values():
        base.remove_slot(slot)
    slots.clear()


def scatter_actions(values: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
    """``(N,)`` values of the actions, row by row, into ``(B, S)``, 0 elsewhere; differentiable."""
    return values.new_zeros(action_mask.shape).masked_scatter(action_mask, values)


def find_head(model: PreTrainedModel) -> LogitHead:
    """Read off a causal LM how it makes logits: output embedding, scale and soft cap."""
    module = model.get_output_embeddings()
    if module is None:
        raise ValueError(
            f"{type(model).__name__} has no output embedding; pass a causal language model"
        )
    config = model.config.get_text_config()
    scale = 1.0
    if getattr(config, "logit_scale", None) is not None:
        scale *= config.logit_scale
    if getattr(config, "logits_scaling", None) is not None:
        scale /= config.logits_scaling
    plain = type(module) is nn.Linear and not module.weight.requires_grad
    return LogitHead(
        module=module,
        weight=module.weight if plain else None,
        bias=module.bias if plain else None,
        scale=scale,
        softcap=getattr(config, "final_logit_softcapping", None),
        vocab_size=config.vocab_size,
    )


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Compare, on a few tokens, the head as :func:`find_head` read it with the model's own logits.

    Raises:
        ValueError: If they differ: the model makes its logits in a way unknown here.
    """
    ids = torch.arange(1, 5, device=next(model.parameters()).device)[None]
    ids = ids % model.config.get_text_config().vocab_size
    expected = model(input_ids=ids, use_cache=False).logits[0]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    made = find_head(model).logits(hidden)
    tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    if made.shape != expected.shape or (made - expected).abs().max() > tolerance * max(
        float(expected.abs().max()), 1e-6
    ):
        raise ValueError(
            f"{type(model).__name__} makes logits from hidden states in a way that is not "
            "supported: output embedding, logit scale and soft cap do not give model(...).logits"
        )


def load_base(
    name: str, model_config: dict[str, Any] | None, device: str | torch.device
) -> PreTrainedModel:
    """Load a model by name or path.

    The same name, settings and device give the same object while it is in use.
    """
    from transformers import AutoModelForCausalLM

    key = repr((name, sorted((model_config or {}).items(), key=lambda item: item[0]), str(device)))
    model = _loaded.get(key)
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(name, **(model_config or {})).to(device)
        _loaded[key] = model
    return model
