"""One agent's view of a shared base: an adapter slot per role."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import LoraConfig, PeftModel
from torch import nn

from agilerl.checks import warn_once
from agilerl.llm import adapters
from agilerl.llm.batch import TrainBatch
from agilerl.llm.causal_lm import LogitHead, find_head
from agilerl.llm.config import ROW_LAYOUTS, ForwardConfig, RowLayout
from agilerl.llm.forward.hidden_states import action_hidden_states
from agilerl.llm.logprobs import TokenLogProbs, token_logprobs
from agilerl.llm.shared_base import SharedBase
from agilerl.utils.garbage import is_collecting_garbage

if TYPE_CHECKING:
    from agilerl.llm.engine.partitioned_base import PartitionedBase

logger = logging.getLogger(__name__)


class Policy:
    """One agent's adapters on a shared base.

    Args:
        base: The model; other policies may share it.
        lora_configs: The adapter of each role. There is an ``"actor"``; a ``"reference"`` has the
            actor's config and starts as a copy of it.
        trained: The roles whose parameters require gradients while their adapter is active.
        seed: Of the adapters' initial weights.
    """

    def __init__(
        self,
        base: SharedBase,
        lora_configs: Mapping[str, LoraConfig],
        *,
        trained: Collection[str] = ("actor",),
        seed: int,
    ) -> None:
        self.base = base
        self.lora_configs = dict(lora_configs)
        self.trained = frozenset(trained)
        self.slots: dict[str, str] = {}
        self.role = "actor"
        self._decoder: nn.Module | None = None
        # A policy that is dropped without release() must not leave its slots on the user's model.
        self._drop = weakref.finalize(self, _remove_slots, base, self.slots)
        self._drop.atexit = False
        try:
            self._add_slots(self.lora_configs, seed)
        except BaseException:
            self.release()
            raise
        if "reference" in self.slots:
            self.copy_role("actor", "reference")
        self.set_role("actor")

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
    def lora_config(self) -> LoraConfig:
        """The actor's."""
        return self.lora_configs["actor"]

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

    def set_role(self, role: str) -> None:
        """Run the model with a role's adapter from now on; the first is the actor's.

        Of a trained role the parameters require gradients, those of all others do not.

        Raises:
            ValueError: For a role this policy does not have.
        """
        self._activate(role)
        self.role = role

    @contextlib.contextmanager
    def as_role(self, role: str | None) -> Iterator[None]:
        """Within it the model runs with ``role`` (None: the bare base), afterwards as before."""
        self._activate(role)
        try:
            yield
        finally:
            self._activate(self.role)

    def _activate(self, role: str | None) -> None:
        slot = None if role is None else self.slot(role)
        self.base.activate(slot, trainable=role in self.trained)

    def parameters(self, role: str = "actor") -> dict[str, nn.Parameter]:
        """A role's parameters by name, the slot's name left out, in a fixed order."""
        return adapters.adapter_parameters(self.model, self.slot(role))

    def copy_role(self, source: str, target: str) -> None:
        """Copy one role's weights onto another's."""
        adapters.copy_adapter(self.parameters(source), self.parameters(target))

    @contextlib.contextmanager
    def replace_adapters(self, configs: Mapping[str, LoraConfig], seed: int) -> Iterator[None]:
        """Replace the adapters of some roles by new ones of other configs.

        The old ones are kept until the block ends; an error in it brings them back.
        """
        old_configs, old_slots = self.lora_configs, dict(self.slots)
        try:
            self.lora_configs = {**old_configs, **configs}
            self._add_slots(configs, seed)
            yield
            dropped = {old_slots[role] for role in configs}
        except BaseException:
            dropped = {*self.slots.values()} - {*old_slots.values()}
            self.lora_configs = old_configs
            self.slots.update(old_slots)
            raise
        finally:
            for slot in dropped:
                self.base.remove_slot(slot)
            self.set_role(self.role)

    def _add_slots(self, configs: Mapping[str, LoraConfig], seed: int) -> None:
        # The same seed gives the same adapters, whatever ran before.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for role, config in configs.items():
                self.slots[role] = self.base.add_slot(role, config)

    def release(self) -> None:
        """Delete this policy's adapters; the last policy of a base leaves the plain model."""
        self._drop()

    def compile(self, mode: str | None) -> None:
        """Run training forwards through ``torch.compile`` with this mode; None: as they are.

        Raises:
            ValueError: If the base is partitioned.
        """
        self._decoder = None
        if mode is not None:
            if self.base.partition is not None:
                raise ValueError(
                    f"torch_compiler is {mode!r}, but with ZeRO stage 3 layers are gathered "
                    "while they run, which cannot be compiled; use torch_compiler=None or "
                    "zero_stage 2"
                )
            warn_once(logger, "torch_compiler is %r: the first learn may compile for minutes", mode)
            compiled = torch.compile(self.base.decoder, mode=mode, dynamic=True)
            self._decoder = cast(nn.Module, compiled)

    def head(self) -> LogitHead:
        """The head as it stands now."""
        return find_head(self.base.model)

    def padding_reason(self, config: ForwardConfig) -> str | None:
        """The setting with which rows are padded, whatever the base allows; None: there is none."""
        if not config.use_position_ids:
            return "calc_position_embeddings is False"
        # The probe's forwards would have to be run by all ranks together.
        if self.base.partition is not None:
            return "ZeRO stage 3 partitions the base"
        # A compiled forward keeps to one shape-generic graph, not one per call.
        return None if self._decoder is None else "torch_compiler is set"

    def row_layout(self, config: ForwardConfig) -> RowLayout:
        """How forwards lay rows out."""
        if config.layout == "padded" or self.padding_reason(config) is not None:
            return "padded"
        return max(config.layout, self.base.row_layout, key=ROW_LAYOUTS.index)

    def logprobs(
        self,
        batch: TrainBatch,
        config: ForwardConfig,
        *,
        entropy: bool = True,
        entropy_gradient: bool = False,
    ) -> TokenLogProbs:
        """Log-probs of a batch's actions under the active adapter.

        Flat ``(N,)``, in the order of ``batch.targets``; entropies too unless not asked for, with
        their gradient if asked for. On a partitioned base all ranks together.
        """
        wanted: dict[str, Any] = {"entropy": entropy, "entropy_gradient": entropy_gradient}
        if self.base.partition is not None:
            return self._partitioned_logprobs(batch, config, wanted, self.base.partition)
        decoder = self.base.decoder if self._decoder is None else self._decoder
        hidden = action_hidden_states(decoder, batch, config, self.row_layout(config))
        return self._through_head(hidden, batch, config, wanted)

    def _partitioned_logprobs(
        self,
        batch: TrainBatch,
        config: ForwardConfig,
        wanted: dict[str, Any],
        partition: PartitionedBase,
    ) -> TokenLogProbs:
        hidden = action_hidden_states(self.base.decoder, batch, config, "padded")
        with partition.whole_head():
            return self._through_head(hidden, batch, config, wanted)

    def _through_head(
        self,
        hidden: torch.Tensor,
        batch: TrainBatch,
        config: ForwardConfig,
        wanted: dict[str, Any],
    ) -> TokenLogProbs:
        return token_logprobs(
            hidden,
            batch.targets,
            self.head(),
            temperature=config.temperature,
            fp32=config.fp32_logits,
            tile_rows=config.tile_rows,
            **wanted,
        )

    def frozen_logprobs(
        self,
        batch: TrainBatch,
        role: str | None,
        config: ForwardConfig,
        micro_batches: Sequence[torch.Tensor] | None = None,
        *,
        entropy_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Log-probs ``(B, S)`` of a batch under a role, without gradients.

        Args:
            batch: The batch.
            role: Whose adapter; None: the base without adapters.
            config: How log-probs are computed.
            micro_batches: Long indices of the rows that are run together; None: all rows at once.
            entropy_out: ``(B, S)`` into which the entropies of these rows are written, if given.

        Returns:
            0 outside the action mask, and in rows that are not wanted. On a partitioned base all
            ranks must ask together, each for as many rows as it likes.
        """
        if micro_batches is None:
            micro_batches = [torch.arange(len(batch), device=batch.device)]
        result = torch.zeros(batch.action_mask.shape, device=batch.device)
        partition = self.base.partition
        runs = len(micro_batches) if partition is None else partition.most(len(micro_batches))
        if runs == 0:
            return result
        # torch.compile fuses a graph without gradients in another way, which rounds differently.
        as_in_training = self._decoder is not None and role in self.trained
        with self.as_role(role), torch.set_grad_enabled(as_in_training):
            for _ in range(runs - len(micro_batches)):
                # Only for the ranks that have more rows.
                self.logprobs(batch.select(batch.shortest_row), config, entropy=False)
            for rows in micro_batches:
                chosen = batch.select(rows)
                found = self.logprobs(chosen, config, entropy=entropy_out is not None)
                result = result.to(found.logp.dtype)
                scattered = scatter_actions(found.logp.detach(), chosen.action_mask)
                result[rows, : scattered.shape[1]] = scattered
                if entropy_out is not None:
                    scattered = scatter_actions(found.entropy, chosen.action_mask)
                    entropy_out[rows, : scattered.shape[1]] = scattered.to(entropy_out)
        return result


def _remove_slots(base: SharedBase, slots: dict[str, str]) -> None:
    remove = base.remove_slot_later if is_collecting_garbage() else base.remove_slot
    for slot in slots.values():
        remove(slot)
    slots.clear()


def scatter_actions(values: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
    """``(N,)`` values of the actions, row by row, into ``(B, S)``, 0 elsewhere; differentiable."""
    return values.new_zeros(action_mask.shape).masked_scatter(action_mask, values)
