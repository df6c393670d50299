"""ZeRO stage 3: the frozen base is partitioned over the ranks, and gathered layer by layer.

Only the base is partitioned. Adapters are added afterwards and stay whole on every rank: they are
small, and several agents can share the partitioned base as they share a whole one. Their optimizer
is partitioned by ``zero.py``.

DeepSpeed's hooks around each layer's forward and backward gather its weights. They are collectives:
every rank must run the decoder equally often, and what it runs must not depend on the tokens (see
``check_every_layer_runs``). In rollouts a rank does not know how many forwards the others run.
Either the base is gathered once, and each rank generates by itself, or a rank that is done runs
dummy forwards until all are done.

When DeepSpeed converts a model it replaces ``torch.nn.functional.linear``, for the whole process,
by one that keeps no weights for backward: otherwise a layer's weights could not be released between
its forward and its backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
)
from torch import nn
from transformers import PreTrainedModel

from agilerl.distributed import Ranks
from agilerl.llm.engine.partition_checks import is_partitioned


def _empty_stack(*_: Any) -> None:
    parameter_offload.FWD_MODULE_STACK.clear()


class _Hooks(parameter_offload.DeepSpeedZeRoOffload):
    """DeepSpeed's hooks, which do nothing while the whole model is gathered (``passive``)."""

    passive = False

    def setup_zero_stage3_hooks(self) -> None:
        super().setup_zero_stage3_hooks()
        # This hook records the order of layers for prefetching, and compares it between ranks in
        # every forward: also in rollouts, where ranks run different numbers of forwards.
        self.fwd_pre_hook.remove()
        # The stack of running modules is a global of the process. It would keep this model alive,
        # with all modules in which a recomputation for backward stopped early.
        self.module.register_forward_pre_hook(_empty_stack, prepend=True)

    def pre_sub_module_forward_function(self, sub_module: nn.Module) -> None:
        if self.passive:  # DeepSpeed's hook after the forward takes it off this stack
            parameter_offload.FWD_MODULE_STACK.append(sub_module)
        else:
            super().pre_sub_module_forward_function(sub_module)

    def post_sub_module_forward_function(self, sub_module: nn.Module) -> None:
        if not self.passive:
            super().post_sub_module_forward_function(sub_module)


class GatheredHead(nn.Module):
    """An output embedding whose weights are gathered around its forward; a collective."""

    def __init__(self, head: nn.Module, partition: PartitionedBase) -> None:
        super().__init__()
        self.head, self.partition = head, partition

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(N, D)`` hidden states to ``(N, V)`` logits."""
        with self.partition.whole_head():
            logits: torch.Tensor = self.head(hidden)
        return logits


class PartitionedBase:
    """A model whose frozen parameters are partitioned over all ranks.

    Args:
        model: Without adapters; the same on every rank. It stays partitioned.
        ranks: All processes of torch's default group; each holds one partition.
        offload: Keep this rank's partition in CPU memory.
        gather_for_generation: Whether rollouts gather the whole model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks,
        offload: bool = False,
        gather_for_generation: bool = True,
    ) -> None:
        self.ranks = ranks
        self.gather_for_generation = gather_for_generation
        self._in_step = False
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "train_batch_size": ranks.world_size,
            "zero_optimization": {"stage": 3},
        }
        # Nothing is prefetched and no weights are kept: layers run in one order in rollouts and in
        # another in training, so that DeepSpeed's prediction would be wrong half of the time.
        self._hooks = _Hooks(
            model.base_model,
            timers=None,
            ds_config=config,
            overlap_comm=False,
            prefetch_bucket_size=0,
            max_reuse_distance=0,
            max_live_parameters=0,
            param_persistence_threshold=0,
            offload_param_config=DeepSpeedZeroOffloadParamConfig(device="cpu") if offload else None,
        )
        head = model.get_output_embeddings()
        own = [p for p in head.parameters() if not is_partitioned(p)]
        if own:  # a head that is not tied to the embedding
            Init(
                module=head,
                config_dict_or_path=config,
                dtype=own[0].dtype,
                remote_device="cpu" if offload else None,
            )
        self._head = list(head.parameters())
        parameters = [*model.base_model.parameters(), *self._head]
        self._parameters = list({id(p): p for p in parameters}.values())

    @contextlib.contextmanager
    def whole_head(self) -> Iterator[None]:
        """Within it the head's weights are gathered; a collective."""
        if self._hooks.passive:
            yield
            return
        with GatheredParameters(self._head):
            yield

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[None]:
        """Within it all weights are gathered, and layers do not communicate; may be nested.

        A collective, which takes the memory of the whole base while it lasts.

        Raises:
            RuntimeError: Within :meth:`in_step`.
        """
        if self._hooks.passive:
            yield
            return
        self._check_not_in_step()
        self._release_leftovers()
        with GatheredParameters(self._parameters):
            self._hooks.passive = True
            try:
                yield
            finally:
                self._hooks.passive = False

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Within it each rank may run the decoder as often as it likes; may be nested.

        For forwards without gradients, each followed by one of :class:`GatheredHead`. Ranks enter
        and leave together. A rank announces each of its forwards to the others. When it leaves it
        runs dummy forwards on a single token until no rank announces one any more. An error is
        raised at once, without waiting for the others.
        """
        if self._in_step or self._hooks.passive:
            yield
            return
        self._release_leftovers()
        decoder = self._hooks.module
        announce = decoder.register_forward_pre_hook(lambda *_: self._announce(), prepend=True)
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
            announce.remove()
        while self.most(0):
            self._run_dummy_forward()

    def _announce(self) -> None:
        # On the decoder's device, so that nobody waits for a result that is known.
        self.ranks.max(torch.ones((), dtype=torch.long, device=self._device))

    @torch.no_grad()
    def _run_dummy_forward(self) -> None:
        """Take part in a forward of other ranks, on a single token."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        self._hooks.module(input_ids=ids, use_cache=False)
        with self.whole_head():
            pass

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    def _check_not_in_step(self) -> None:
        if self._in_step:
            raise RuntimeError(
                "within a rollout each process runs the partitioned base at its own pace: save, "
                "load and learn outside of agent.rollout(), or set gather_for_generation=True"
            )

    def _release_leftovers(self) -> None:
        """Partition again what backward left gathered.

        DeepSpeed releases a layer when the gradient of its input is there; layers below the first
        adapter have none.
        """
        self._hooks.release_backward_leftovers()
        for parameter in self._parameters:
            parameter.ds_active_sub_modules.clear()
            if parameter.ds_status == ZeroParamStatus.AVAILABLE:
                parameter.partition()

    def most(self, count: int) -> int:
        """The largest count of any rank; a collective.

        Raises:
            RuntimeError: Within :meth:`in_step`.
        """
        self._check_not_in_step()
        return int(self.ranks.max(torch.tensor(count)))
