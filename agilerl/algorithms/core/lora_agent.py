"""LoRAAgent: what an agent is made of, and everything that concerns its weights."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel

from agilerl.algorithms.core.arguments import check_start
from agilerl.algorithms.core.build_policy import build_policy
from agilerl.algorithms.core.evolvable import EvolvableAlgorithm
from agilerl.algorithms.core.optimizer_arguments import OptimizerArguments
from agilerl.algorithms.core.registry import (
    HyperparameterConfig,
    NetworkGroup,
    OptimizerConfig,
)
from agilerl.checks import require, warn_once
from agilerl.distributed import ranks_of
from agilerl.llm.adapters import copy_adapter
from agilerl.llm.config import CosineLRScheduleConfig
from agilerl.llm.engine.build import build_engine
from agilerl.llm.engine.local import LocalEngine, build_schedule, set_learning_rate
from agilerl.llm.generation import Generator
from agilerl.llm.generation.build import GeneratorSettings, build_generator
from agilerl.llm.generation.vllm.config import VLLMConfig
from agilerl.llm.policy import Policy
from agilerl.llm.step_results import SkippedSteps

logger = logging.getLogger(__name__)


class LoRAAgent(OptimizerArguments, EvolvableAlgorithm):
    """An agent's adapters on a shared base model, with its optimizer and generator.

    Hyperparameters are plain attributes, read at every call: a changed ``agent.temperature`` or
    ``agent.lr`` takes effect at once.

    Args:
        given: The constructor's arguments by name; ``locals()`` in a subclass's ``__init__``.

    Attributes:
        policy: The adapters, by role.
        engine: The optimizer over the trained ones, with its schedule.
        generator: What completes prompts with the policy.
        rng: The random stream of sampling and of the order of mini-batches.
        skipped_steps: Optimizer steps that were skipped because a gradient was not finite.
        chosen_micro_batch_size: What ``micro_batch_size_per_gpu="auto"`` stands for, chosen at the
            first ``learn``; None before. Clones and checkpoints keep it.
    """

    policy: Policy
    generator: Generator
    engine: LocalEngine
    _history = (*EvolvableAlgorithm._history, "chosen_micro_batch_size")
    _runtime_attributes = ("policy", "generator", "engine", "rng", "skipped_steps", "training")

    def __init__(self, given: Mapping[str, Any]) -> None:
        arguments = self.checked_arguments(given)
        super().__init__(arguments["index"], arguments["hp_config"])
        network = arguments.pop("actor_network")  # it belongs to the shared base
        del arguments["clone"]
        self.set_attributes(arguments)
        if self.accelerator is not None:
            self.device = self.accelerator.device
        # Accelerate says "cpu:0", tensors say "cpu".
        self.device = str(self.device).replace("cpu:0", "cpu")
        self.policy = build_policy(self, network, self.adapter_configs, self.learning_rates())
        self.lora_config = self.policy.lora_config
        ranks = ranks_of(self.accelerator)
        try:
            self.generator = build_generator(self.policy, self._generator_settings(), ranks)
            for role in self.policy.roles:
                ranks.broadcast(list(self.policy.parameters(role).values()))
            self.engine = self._build_engine()
        except BaseException:
            self.policy.release()  # a refused model is left as it was found
            raise
        # Members of a population must explore differently although they share a seed, and so must
        # the processes that one of them is spread over.
        offset = 1_000_003 * self.index + 7_368_787 * ranks.rank
        self.rng = torch.Generator().manual_seed((self.seed + offset) % 2**63)
        self.skipped_steps = SkippedSteps()
        self.chosen_micro_batch_size = None
        self.training = True
        self.register_network_group(NetworkGroup(eval_network="actor", policy=True))
        self.register_optimizer(OptimizerConfig(name="optimizer", networks=("actor",), lr="lr"))
        if self.torch_compiler is not None:
            self.recompile()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Called for missing attributes: clean_up() deletes these.
            if name in ("policy", "generator", "engine"):
                raise RuntimeError(
                    f"this {type(self).__name__} agent was cleaned up and holds no adapters any "
                    "more; make a new one, or load a checkpoint of it"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def adapter_configs(self, actor: LoraConfig) -> dict[str, LoraConfig]:
        """The LoRA config of every role, in the order in which the adapters are made.

        An algorithm with another adapter, such as a critic, overrides this, and
        :meth:`learning_rates` if the adapter is trained.

        Args:
            actor: The actor's.
        """
        reference = {"reference": actor} if self.use_separate_reference_adapter else {}
        return {"actor": actor, **reference}

    def learning_rates(self) -> dict[str, float]:
        """The learning rate of every trained role, from the attributes as they are now.

        Each is a parameter group of the optimizer.
        """
        return {"actor": self.lr}

    def _generator_settings(self) -> GeneratorSettings:
        return GeneratorSettings(
            backend="vllm" if self.use_vllm else "hf",
            vllm=self.vllm_config,
            model_name=self.model_name,
            stop_sequences=self.stop_texts(),
            max_model_len=self.max_model_len,
            offload_base=self.use_memory_efficient_params,
            seed=self.seed,
        )

    def _build_engine(self) -> LocalEngine:
        groups = [
            {"params": list(self.policy.parameters(role).values()), "lr": lr}
            for role, lr in self.learning_rates().items()
        ]
        return build_engine(
            groups,
            self.lr,
            self.schedule(),
            self.accelerator if self.wrap else None,
            self.optimizer_settings(),
        )

    @property
    def actor(self) -> PeftModel:
        """The PEFT model with this agent's adapter active; all agents on a base share the model."""
        self.policy.set_role(self.policy.role)
        return self.policy.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What steps this agent's trained adapters, a parameter group each.

        Not the argument ``optimizer``, which says what it is.
        """
        return self.engine.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The learning rate's schedule, or None where it is constant."""
        return self.engine.scheduler

    def reinit_optimizers(self, optimizer: OptimizerConfig | None = None) -> None:
        """Reset the optimizer's state and its schedule.

        Args:
            optimizer: The one to reset; None: all. There is one, named ``"optimizer"``.
        """
        name = "optimizer" if optimizer is None else optimizer.name
        require(
            name == "optimizer", f"optimizer {name!r} is unknown; this agent has only 'optimizer'"
        )
        self._replace_engine()

    def _replace_engine(self, state: dict[str, Any] | None = None) -> None:
        """Build a new engine, with an optimizer state if one is given."""
        self.engine.close()
        self.engine = self._build_engine()
        if state is not None:
            self.engine.load_state_dict(state)

    @staticmethod
    def update_lr(
        optimizer: torch.optim.Optimizer,
        lr: float | tuple[float, float],
        accelerator: Accelerator | None = None,
        scheduler_config: CosineLRScheduleConfig | None = None,
    ) -> tuple[Accelerator | None, Any]:
        """Set an optimizer's learning rate and, if configured, start a new schedule on it.

        On an agent's optimizer the rate stays (as the peak of the agent's schedule, if it has one)
        until ``agent.lr`` is changed; clones and resumed runs keep it.

        Args:
            optimizer: The optimizer.
            lr: Learning rate; of a pair, the first is the actor's, the second that of all other
                trained adapters.
            accelerator: Returned as it is.
            scheduler_config: None: no schedule.

        Returns:
            The accelerator, and the scheduler or None.
        """
        actor, others = lr if isinstance(lr, tuple) else (lr, lr)
        set_learning_rate(optimizer, [actor] + [others] * (len(optimizer.param_groups) - 1))
        return accelerator, None if scheduler_config is None else build_schedule(
            optimizer, scheduler_config.to_schedule()
        )

    def use_adapter(self, adapter_name: str) -> None:
        """Act with a role's adapter (``"actor"``, ``"reference"``) until it is changed again.

        Affects ``get_action``, ``test`` and the ``actor`` attribute; ``learn`` trains the actor.

        Raises:
            ValueError: For an unknown role.
        """
        self.policy.set_role(adapter_name)

    @contextlib.contextmanager
    def select_adapter(self, adapter_name: str) -> Iterator[None]:
        """Act with a role's adapter inside the block; with the actor's again after it."""
        self.policy.set_role(adapter_name)
        try:
            yield
        finally:
            self.policy.set_role("actor")

    def set_reference_policy(self, reference_update_tracker: int) -> None:
        """Copy the actor onto the reference if the tracker has advanced past the stored value.

        Args:
            reference_update_tracker: For instance the number of finished epochs.
        """
        if reference_update_tracker <= self.reference_update_tracker:
            return
        self.reference_update_tracker = reference_update_tracker
        if "reference" in self.policy.roles:
            self.policy.copy_role("actor", "reference")
        else:
            warn_once(
                logger,
                "the reference policy stays the base model: without a reference adapter "
                "(use_separate_reference_adapter=False) there is none to move",
            )

    def set_training_mode(self, training: bool) -> None:
        """Record the mode. Forwards run without dropout in both."""
        self.training = training

    def recompile(self) -> None:
        """Compile the training forward with the mode in ``torch_compiler``; None: do not."""
        self.policy.compile(self.torch_compiler)

    def wrap_models(self) -> None:
        """Train over the accelerator's processes again, starting from rank 0's weights.

        The optimizer keeps its state. Without an accelerator nothing changes. Collective, like
        :meth:`unwrap_models`: all processes must call it.
        """
        self._set_wrapped(True)

    def unwrap_models(self) -> None:
        """Detach from the accelerator: plain weights and a plain optimizer with its full state.

        With several processes, ``learn`` needs :meth:`wrap_models` again.
        """
        self._set_wrapped(False)

    def _set_wrapped(self, wrapped: bool) -> None:
        if wrapped == self.wrap:
            return
        state = self.engine.state_dict()
        self.wrap = wrapped
        self._replace_engine(state)

    def clean_up(self) -> None:
        """Free this agent's adapters and optimizer; a second call does nothing.

        When the last agent on a base is cleaned up, its model is plain again, without adapters.
        """
        if "policy" in vars(self):
            self.generator.close()
            self.engine.close()
            self.policy.release()
            for name in ("policy", "generator", "engine"):
                delattr(self, name)

    def clone(self, index: int | None = None, wrap: bool = True) -> Self:
        """A new agent on the same base with this one's adapters, optimizer and hyperparameters.

        Args:
            index: Its place in the population; None: this one's.
            wrap: Whether the copy trains over the accelerator's processes at once; otherwise after
                :meth:`wrap_models`.
        """
        arguments = self.inspect_attributes(self, input_args_only=True)
        arguments |= {
            "actor_network": self.policy.base.model,
            "index": self.index if index is None else index,
            "wrap": wrap,
            "clone": True,
        }
        twin = type(self)(**arguments)
        for role in self.policy.roles:
            copy_adapter(self.policy.parameters(role), twin.policy.parameters(role))
        twin.engine.load_state_dict(self.engine.state_dict())
        if twin.index == self.index:
            twin.rng.set_state(self.rng.get_state())
        self.copy_attributes(self, twin)
        return twin

    @classmethod
    def members_arguments(cls, size: int, given: dict[str, Any]) -> dict[str, Any]:
        """As given, but a vLLM engine that members share has room for an adapter of each.

        Raises:
            ValueError: If ``hp_config`` names what is "auto", which a member's draw would replace.
        """
        config = given.get("vllm_config")
        for name in ("vllm_config", "accelerator", "hp_config"):
            cls.argument_table()[name].check(name, given.get(name))
        for name, _ in (given.get("hp_config") or HyperparameterConfig()).items():
            check_start(name, given.get(name))
        config = config or VLLMConfig()
        if not given.get("use_vllm") or config.max_loras >= size:
            return given
        return {**given, "vllm_config": replace(config, max_loras=size)}

    def saved_arguments(self) -> dict[str, Any]:
        """The constructor's arguments that a checkpoint holds, as they are now."""
        table = self.argument_table()
        arguments = self.inspect_attributes(self, input_args_only=True)
        saved = {name: value for name, value in arguments.items() if table[name].saved}
        if callable(saved.get("optimizer")):  # code, which no checkpoint holds
            del saved["optimizer"]
        return saved
