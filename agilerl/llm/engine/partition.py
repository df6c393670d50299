"""ZeRO stage 3: the frozen base cut into one part per rank, put together layer by layer when used.

Only the base is partitioned. Adapters are added afterwards and stay whole on every rank: they are
small, and so several agents share the partitioned base as they share a whole one. Their optimizer
is partitioned by ``zero.py``.

The parts are put together by DeepSpeed's hooks around each layer's forward and backward, which are
collectives: every rank has to run the decoder equally often. When it converts a model, DeepSpeed
also replaces ``torch.nn.functional.linear``, for the whole process, by one that keeps no weights
for backward: else no layer's weights could be given up between its forward and its backward.
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

from agilerl.llm.engine.partition_facts import is_partitioned
from agilerl.llm.engine.ranks import Ranks


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


class PartitionedBase:
    """A model whose frozen parameters are partitioned over all ranks.

    Args:
        model: Without adapters; the same on every rank. It stays partitioned.
        ranks: Who holds the parts: all processes of torch's default group.
        offload: Keep this rank's part in CPU memory.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks, offload: bool = False) -> None:
        self.ranks = ranks
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "train_batch_size": ranks.count,
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
        """
        if self._hooks.passive:
            yield
            return
        self._release_leftovers()
        with GatheredParameters(self._everything):
            self._hooks.passive = True
            try:
                yield
            finally:
                self._hooks.passive = False

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
        """The largest count of any rank; a collective."""
        return int(self.ranks.max(torch.tensor(count)))
