"""LLMAlgorithm: an agent that acts, is evaluated, saved and loaded; subclasses add ``learn``."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from agilerl.algorithms.checkpoint.load import load_into
from agilerl.algorithms.checkpoint.rebuild import rebuild
from agilerl.algorithms.checkpoint.save import save
from agilerl.algorithms.core.action_result import action_result, unpadded_prompts
from agilerl.algorithms.core.evaluation import EvaluationStopped, evaluate, scores_of_all_ranks
from agilerl.algorithms.core.lora_agent import LoRAAgent
from agilerl.checks import OPTIONAL_COUNT
from agilerl.distributed import ranks_of
from agilerl.llm.causal_lm import context_length, eos_token_ids
from agilerl.llm.config import ForwardConfig, OptimizerFactory, SamplingConfig
from agilerl.llm.engine.accelerator_config import rank_batch_size
from agilerl.llm.generation import Completions, GenerationRequest, new_token_limit
from agilerl.llm.generation.vllm.config import VLLMConfig
from agilerl.llm.memory.auto_micro_batch import choose_micro_batch_size
from agilerl.llm.memory.out_of_memory import explained_out_of_memory
from agilerl.llm.memory.settings import MemorySettings
from agilerl.typing import Act, ActionResult, ReasoningPrompts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


class LLMAlgorithm(LoRAAgent):
    """Generation, evaluation and checkpoints of an agent; subclasses add ``learn``."""

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
            repeat_prompts: In training, complete each prompt ``group_size`` times; False: once, as
                where ``obs`` holds each prompt ``group_size`` times already. A chunk of
                ``hf_generate_chunk_size`` prompts is equally many sequences either way.

        Returns:
            Per prompt ``(G, T)`` token ids and ``(G, T - 1)`` action masks; unpacks into these two.

        Raises:
            TypeError: If a prompt is no dict with these two tensors.
            ValueError: If there is no prompt, or one is too long for ``max_model_len``.
        """
        return self._answers(self.generation_request(obs, training, repeat_prompts))

    def _answers(self, request: GenerationRequest) -> ActionResult:
        self.generator.sync(self.policy)

        def settings() -> MemorySettings:
            return self.memory_settings(
                prompt_tokens=max(len(prompt) for prompt in request.prompts),
                completion_tokens=max(
                    new_token_limit(prompt, request.sampling) for prompt in request.prompts
                ),
                prompts=len(request.prompts),
                group_size=request.samples_per_prompt,
                hf_generate_chunk_size=request.sampling.chunk_size,
            )

        with explained_out_of_memory("rollout", self.policy.base.model, settings):
            completions = self.generator.generate(
                request.prompts, request.samples_per_prompt, request.sampling, request.rng
            )
        return self.action_result(request, completions)

    def generation_request(
        self,
        obs: Sequence[ReasoningPrompts] | ReasoningPrompts,
        training: bool = True,
        repeat_prompts: bool = True,
    ) -> GenerationRequest:
        """What :meth:`get_action` asks its generator; see there for arguments and errors."""
        prompts = unpadded_prompts(obs)
        sampling = self.sampling_config(training)
        samples = self.group_size if training and repeat_prompts else 1
        if training and not repeat_prompts and sampling.chunk_size is not None:
            sampling = replace(sampling, chunk_size=sampling.chunk_size * self.group_size)
        return GenerationRequest(prompts, samples, sampling, self.rng)

    def action_result(self, request: GenerationRequest, completions: Completions) -> ActionResult:
        """What :meth:`get_action` returns, from what its generator did."""
        return action_result(request, completions, self.pad_token_id)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """Several calls of ``get_action`` with the same weights.

        Within it a prompt that continues an earlier row need not be run again from its start. Used
        where episodes have several turns, and for whole evaluations. May be nested.
        """
        self.generator.sync(self.policy)
        with self.generator.session():
            yield

    def test(self, env: Any, loop: int = 1, *, samples: int | None = None) -> np.ndarray:
        """Evaluate, on the test split or in episodes with fixed seeds.

        Args:
            env: A ``ReasoningGym``, whose training position is untouched; a
                ``SyncMultiTurnVecEnv``, which plays its evaluation seeds; a single multi-turn
                environment, which plays the first ``loop`` evaluation seeds; or any other that
                follows ``agilerl.typing.EvaluableEnv``.
            loop: How many times to go through the split, or the evaluation seeds.
            samples: Answer each prompt so often, sampled as in training; None: once, greedily. An
                environment of several turns takes one answer per prompt: raise ``loop`` there. What
                is sampled depends on the agent's seed and the number of its evaluations, and
                training samples the same whether there was an evaluation or not.

        Returns:
            ``(loop · rows · samples,)`` float32 rewards, one per answer or (the return of an)
            episode; their mean is appended to ``fitness``, and ``total_steps`` to ``steps``. With
            several processes, the rewards of all of them in the order of ranks, so that fitness is
            the same on each. Answers that failed and were dropped are not among them.

        Raises:
            RuntimeError: If more answers failed than the environment's ``max_failure_share``.
            TypeError: If the environment has no ``evaluate``.
            ValueError: If ``loop`` or ``samples`` is not positive.
        """
        OPTIONAL_COUNT("samples", samples)
        ranks = ranks_of(self.accelerator)
        act: Act = partial(self.get_action, training=False)
        if samples is not None:
            seed = random.Random(f"{self.seed} {len(self.fitness)} {ranks.rank}").getrandbits(63)
            act = partial(self._sampled, samples, torch.Generator().manual_seed(seed))
        evaluation = None
        # The adapter is merged once for all answers, and all ranks leave the rollout together.
        with self.rollout(), contextlib.suppress(EvaluationStopped):
            evaluation = evaluate(env, act, loop)
        scores = scores_of_all_ranks(evaluation, ranks)
        self.fitness.append(float(scores.mean()))
        self.steps.append(self.total_steps)
        return scores

    def _sampled(
        self, samples: int, rng: torch.Generator, prompts: Sequence[ReasoningPrompts]
    ) -> ActionResult:
        """``samples`` answers of each prompt; ``rng`` is not that of training."""
        request = self.generation_request(prompts)
        sampling, chunk = request.sampling, request.sampling.chunk_size
        if chunk is not None:  # as many sequences at a time as in training
            sampling = replace(sampling, chunk_size=max(1, chunk * self.group_size // samples))
        return self._answers(
            replace(request, samples_per_prompt=samples, sampling=sampling, rng=rng)
        )

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
            stop_sequences=self.stop_texts(),
            chunk_size=self.hf_generate_chunk_size,
            left_padding=self.calc_position_embeddings,
        )

    def forward_config(self) -> ForwardConfig:
        """How log-probs are computed, from the attributes as they are now."""
        return ForwardConfig(
            temperature=self.temperature,
            recompute_layers=self.gradient_checkpointing,
            offload_activations=self.activation_offload,
            use_position_ids=self.calc_position_embeddings,
            fp32_logits=self.cast_logprobs_to_fp32,
            tile_rows=self.fused_logprobs_chunk_rows or self.fused_loss_chunk_rows,
            fused_layers=self.use_liger_loss,
        )

    def memory_settings(self, **sizes: Any) -> MemorySettings:
        """What decides how much memory a step takes, from the attributes as they are now.

        Args:
            **sizes: Those of the step, ``prompt_tokens`` and ``completion_tokens`` at least.
        """
        names = MemorySettings.__dataclass_fields__.keys() - {"device", "dtype", "layout"}
        own = {name: value for name, value in vars(self).items() if name in names}
        by_tokens = self.micro_batch_tokens is not None
        settings = own | {
            "batch_size": rank_batch_size(self.batch_size, self.accelerator),
            "micro_batch_size_per_gpu": None if by_tokens else self.rank_micro_batch_size(),
            "fused_logprobs_chunk_rows": self.forward_config().tile_rows,
            "optimizer": self.optimizer_settings().kind,
            "device": str(self.policy.device),
            "layout": self.policy.row_layout(self.forward_config()),
        }
        return MemorySettings(**(settings | sizes))

    def choose_micro_batch_size(self, *, several_turns: bool) -> None:
        """Set ``chosen_micro_batch_size`` if it is needed and unknown; then collective.

        Rows are taken to be as long as ``max_model_len`` allows, so that a first batch of short
        ones decides nothing.

        Args:
            several_turns: ``max_output_tokens`` bounds a turn, not what follows the prompt.

        Raises:
            ValueError: If the free memory cannot be read, or the update not be estimated.
        """
        if self.micro_batch_size_per_gpu != "auto" or self.chosen_micro_batch_size is not None:
            return
        model = self.policy.base.model
        longest = self.max_model_len or context_length(model)
        completion = longest if several_turns else self.max_output_tokens or longest
        completion = min(completion, longest - 1)
        settings = self.memory_settings(
            prompt_tokens=longest - completion,
            completion_tokens=completion,
            prompts=-(-rank_batch_size(self.batch_size, self.accelerator) // self.group_size),
            use_vllm=True,  # no rollout is estimated
        )
        self.chosen_micro_batch_size = choose_micro_batch_size(
            model,
            settings,
            self.engine.ranks,
            has_optimizer_state=bool(self.optimizer.state),
        )

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
        """Write a checkpoint directory atomically.

        What it holds: :mod:`agilerl.llm.checkpoint.checkpoint_files`.

        Args:
            path: The directory; an earlier checkpoint there is replaced.
            lora_only: Save adapters only (as PEFT directories); False: the full actor.
            save_optimizer: Also save optimizer and schedule.

        Raises:
            FileExistsError: If ``path`` holds something that is not a checkpoint.
            ValueError: If ``lora_only`` is False and the base model is quantized.
        """
        save(self, Path(path), lora_only=lora_only, save_optimizer=save_optimizer)

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
            path: A checkpoint, or a directory of PEFT's ``save_pretrained``.
            load_optimizer: Also restore optimizer and schedule; warns if the checkpoint has none.
            overwrite_reference_adapter: Start the reference from the checkpoint's actor; False:
                from its reference, if it has one.
            overwrite_critic_adapter: Load the critic too, of an algorithm that has one; False: it
                stays as it is.
            merge_lora_configs: Reconcile a differing LoRA config instead of refusing it: larger
                rank, union of targets.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If the LoRA configs differ, each field listed, or a file is damaged.
        """
        load_into(
            self,
            Path(path),
            load_optimizer=load_optimizer,
            reference_from_actor=overwrite_reference_adapter,
            kept_roles=() if overwrite_critic_adapter else ("critic",),
            merge=merge_lora_configs,
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        accelerator: Accelerator | None = None,
        actor_network: PreTrainedModel | None = None,
        *,
        use_vllm: bool = False,
        vllm_config: VLLMConfig | None = None,
        optimizer: OptimizerFactory | None = None,
    ) -> Self:
        """Rebuild an agent from a checkpoint: weights, optimizer, hyperparameters, history, RNG.

        Args:
            path: The checkpoint.
            device: Where the model shall run.
            accelerator: For distributed training.
            actor_network: The base model, where the checkpoint recorded neither a name to load
                nor the full actor.
            use_vllm: Generate with vLLM. Like the device it is no part of a checkpoint, and an
                agent that was trained with vLLM is loaded without unless this is set.
            vllm_config: How vLLM is run; None: ``VLLMConfig()``.
            optimizer: The function that made the optimizer, if the agent was made with one: no
                checkpoint holds it. None: the AdamW that the agent was saved with.
        """
        given = use_vllm or vllm_config is not None
        process: dict[str, Any] = {"optimizer": optimizer} if optimizer is not None else {}
        process |= {"use_vllm": use_vllm, "vllm_config": vllm_config} if given else {}
        return rebuild(cls, Path(path), device, accelerator, actor_network, **process)
