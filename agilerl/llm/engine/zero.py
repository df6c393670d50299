"""The engine over DeepSpeed ZeRO 1 to 3: every rank keeps and steps its part of the optimizer.

DeepSpeed is given handles: parameters that share the adapter's memory, and nothing of the base,
which is frozen and shared by all agents. Micro-batches accumulate on the adapter itself, out of
sight of DeepSpeed's hooks; a step hands the accumulated gradients over in one backward through the
handles. So there is one communication per optimizer step, ranks may run different numbers of
micro-batches, and a discarded step never reached DeepSpeed. The price: until the step, a rank holds
the whole gradient of its adapter, also with ZeRO 2. Of stage 3 this is the optimizer's side, which
is that of stage 2; the base is partitioned in ``partition.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import deepspeed
import torch
from torch import nn

from agilerl.distributed import Ranks
from agilerl.llm.checkpoint.optimizer_shards import Fragment, Shard
from agilerl.llm.config import CosineLRScheduleConfig
from agilerl.llm.engine.local import LocalEngine

MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroEngine(LocalEngine):
    """AdamW over the adapter, partitioned over ranks by DeepSpeed.

    Args:
        parameters: What is trained, in float32; overwritten with the values of rank 0.
        lr: Learning rate of AdamW.
        schedule: Warm-up and decay of it; None: constant.
        ranks: The processes that step together.
        zero_optimization: That section of the DeepSpeed configuration; its ``stage`` and
            ``offload_optimizer`` count.

    Raises:
        ValueError: If a parameter is not float32.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        schedule: CosineLRScheduleConfig | None,
        ranks: Ranks,
        zero_optimization: Mapping[str, Any],
    ) -> None:
        trained = list(parameters)
        for parameter in trained:
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"the adapter is {parameter.dtype}, but DeepSpeed needs a float32 one; load "
                    "the base in bfloat16 or float32, PEFT then makes float32 adapters"
                )
        ranks.broadcast(trained)
        handles = nn.ParameterList([nn.Parameter(p.data) for p in trained])
        super().__init__(handles, lr, schedule)
        self.handles, self.parameters = self.parameters, trained
        self.ranks = ranks
        # A partitioned base communicates in every forward and backward.
        self.lockstep = zero_optimization["stage"] == 3
        self.sharded = zero_optimization["stage"] >= 2
        self.wrapped, *_ = deepspeed.initialize(
            model=handles,
            optimizer=self.optimizer,
            config=_config(zero_optimization, ranks, sum(p.numel() for p in trained)),
        )
        self._share_memory()

    def step(self, max_grad_norm: float) -> float:
        """Hand the gradients to DeepSpeed, which sums, clips and steps its partitions."""
        self._share_memory()
        zero = self.wrapped.optimizer
        zero.clip_grad = max_grad_norm
        # Weights may have been written meanwhile: a checkpoint, a clone's copy.
        zero.refresh_fp32_params()
        # DeepSpeed averages over ranks; what is wanted is the sum.
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad * self.ranks.world_size
            for p in self.parameters
        ]
        handed = zip(self.handles, gradients, strict=True)
        self.wrapped.backward(torch.stack([(h * g).sum() for h, g in handed]).sum())
        self.wrapped.step()
        self.discard()
        return float(self.wrapped.get_global_grad_norm())

    def discard(self) -> None:
        """Clear accumulated gradients; DeepSpeed has seen none of them."""
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Moments gathered from all ranks, in the local engine's form; all ranks together."""
        moments = self.optimizer.state.get(self._partition, {})
        gathered = {name: self._gathered(moments[name]) for name in MOMENTS if name in moments}
        state = self.settings_dict()
        state["optimizer"]["state"] = {
            index: {
                "step": moments["step"].clone(),
                **{n: parts[index] for n, parts in gathered.items()},
            }
            for index in range(len(self.parameters))
            if gathered
        }
        return state

    def settings_dict(self) -> dict[str, Any]:
        """:meth:`state_dict` without the moments; every rank alone."""
        (group,) = self.optimizer.param_groups
        groups = [{**group, "params": list(range(len(self.parameters)))}]
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        optimizer = {"state": {}, "param_groups": groups}
        return {"optimizer": optimizer, "scheduler": scheduler, "lr": self.lr}

    def shard(self) -> Shard:
        """The moments that this rank holds; every rank alone."""
        moments = self.optimizer.state.get(self._partition, {})
        return Shard(
            moments.get("step"),
            {
                index: Fragment(
                    tuple(self.parameters[index].shape),
                    whole.start,
                    {name: moments[name][part] for name in MOMENTS if name in moments},
                )
                for index, whole, part in self._fragments()
                if moments
            },
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore moments and schedule position; the live learning rate is kept.

        Raises:
            ValueError: If the state is that of other parameters.
        """
        saved = state["optimizer"]["state"]
        (saved_group,) = state["optimizer"]["param_groups"]
        self._check_fits(saved, len(saved_group["params"]))
        with self._keeping_rate(state):
            (group,) = self.optimizer.param_groups
            group.update({name: value for name, value in saved_group.items() if name != "params"})
            self._write_moments(saved)

    def _write_moments(self, saved: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        # In place where DeepSpeed has linked the moments to the handles already.
        moments = self.optimizer.state[self._partition]
        for name in MOMENTS:
            flat = moments.setdefault(name, torch.zeros_like(self._partition))
            flat.zero_()
            for index, whole, part in self._fragments():
                if index in saved:
                    flat[part] = saved[index][name].flatten()[whole].to(flat)
        # The partition is one tensor to AdamW, and has one count of steps.
        steps = [float(entry["step"]) for entry in saved.values()]
        moments["step"] = torch.tensor(max(steps, default=0.0))

    def close(self) -> None:
        """Take DeepSpeed's hooks and buffers down; the adapter's values stay."""
        self.wrapped.destroy()
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()

    @property
    def _partition(self) -> torch.Tensor:
        """This rank's weights, flat and in float32, on the CPU when the optimizer is offloaded."""
        (group,) = self.optimizer.param_groups
        (partition,) = group["params"]
        return partition

    def _share_memory(self) -> None:
        """Make adapter and handles one memory again, the adapter's values winning.

        DeepSpeed lays the handles out flat, and either side may have been given new storage.
        """
        for parameter, handle in zip(self.parameters, self.handles, strict=True):
            if parameter.data_ptr() != handle.data_ptr():
                handle.data.copy_(parameter.data)
                parameter.data = handle.data

    def _fragments(self) -> Iterator[tuple[int, slice, slice]]:
        """Of each parameter with a part here: number, the slice of it, that of the partition."""
        for index, handle in enumerate(self.handles):
            mapping = handle._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                whole, part = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield (
                    index,
                    slice(whole.start, whole.start + whole.numel),
                    slice(part.start, part.start + part.numel),
                )

    def _gathered(self, partitioned: torch.Tensor) -> list[torch.Tensor]:
        """Tensors in the parameters' shapes from every rank's flat partition of them."""
        sizes = [p.numel() for p in self.parameters]
        flat = torch.zeros(sum(sizes), device=self.parameters[0].device)
        parts = flat.split(sizes)
        for index, whole, part in self._fragments():
            parts[index][whole] = partitioned[part].to(flat)
        summed = self.ranks.sum(flat).split(sizes)
        return [s.view_as(p).clone() for s, p in zip(summed, self.parameters, strict=True)]

    def _check_fits(self, saved: Mapping[int, Mapping[str, torch.Tensor]], count: int) -> None:
        fits = count == len(self.parameters) and all(
            entry[name].shape == self.parameters[index].shape
            for index, entry in saved.items()
            for name in MOMENTS
        )
        if not fits:
            raise ValueError(
                "the optimizer state is that of another adapter: its moments differ from this "
                "adapter's parameters in number or shape"
            )


def _config(section: Mapping[str, Any], ranks: Ranks, size: int) -> dict[str, Any]:
    """DeepSpeed's configuration for ``size`` trained weights.

    Batch sizes, precision, clipping, optimizer and schedule are the agent's business, so nothing
    else is taken over.
    """
    offload = dict(section.get("offload_optimizer") or {"device": "none"})
    even = size + size % 2
    return {
        "train_batch_size": ranks.world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 2**31,
        "zero_allow_untested_optimizer": True,
        # torch's AdamW on the CPU: the same numbers as everywhere, and nothing to compile.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            # The adapter itself stays whole.
            "stage": min(section["stage"], 2),
            "offload_optimizer": {k: v for k, v in offload.items() if v is not None},
            # Buffers of this size are allocated; the default is for whole models.
            "reduce_bucket_size": even,
            "allgather_bucket_size": even,
        },
    }
