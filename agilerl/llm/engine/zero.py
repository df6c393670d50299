"""The engine over DeepSpeed ZeRO 1 to 3: every rank keeps and steps its part of the optimizer.

DeepSpeed is given handles: parameters that share the adapter's memory, and nothing of the base,
which is frozen and shared by all agents. Micro-batches accumulate on the adapter itself, out of
sight of DeepSpeed's hooks; a step hands the accumulated gradients over in one backward through the
handles. So there is one communication per optimizer step, ranks may run different numbers of
micro-batches, and a discarded step never reached DeepSpeed. The price: until the step, a rank holds
the whole gradient of its adapter, also with ZeRO 2. Of stage 3 this is the optimizer's side, which
is that of stage 2; the base is partitioned in ``partitioned_base.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import deepspeed
import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from agilerl.distributed import Ranks
from agilerl.llm.checkpoint.optimizer_shards import Fragment, Shard
from agilerl.llm.config import LRSchedule, OptimizerSettings
from agilerl.llm.engine.local import LocalEngine

MOMENTS = ("exp_avg", "exp_avg_sq")

T = TypeVar("T")


class ZeroEngine(LocalEngine):
    """AdamW over the adapter, partitioned over ranks by DeepSpeed.

    Args:
        parameters: What is trained, in float32, in groups or not; overwritten with the values of
            rank 0.
        lr: Learning rate of AdamW, for groups that do not name their own.
        schedule: Warm-up and decay of it; None: constant.
        ranks: The processes that step together.
        zero_optimization: That section of the DeepSpeed configuration; its ``stage`` and
            ``offload_optimizer`` count.
        settings: Of AdamW: what DeepSpeed partitions has no other form.

    Raises:
        ValueError: If a parameter is not float32.
    """

    def __init__(
        self,
        parameters: ParamsT,
        lr: float,
        schedule: LRSchedule | None,
        ranks: Ranks,
        zero_optimization: Mapping[str, Any],
        settings: OptimizerSettings | None = None,
    ) -> None:
        super().__init__(parameters, lr, schedule, settings)
        for parameter in self.parameters:
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"the adapter is {parameter.dtype}, but DeepSpeed needs a float32 one; load "
                    "the base in bfloat16 or float32, PEFT then makes float32 adapters"
                )
        self.ranks = ranks
        ranks.broadcast(self.parameters)
        self.handles = [nn.Parameter(p.data) for p in self.parameters]
        self._group_of = [
            number
            for number, group in enumerate(self.optimizer.param_groups)
            for _ in group["params"]
        ]
        for group, handles in zip(
            self.optimizer.param_groups, self._by_group(self.handles), strict=True
        ):
            group["params"] = handles
        self._unused_groups: list[dict[str, Any]] = []
        self.optimizer.register_step_pre_hook(self._leave_out_unused_groups)
        # A partitioned base communicates in every forward and backward.
        self.lockstep = zero_optimization["stage"] == 3
        self.sharded = zero_optimization["stage"] >= 2
        self.wrapped, *_ = deepspeed.initialize(
            model=nn.ParameterList(self.handles),
            optimizer=self.optimizer,
            config=_config(zero_optimization, ranks, sum(p.numel() for p in self.parameters)),
        )
        self._share_memory()

    def step(self, max_grad_norm: float) -> float:
        """Hand the gradients to DeepSpeed, which sums, clips and steps its partitions."""
        self._unscale_gradients()
        self._note_unused_groups()
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

    def _note_unused_groups(self) -> None:
        """Find the parameter groups that no rank has a gradient for.

        AdamW leaves alone what has no gradient, but DeepSpeed always hands it one: with gradients
        of zero the moments of an earlier step would move the weights on.
        """
        groups = self.optimizer.param_groups
        if len(groups) == 1:
            return
        used = [any(p.grad is not None for p in group) for group in self._by_group(self.parameters)]
        on_any_rank = self.ranks.max(torch.tensor(used).int()).tolist()
        self._unused_groups = [g for g, used in zip(groups, on_any_rank, strict=True) if not used]

    def _leave_out_unused_groups(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # DeepSpeed steps one group at a time, and puts the list of groups back afterwards.
        unused = {id(group) for group in self._unused_groups}
        if unused:
            optimizer.param_groups = [g for g in optimizer.param_groups if id(g) not in unused]

    def state_dict(self) -> dict[str, Any]:
        """Moments gathered from all ranks, in the local engine's form; all ranks together."""
        state, numbers = self.settings_dict(), range(len(self.parameters))
        if any(self._moments(number) for number in numbers):
            gathered = {name: self._gathered(name) for name in MOMENTS}
            state["optimizer"]["state"] = {
                number: {
                    "step": self._moments(number)["step"].clone(),
                    **{name: whole[number] for name, whole in gathered.items()},
                }
                for number in numbers
                if self._moments(number)
            }
        return state

    def settings_dict(self) -> dict[str, Any]:
        """:meth:`state_dict` without the moments; not a collective."""
        numbers = self._by_group(range(len(self.parameters)))
        groups = [
            {**group, "params": own}
            for group, own in zip(self.optimizer.param_groups, numbers, strict=True)
        ]
        return {"optimizer": {"state": {}, "param_groups": groups}, **self._schedule_state()}

    def shard(self) -> Shard:
        """The moments that this rank holds; not a collective.

        Zeros for a parameter group that was never stepped, if another was.
        """
        of_groups = [self.optimizer.state.get(partition, {}) for partition in self._partitions]
        shard = {}
        for number, whole, part in self._fragments() if any(of_groups) else ():
            moments = of_groups[self._group_of[number]]
            state = {name: moments[name][part] for name in MOMENTS if moments} or {
                name: torch.zeros(part.stop - part.start) for name in MOMENTS
            }
            state["step"] = moments.get("step", torch.tensor(0.0))
            shape = tuple(self.parameters[number].shape)
            shard[number] = Fragment(shape, whole.start, state)
        return shard

    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        saved_groups = state["param_groups"]
        self._check_fits(state["state"], [len(group["params"]) for group in saved_groups])
        for group, saved in zip(self.optimizer.param_groups, saved_groups, strict=True):
            group |= {name: value for name, value in saved.items() if name != "params"}
        self._write_moments(state["state"])

    def _write_moments(self, saved: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        for partition, numbers in zip(
            self._partitions, self._by_group(range(len(self.parameters))), strict=True
        ):
            # In place where DeepSpeed has linked the moments to the handles already.
            moments = self.optimizer.state[partition]
            for name in MOMENTS:
                moments.setdefault(name, torch.zeros_like(partition)).zero_()
            # The partition is one tensor to AdamW, and has one count of steps.
            steps = [float(saved[number]["step"]) for number in numbers if number in saved]
            moments["step"] = torch.tensor(max(steps, default=0.0))
        for number, whole, part in self._fragments():
            for name in MOMENTS if number in saved else ():
                flat = self._moments(number)[name]
                flat[part] = saved[number][name].flatten()[whole].to(flat)

    def close(self) -> None:
        """Remove DeepSpeed's hooks and buffers; the adapter's values stay."""
        self.wrapped.destroy()
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()

    @property
    def _partitions(self) -> list[torch.Tensor]:
        """This rank's weights of every parameter group, flat and in float32.

        On the CPU when the optimizer is offloaded.
        """
        return [group["params"][0] for group in self.optimizer.param_groups]

    def _moments(self, number: int) -> dict[str, torch.Tensor]:
        """The moments of the partition that a parameter belongs to; none before the first step."""
        return self.optimizer.state.get(self._partitions[self._group_of[number]], {})

    def _by_group(self, values: Sequence[T]) -> list[list[T]]:
        """One value per parameter, split as the parameter groups are."""
        groups: list[list[T]] = [[] for _ in self.optimizer.param_groups]
        for group, value in zip(self._group_of, values, strict=True):
            groups[group].append(value)
        return groups

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
        for number, handle in enumerate(self.handles):
            mapping = handle._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                whole, part = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield (
                    number,
                    slice(whole.start, whole.start + whole.numel),
                    slice(part.start, part.start + part.numel),
                )

    def _gathered(self, moment: str) -> list[torch.Tensor]:
        """A moment in the parameters' shapes from every rank's partitions of it."""
        sizes = [p.numel() for p in self.parameters]
        flat = torch.zeros(sum(sizes), device=self.parameters[0].device)
        parts = flat.split(sizes)
        for number, whole, part in self._fragments():
            if self._moments(number):
                parts[number][whole] = self._moments(number)[moment][part].to(flat)
        summed = self.ranks.sum(flat).split(sizes)
        return [s.view_as(p).clone() for s, p in zip(summed, self.parameters, strict=True)]

    def _check_fits(
        self, saved: Mapping[int, Mapping[str, torch.Tensor]], counts: list[int]
    ) -> None:
        own = [len(group) for group in self._by_group(self.parameters)]
        fits = counts == own and all(
            entry[name].shape == self.parameters[number].shape
            for number, entry in saved.items()
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
