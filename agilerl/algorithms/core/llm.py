"""LLMAlgorithm: an agent over a language model's adapter; a few lines per method onto the core."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from peft import PeftModel

from agilerl.algorithms.checkpoint import save_and_load
from agilerl.algorithms.core.actions import action_result, unpadded_prompts
from agilerl.algorithms.core.arguments import LLMArguments
from agilerl.algorithms.core.build_policy import build_policy
from agilerl.algorithms.core.evaluation import evaluate
from agilerl.algorithms.core.evolvable import EvolvableAlgorithm
from agilerl.algorithms.core.registry import NetworkGroup, OptimizerConfig
from agilerl.checks import warn_once
from agilerl.distributed import ranks_of
from agilerl.llm.adapters import copy_adapter
from agilerl.llm.causal_lm import context_length, eos_token_ids
from agilerl.llm.config import CosineLRScheduleConfig, ForwardConfig, SamplingConfig
from agilerl.llm.engine.build import build_engine
from agilerl.llm.engine.local import LocalEngine, cosine_schedule, set_learning_rate
from agilerl.llm.generation import Generator
from agilerl.llm.generation.build import build_generator
from agilerl.llm.policy import Policy
from agilerl.llm.update import SkippedSteps
from agilerl.typing import ActionResult, ReasoningPrompts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import LoraConfig
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class LLMAlgorithm(LLMArguments, EvolvableAlgorithm):
    """Adapters, generation, evaluation and checkpoints of an agent; subclasses add ``learn``.

    Hyperparameters are plain attributes, read at every call: a changed ``agent.temperature`` or
    ``agent.lr`` takes effect at once.

    Args:
        given: The constructor's arguments by name; ``locals()`` in a subclass's ``__init__``.
    """

    policy: Policy
    generator: Generator
    engine: LocalEngine
    _machinery = ("policy", "generator", "engine", "rng", "skipped_steps", "training")

    def __init__(self, given: Mapping[str, Any]) -> None:
        arguments = self.checked_arguments(given)
        super().__init__(arguments["index"], arguments["hp_config"])
        network = arguments.pop("actor_network")  # it belongs to the shared base
        del arguments["clone"]
        for name, value in arguments.items():
            setattr(self, name, value)
        if self.accelerator is not None:
            self.device = self.accelerator.device
        # Accelerate numbers CPUs, tensors do not.
        self.device = str(self.device).replace("cpu:0", "cpu")
        self.policy = build_policy(self, network, self.adapter_configs, self.learning_rates())
        self.lora_config = self.policy.lora_config
        self.generator = build_generator(self.policy)
        ranks = ranks_of(self.accelerator)
        for role in self.policy.roles:
            ranks.broadcast(list(self.policy.parameters(role).values()))
        self.engine = self._build_engine()
        # Members of a population must explore differently although they share a seed, and so must
        # the processes that one of them is spread over.
        offset = 1_000_003 * self.index + 7_368_787 * ranks.rank
        self.rng = torch.Generator().manual_seed((self.seed + offset) % 2**63)
        self.skipped_steps = SkippedSteps()
        self.training = True
        self.register_network_group(NetworkGroup(eval_network="actor", policy=True))
        self.register_optimizer(OptimizerConfig(name="optimizer", networks=("actor",), lr="lr"))
        if self.torch_compiler is not None:
            self.recompile()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Reached only for what is not there: clean_up took it away.
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

    def _build_engine(self) -> LocalEngine:
        groups = [
            {"params": list(self.policy.parameters(role).values()), "lr": lr}
            for role, lr in self.learning_rates().items()
        ]
        return build_engine(
            groups,
            self.lr,
            self.cosine_lr_schedule_config,
            self.accelerator if self.wrap else None,
        )

    # ---- acting

    def get_action(
        self,
        obs: Sequence[ReasoningPrompts] | ReasoningPrompts,
        training: bool = True,
        repeat_prompts: bool = True,
    ) -> ActionResult:
        """Complete prompts.

        Args:
            obs: Prompt dicts with ``input_ids`` ``(1, P)`` and ``attention_mask`` ``(1, P)``; not
                changed.
            training: Sample; otherwise decode greedily, once per prompt.
            repeat_prompts: In training, complete each prompt ``group_size`` times; False: once.

        Returns:
            Per prompt ``(G, T)`` token ids and ``(G, T - 1)`` action masks; unpacks into these two.

        Raises:
            TypeError: If a prompt is no dict with these two tensors.
            ValueError: If there is no prompt, or one is too long for ``max_model_len``.
        """
        prompts = unpadded_prompts(obs)
        samples = self.group_size if training and repeat_prompts else 1
        self.generator.sync(self.policy)
        completions = self.generator.generate(
            prompts, samples, self.sampling_config(training), self.rng
        )
        return action_result(prompts, completions, samples, self.pad_token_id)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """Several calls of ``get_action`` with the same weights.

        Within it a prompt that continues an earlier row need not be run again from its start. Used
        where episodes have several turns, and for whole evaluations. May be nested.
        """
        self.generator.sync(self.policy)
        with self.generator.session():
            yield

    def test(self, env: Any, loop: int = 1) -> np.ndarray:
        """Evaluate greedily: on the test split, or in episodes with fixed seeds.

        Args:
            env: A ``ReasoningGym``, whose training position is untouched; a
                ``SyncMultiTurnVecEnv``, which plays its evaluation seeds; a single multi-turn
                environment, which plays the seeds 0 to ``loop - 1``; or any other that follows
                ``agilerl.typing.EvaluableEnv``.
            loop: How many times to go through the split, or the evaluation seeds.

        Returns:
            ``(loop · rows,)`` float32 rewards, one per test row or (the return of an) episode;
            their mean is appended to ``fitness``. With several processes, the rewards of all of
            them in the order of ranks, so that fitness is the same on each.

        Raises:
            TypeError: If the environment has no ``evaluate``.
            ValueError: If ``loop`` is not positive.
        """
        ranks = ranks_of(self.accelerator)
        scores = np.concatenate(ranks.gather(evaluate(self, env, loop).numpy()))
        self.fitness.append(float(scores.mean()))
        return scores

    def sampling_config(self, training: bool = True) -> SamplingConfig:
        """How completions are drawn, from the attributes as they are now."""
        model = self.policy.base.model
        return SamplingConfig(
            max_new_tokens=self.max_output_tokens,
            max_model_len=self.max_model_len or context_length(model),
            eos_token_ids=eos_token_ids(model) or (self.pad_token_id,),
            pad_token_id=self.pad_token_id,
            greedy=not training,
            temperature=self.temperature,
            top_k=self.top_k or 0,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_new_tokens=self.min_output_tokens or 0,
            chunk_size=self.hf_generate_chunk_size,
            left_padding=self.calc_position_embeddings,
        )

    def forward_config(self) -> ForwardConfig:
        """How log-probs are computed, from the attributes as they are now."""
        return ForwardConfig(
            temperature=self.temperature,
            recompute_layers=self.gradient_checkpointing,
            use_position_ids=self.calc_position_embeddings,
            fp32_logits=self.cast_logprobs_to_fp32,
            tile_rows=self.fused_logprobs_chunk_rows,
        )

    # ---- networks and optimizer

    @property
    def actor(self) -> PeftModel:
        """The PEFT model with this agent's adapter active; all agents on a base share the model."""
        self.policy.set_role(self.policy.role)
        return self.policy.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW over this agent's trained adapters, a parameter group each."""
        return self.engine.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The cosine schedule, or None."""
        return self.engine.scheduler

    def reinit_optimizers(self, optimizer: OptimizerConfig | None = None) -> None:
        """Start the optimizer (there is one) and its schedule afresh."""
        if optimizer is not None and optimizer.name != "optimizer":
            raise ValueError(f"optimizer {optimizer.name!r} is unknown; this agent has 'optimizer'")
        self._replace_engine()

    def _replace_engine(self, state: dict[str, Any] | None = None) -> None:
        """Build the engine anew, with an optimizer state if there is one."""
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

        On an agent's optimizer it stays, as the peak of the agent's schedule where that has one,
        until ``agent.lr`` is changed; copies and resumed runs have it too.
        Of an actor/critic pair ``lr`` the first is the actor's, the second that of all other
        trained adapters. Returns the accelerator as it is, and the scheduler (None without a
        config).
        """
        actor, others = lr if isinstance(lr, tuple) else (lr, lr)
        set_learning_rate(optimizer, [actor] + [others] * (len(optimizer.param_groups) - 1))
        return accelerator, None if scheduler_config is None else cosine_schedule(
            optimizer, scheduler_config
        )

    def use_adapter(self, adapter_name: str) -> None:
        """Act with a role (``"actor"``, ``"reference"``) until it is changed again.

        Concerns ``get_action``, ``test`` and the ``actor`` attribute; ``learn`` trains the actor.

        Raises:
            ValueError: For an unknown role.
        """
        self.policy.set_role(adapter_name)

    @contextlib.contextmanager
    def select_adapter(self, adapter_name: str) -> Iterator[None]:
        """Within it the agent acts with a role's adapter; with the actor's again afterwards."""
        self.policy.set_role(adapter_name)
        try:
            yield
        finally:
            self.policy.set_role("actor")

    def set_reference_policy(self, reference_update_tracker: int) -> None:
        """Copy the actor onto the reference when the tracker has advanced past the stored value.

        Args:
            reference_update_tracker: For instance the number of finished epochs.
        """
        if reference_update_tracker <= self.reference_update_tracker:
            return
        self.reference_update_tracker = reference_update_tracker
        if self.use_separate_reference_adapter:
            self.policy.copy_role("actor", "reference")
        else:
            warn_once(
                logger,
                "the reference policy stays the base model: with "
                "use_separate_reference_adapter=False there is no adapter to move",
            )

    def set_training_mode(self, training: bool) -> None:
        """Note the mode. The model itself always runs without dropout."""
        self.training = training

    def recompile(self) -> None:
        """Compile the training forward with the mode in ``torch_compiler``; None: do not."""
        self.policy.compile(self.torch_compiler)

    def wrap_models(self) -> None:
        """Train over the accelerator's processes again, from rank 0's weights.

        The optimizer keeps its state; without an accelerator nothing changes. All processes must
        call it, and :meth:`unwrap_models`.
        """
        self._set_wrapped(True)

    def unwrap_models(self) -> None:
        """Take the accelerator's engine down: plain weights, a plain optimizer with its full state.

        ``learn`` needs :meth:`wrap_models` again where there are several processes.
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

        The last agent on a base leaves a plain model without adapters.
        """
        if "policy" in vars(self):
            self.generator.close()
            self.engine.close()
            self.policy.release()
            for name in ("policy", "generator", "engine"):
                delattr(self, name)

    # ---- copies and checkpoints

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

    def saved_arguments(self) -> dict[str, Any]:
        """The constructor's arguments that a checkpoint holds, as they are now."""
        table = self.argument_table()
        arguments = self.inspect_attributes(self, input_args_only=True)
        return {name: value for name, value in arguments.items() if table[name].saved}

    @property
    def last_checkpoint(self) -> str | None:
        """Where this agent was last saved; named by errors that end a run."""
        return self.skipped_steps.last_checkpoint

    @last_checkpoint.setter
    def last_checkpoint(self, path: str | None) -> None:
        self.skipped_steps.last_checkpoint = path

    def save_checkpoint(
        self, path: str | Path, lora_only: bool = True, save_optimizer: bool = True
    ) -> None:
        """Write a checkpoint directory atomically; contents: :mod:`agilerl.llm.checkpoint.grid`.

        Args:
            path: The directory; an earlier checkpoint there is replaced.
            lora_only: Save adapters only (as PEFT directories); False: the full actor.
            save_optimizer: Also save optimizer and schedule.

        Raises:
            FileExistsError: If ``path`` holds something that is not a checkpoint.
        """
        save_and_load.save(self, Path(path), lora_only=lora_only, save_optimizer=save_optimizer)

    def load_checkpoint(
        self,
        path: str | Path,
        load_optimizer: bool = False,
        overwrite_reference_adapter: bool = False,
        overwrite_critic_adapter: bool = True,
        merge_lora_configs: bool = False,
    ) -> None:
        """Load weights into this agent; its hyperparameters stay as they are.

        Args:
            path: A checkpoint of any cell of the grid.
            load_optimizer: Also restore optimizer and schedule; warns if the checkpoint has none.
            overwrite_reference_adapter: Start the reference from the checkpoint's actor; False:
                from its reference, if it has one.
            overwrite_critic_adapter: No effect: these agents have no critic.
            merge_lora_configs: Reconcile a differing LoRA config instead of refusing it: larger
                rank, union of targets.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If the LoRA configs differ, each field listed, or a file is damaged.
        """
        save_and_load.load_into(
            self,
            Path(path),
            load_optimizer=load_optimizer,
            reference_from_actor=overwrite_reference_adapter,
            merge=merge_lora_configs,
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        accelerator: Accelerator | None = None,
        actor_network: PreTrainedModel | None = None,
    ) -> Self:
        """Rebuild an agent from a checkpoint: weights, optimizer, hyperparameters, history, RNG.

        Args:
            path: The checkpoint.
            device: Where the model shall run.
            accelerator: For distributed training.
            actor_network: The base model, where the checkpoint recorded neither a name to load
                nor the full actor.
        """
        return save_and_load.rebuild(cls, Path(path), device, accelerator, actor_network)
