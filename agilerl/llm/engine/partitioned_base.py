"""ZeRO stage 3: the frozen base cut into one part per rank, put together layer by layer when used.

Only the base is partitioned. Adapters are added afterwards and stay whole on every rank: they are
small, and so several agents share the partitioned base as they share a whole one. Their optimizer
is partitioned by ``zero.py``.

The parts are put together by DeepSpeed's hooks around each layer's forward and backward, which are
collectives: every rank has to run the decoder equally often. (And what it runs must not depend on
the tokens, see ``check_every_layer_runs``.) In rollouts ranks do not know of each other's forwards:
either the base is put together once and each goes its own way, or a rank that has no more of its
own runs along with the others.

When it converts a model, DeepSpeed also replaces ``torch.nn.functional.linear``, for the whole
process, by one that keeps no weights for backward: else no layer's weights could be given up
between its forward and its backward.
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
    """DeepSpeed's hooks, which can be told that all weights are there already."""

    passive = False

    def setup_zero_stage3_hooks(self) -> None:
        super().setup_zero_stage3_hooks()
        # It records the order of layers for fetching ahead, and compares it between ranks in every
        # forward: also in rollouts, where ranks run different numbers of them.
        self.fwd_pre_hook.remove()
        # The stack of running modules is of the whole process. It would keep this model alive, and
        # all modules in which a recomputation for backward stopped early.
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
    """An output embedding whose weights are put together around its forward; a collective."""

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
        ranks: Who holds the parts: all processes of torch's default group.
        offload: Keep this rank's part in CPU memory.
        gather_for_generation: Whether rollouts are to put the whole model together.
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
        # Nothing is fetched ahead and nothing kept: layers run in one order in rollouts, in another
        # in training, and DeepSpeed's prediction of it would be wrong half of the time.
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
        everything = [*model.base_model.parameters(), *self._head]
        self._everything = list({id(p): p for p in everything}.values())

    @contextlib.contextmanager
    def whole_head(self) -> Iterator[None]:
        """Within it the head's weights are there; a collective."""
        if self._hooks.passive:
            yield
            return
        with GatheredParameters(self._head):
            yield

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[None]:
        """Within it all weights are there and no layer communicates; a collective; may be nested.

        Takes the memory of the whole base while it lasts.

        Raises:
            RuntimeError: Within :meth:`in_step`.
        """
        if self._hooks.passive:
            yield
            return
        self._check_not_in_step()
        self._release_leftovers()
        with GatheredParameters(self._everything):
            self._hooks.passive = True
            try:
                yield
            finally:
                self._hooks.passive = False

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Within it each rank may run the decoder as often as it likes; may be nested.

        For forwards without gradients, every one followed by one of :class:`GatheredHead`. Ranks
        enter and leave together. Each announces every run to all; one that leaves runs along, on a
        single token, until no rank has announced any. An error is raised without waiting.
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
            self._run_along()

    def _announce(self) -> None:
        # On the decoder's device, so that nobody waits for a result that is known.
        self.ranks.max(torch.ones((), dtype=torch.long, device=self._device))

    @torch.no_grad()
    def _run_along(self) -> None:
        """Take part in a forward of other ranks."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        self._hooks.module(input_ids=ids, use_cache=False)
        with self.whole_head():
            pass

    @property
    def _device(self) -> torch.device:
        return self._everything[0].device

    def _check_not_in_step(self) -> None:
        if self._in_step:
            raise RuntimeError(
                "within a rollout processes run the partitioned base each at their own pace: save, "
                "load and learn outside of agent.rollout(), or set gather_for_generation=True"
            )

    def _release_leftovers(self) -> None:
        """Part again what backward left whole.

        DeepSpeed releases a layer when the gradient of its input is there; layers below the first
        adapter have none.
        """
        self._hooks.release_backward_leftovers()
        for parameter in self._everything:
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
