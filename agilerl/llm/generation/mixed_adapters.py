"""Batches whose rows run with different LoRA adapters of one base.

PEFT's own mixed batches (``adapter_names``) look the rows of every adapter up in Python, in every
layer and for every token. Here the rows are grouped once for as long as they stay the same, and a
layer runs all adapters in one batched product.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from agilerl.checks import require
from agilerl.llm.causal_lm import equal_up_to_rounding
from agilerl.llm.generation.row_groups import RowGroups
from agilerl.llm.policy import Policy
from agilerl.llm.shared_base import SharedBase

logger = logging.getLogger(__name__)

# Rows that groups padded to one size may have, over those that they hold.
_MOST_PADDING = 2
# Different, so that neither is mistaken for the other.
_PROBE_ROWS, _PROBE_TOKENS = 3, 2
# PEFT's layers; those of quantized weights can only be imported with bitsandbytes.
_LINEAR = ("Linear", "Linear4bit", "Linear8bitLt")
_mixable: WeakKeyDictionary[SharedBase, dict[Hashable, bool]] = WeakKeyDictionary()


class RowAdapters:
    """Which adapter each row of the next forward runs with.

    Args:
        count: Number of adapters, M.
    """

    def __init__(self, count: int) -> None:
        self.count, self.rows = count, 0
        self._groups: RowGroups | None = None

    def assign(self, adapters: torch.Tensor) -> None:
        """Choose an adapter for each row: ``(N,)`` long, below ``count``."""
        self.rows = len(adapters)
        self._groups = RowGroups(adapters, self.count, _MOST_PADDING)

    def run(self, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Each row through its adapter.

        Args:
            x: ``(N, T, in)``.
            down: ``(M, in, R)``.
            up: ``(M, R, out)``.

        Returns:
            ``(N, T, out)``.
        """
        assert self._groups is not None
        tokens, x = x.shape[1], self._groups.gathered(x)
        if self._groups.sizes is None:
            # All groups are as large as the largest: one batched product.
            made = x.reshape(self.count, -1, x.shape[-1]).bmm(down).bmm(up)
            made = made.view(-1, tokens, up.shape[-1])
        else:
            groups = zip(x.split(self._groups.sizes), down, up, strict=True)
            made = torch.cat([group @ first @ second for group, first, second in groups])
        return self._groups.returned(made)


class MixedLinear(nn.Module):
    """A linear layer of the base and the LoRA branches of several adapters.

    Args:
        layer: PEFT's, which holds all of them.
        slots: The adapters, in the order of ``rows``; all of one rank.
        rows: Which row runs with which.
    """

    def __init__(self, layer: LoraLayer, slots: Sequence[str], rows: RowAdapters) -> None:
        super().__init__()
        self.base_layer, self._rows = layer.get_base_layer(), rows
        self._down = torch.stack([layer.lora_A[slot].weight.T for slot in slots])
        self._up = torch.stack(
            [layer.lora_B[slot].weight.T * layer.scaling[slot] for slot in slots]
        )

    @property
    def weight(self) -> torch.Tensor:
        """The base's: some models read its dtype."""
        weight: torch.Tensor = self.base_layer.weight
        return weight

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``x`` is ``(N, T, in)``.

        Raises:
            ValueError: If it is not, so that its rows are not those of the batch.
        """
        if x.dim() != 3 or len(x) != self._rows.rows:
            raise ValueError(f"a linear layer was given an input of shape {tuple(x.shape)}")
        result: torch.Tensor = self.base_layer(x, *args, **kwargs)
        branch = self._rows.run(x.to(self._down.dtype), self._down, self._up)
        return (result + branch).to(result.dtype)


@contextlib.contextmanager
@torch.no_grad()
def mixed_adapters(policies: Sequence[Policy]) -> Iterator[RowAdapters]:
    """Within it the rows of a forward of the base run with the adapters of several policies.

    They are those of the policies' current roles, as they are when it is entered; ``assign`` of
    what it gives chooses among them. No adapter can be used otherwise meanwhile. Layers keep the
    base's weights and get copies of the adapters, which must be as :func:`mixing_key` says.

    Raises:
        RuntimeError: If an adapter of the base is rolling out.
    """
    base, rows = policies[0].base, RowAdapters(len(policies))
    require(
        not base.in_rollout,
        "a rollout with an adapter of this base model is under way; leave agent.rollout() first",
        RuntimeError,
    )
    slots = [policy.slot(policy.role) for policy in policies]
    assert base.peft is not None
    # All of them before any is swapped in: this is where memory may run out.
    layers = [
        (parent, name, child, MixedLinear(child, slots, rows))
        for parent in base.peft.get_base_model().modules()
        for name, child in parent.named_children()
        if isinstance(child, LoraLayer) and slots[0] in child.lora_A
    ]
    with base.exclusive(*slots):
        try:
            for parent, name, _, mixed in layers:
                parent._modules[name] = mixed
            yield rows
        finally:
            for parent, name, child, _ in layers:
                parent._modules[name] = child


def mixing_key(policy: Policy) -> Hashable | None:
    """Policies of a base whose keys are equal may run in one batch; None: this one cannot.

    What they must have in common are the names and shapes of their adapters' parameters. An adapter
    cannot be mixed if it does more than add a low-rank branch to linear layers, if it targets the
    head, or if the model does not give each layer all rows: that is probed once per base and set of
    shapes.
    """
    shapes = tuple((name, p.shape) for name, p in policy.parameters(policy.role).items())
    if policy.base.partition is not None or not _is_plain_lora(policy):
        return None
    known = _mixable.setdefault(policy.base, {})
    if shapes not in known:
        try:
            known[shapes] = _probe(policy)
            reason = "its outputs change"
        except Exception as error:  # noqa: BLE001 - of an unknown architecture: one by one will do
            known[shapes], reason = False, str(error)
        if not known[shapes]:
            name = type(policy.base.model).__name__
            logger.info(
                "agents on this %s roll out one by one, as their adapters cannot be mixed "
                "in a batch: %s",
                name,
                reason,
            )
    return shapes if known[shapes] else None


def _is_plain_lora(policy: Policy) -> bool:
    """Whether each of an adapter's parameters belongs to a low-rank branch of a linear layer."""
    slot, head = policy.slot(policy.role), policy.base.model.get_output_embeddings()
    for module in policy.model.modules():
        if isinstance(module, ModulesToSaveWrapper) and slot in module.modules_to_save:
            return False
        if not isinstance(module, BaseTunerLayer) or slot not in adapters_of(module):
            continue
        # The head is read by what makes logits of hidden states, not run as a layer.
        plain = type(module).__name__ in _LINEAR and slot in module.lora_A and module is not head
        if not plain or slot in module.lora_variant or module.lora_bias[slot]:
            return False
    return True


@torch.no_grad()
def _probe(policy: Policy) -> bool:
    """Whether rows that run mixed have the hidden states that they have alone."""
    ids = torch.arange(_PROBE_ROWS * _PROBE_TOKENS, device=policy.device).view(_PROBE_ROWS, -1)
    decoder = policy.base.decoder
    with mixed_adapters([policy, policy]) as rows:
        rows.assign(torch.tensor([0, 1, 0], device=policy.device))
        mixed = decoder(input_ids=ids, use_cache=False).last_hidden_state
    with policy.as_role(policy.role):
        alone = decoder(input_ids=ids, use_cache=False).last_hidden_state
    return equal_up_to_rounding(mixed, alone)


def adapters_of(layer: BaseTunerLayer) -> set[str]:
    """The adapters that a layer has parameters of."""
    tables = [layer._modules.get(kind) for kind in layer.adapter_layer_names]
    return {
        name
        for table in tables
        if isinstance(table, nn.ModuleDict | nn.ParameterDict)
        for name in table
    }
