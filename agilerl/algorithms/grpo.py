"""GRPO: group-relative policy optimization of a language model's LoRA adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from agilerl.algorithms.core.grpo_arguments import GRPOArguments
from agilerl.algorithms.core.learn_inputs import LearnInputs, training_batch
from agilerl.algorithms.core.llm_algorithm import LLMAlgorithm
from agilerl.algorithms.core.registry import HyperparameterConfig
from agilerl.checks import require, warn
from agilerl.distributed import ranks_of
from agilerl.llm.batch import TrainBatch
from agilerl.llm.config import (
    AdvNorm,
    Baseline,
    CosineLRScheduleConfig,
    ImportanceAnchor,
    ImportanceCorrection,
    LossType,
    OptimizerFactory,
    RatioLevel,
    Reduction,
    SamplingConfig,
    ScheduleKind,
)
from agilerl.llm.generation.vllm.config import VLLMConfig
from agilerl.llm.losses import policy_objective
from agilerl.llm.memory.out_of_memory import explained_out_of_memory
from agilerl.llm.memory.settings import MemorySettings
from agilerl.llm.metrics import batch_metrics
from agilerl.llm.update import run_update
from agilerl.typing import ExperiencesType

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel


class GRPO(GRPOArguments, LLMAlgorithm):
    """Group Relative Policy Optimization, https://arxiv.org/abs/2402.03300.

    Each prompt is completed ``group_size`` times; a completion's advantage is its reward relative
    to its group. ``loss_type`` selects the objective: ``"grpo"`` (clipped surrogate with a ratio
    per token), ``"gspo"`` (the same with one ratio per trajectory) or ``"cispo"`` (clamped,
    detached ratio times log-prob).

    Args:
        pad_token_id: Id of the padding token; may be that of the end-of-sequence token.
        pad_token: The same token as text.
        model_name: Name or path for ``AutoModelForCausalLM.from_pretrained``, if ``actor_network``
            is not given.
        actor_network: A causal language model. It is frozen, and several agents may be given the
            same object and share it. The LoRA adapter of a PeftModel is removed from it: actor and
            reference start from that adapter.
        model_config: Keyword arguments for ``from_pretrained``.
        hp_config: Hyperparameters that evolution may mutate, with their limits: of ``lr``,
            ``beta``, ``clip_coef``, ``group_size``, ``batch_size``, ``micro_batch_size_per_gpu``,
            ``update_epochs``, ``temperature``, ``max_grad_norm``, ``adv_clip_range``,
            ``entropy_coef``, ``vllm_importance_sampling_cap`` and ``weight_decay``.
        index: Place in a population.
        batch_size: Sequences per optimizer step, over all processes: a multiple of their number.
        beta: Weight of the KL penalty towards the reference policy; with 0 the reference forward is
            skipped.
        lr: Learning rate; see ``lr_schedule``.
        clip_coef: c clips the ratio to ``[1 - c, 1 + c]``; a tuple is the absolute band
            ``(lo, hi)``. For CISPO use ``(0.0, 5.0)``: a positive lower bound raises the weight of
            tokens that have become less likely.
        dual_clip: c > 1: where the advantage is negative, a token's loss is at most c times its
            magnitude; None: off. Not for cispo.
        max_grad_norm: Norm to which gradients are clipped.
        update_epochs: Passes over each batch of rollouts.
        group_size: Completions per prompt, at least 2: advantages are relative to the group.
        temperature: Sampling temperature; training uses the same scaled distribution.
        repetition_penalty: 1.0: off.
        top_p: Nucleus sampling; 1.0: off.
        top_k: Number of most likely tokens to sample from; 0 or None: off.
        min_p: Lowest probability of a token, relative to the most likely one; 0.0: off.
        use_memory_efficient_params: Move the base to host memory during rollouts of a vLLM engine
            that sleeps otherwise.
        calc_position_embeddings: Pass position ids to the model. False for models that take none:
            then only prompts of equal length are batched.
        micro_batch_size_per_gpu: Sequences per forward and backward of a process; None: its share
            of ``batch_size``, over the accelerator's gradient accumulation steps; "auto": that
            share or the largest power of two below it that by estimate fits the memory that is
            free at the first ``learn``, for rows as long as ``max_model_len`` allows, the smallest
            of all processes. Clones and checkpoints keep the number. Refused with ZeRO 3.
        max_output_tokens: Longest completion, in tokens; None: up to ``max_model_len``.
        min_output_tokens: No end of sequence before this many tokens.
        max_model_len: Longest row of prompt and completion, in tokens; None: what the model's
            config allows.
        hf_generate_chunk_size: Prompts generated at a time, each with its whole group; None: as
            many as make 256 sequences. Evaluation decodes one sequence per prompt.
        lora_config: The adapter; None: rank 16 on every linear layer but the head.
        cosine_lr_schedule_config: Warm-up and cosine decay, advanced by one per ``learn``; the same
            as ``lr_schedule="cosine"``.
        accelerator: Trains over its processes: by summing gradients, or with its DeepSpeed plugin's
            ZeRO stage 0, 1, 2 or 3. It also decides the device. None: a single process.
        device: Where the model runs, without an accelerator.
        wrap: Train over the accelerator's processes from the start; False: only after
            :meth:`wrap_models`.
        clone: Set by ``clone()``: warnings about arguments are not repeated.
        use_vllm: Generate with vLLM instead of the training model; see docs/vllm.md.
        vllm_config: How vLLM is run; None: ``VLLMConfig()``.
        seed: Seeds adapter initialisation, sampling and mini-batch order.
        gradient_checkpointing: Recompute layers in backward: less memory, more time.
        torch_compiler: Mode of ``torch.compile`` for the training forward, e.g. ``"default"``;
            None: off.
        use_liger_loss: Run updates with Liger's RMSNorm, rotary embedding and SwiGLU, on a GPU with
            liger-kernel; elsewhere no effect, as the log says. The loss is the same with and
            without. See docs/memory.md.
        use_kl_advantage_shaping: Put the KL into the advantages instead of the loss.
        adv_norm: What advantages are divided by: ``"mean_std"`` the std of the group,
            ``"mean_only"`` nothing, ``"batch_std"`` the std of all returns of the batch.
        advantage_baseline: What is subtracted from a return: ``"group_mean"``, or
            ``"leave_one_out"``, the mean of the group's others.
        loss_type: ``"grpo"``, ``"gspo"`` or ``"cispo"``.
        importance_sampling_level: Unit over which the log-ratio is averaged: ``"token"``,
            ``"turn"`` or ``"trajectory"``; None: trajectory for gspo, else token.
        advantage_granularity: Unit that advantages are computed for: ``"trajectory"``, ``"turn"``,
            or ``"auto"``: turn if the ratio is per turn, else trajectory.
        action_granularity: Deprecated alias of ``advantage_granularity``.
        use_separate_reference_adapter: Keep the reference policy as an adapter of its own, which
            :meth:`set_reference_policy` updates; False: the reference is the base model without
            adapter, which never changes.
        whiten_advantages: Normalise advantages to zero mean and unit std over all trained tokens.
        adv_clip_range: Clamp advantages to ± this; None: off.
        filter_zero_adv: Leave out tokens with ``|advantage| <= adv_filter_eps``: of the loss, the
            KL and their normalisers.
        adv_filter_eps: See ``filter_zero_adv``.
        reduce_memory_peak: No effect: see ``micro_batch_size_per_gpu``.
        use_fused_linear_logprobs: No effect: log-probs are always computed in tiles.
        cast_logprobs_to_fp32: Compute the log-softmax over the vocabulary in float32.
        fused_logprobs_chunk_rows: Tokens per logit tile; None: chosen by the vocabulary's size.
        quantization_config: A ``transformers.BitsAndBytesConfig``, or a dict of its arguments, with
            which ``model_name`` is loaded in 4 or 8 bits, but for its head; needs bitsandbytes. An
            ``actor_network`` may be quantized already. See docs/memory.md.
        activation_offload: Keep in host memory what training forwards keep for backward: less
            memory of the accelerator, more transfers. No effect on a CPU. See docs/memory.md.
        lora_target_scope: Confine adapters to modules under this path, e.g. ``"language_model"``.
        fused_loss_chunk_rows: Another name of ``fused_logprobs_chunk_rows``.
        vllm_importance_sampling_correction: Weight tokens by the ratio of the trainer's to the
            sampler's probability, where ``learn`` is given the sampler's log-probs.
        vllm_importance_sampling_cap: Upper bound of that weight, or with ``"geometric_mask"`` of
            its geometric mean, for which 2.0 is far too wide; ``float("inf")``: none.
        importance_correction: What the bounds do: ``"token_truncate"`` lowers the weight of a token
            to the cap, ``"token_mask"`` drops tokens outside the bounds, ``"geometric_mask"``
            sequences whose geometric mean is outside, without a bound for the others' weights.
            ``"sequence_truncate"`` and ``"sequence_mask"`` weight a sequence by the product of its
            tokens' weights.
        importance_floor: Lower bound, for the masks; None: 0.
        importance_anchor: Whose log-probs ratios are against: ``"old"``, the policy before the
            update, or ``"sampler"``, those that the sampler reported: then there is nothing to
            correct, and the pass that computes old log-probs is spared.
        use_sequence_packing: Cut micro-batches of equal numbers of tokens, of about
            ``micro_batch_size_per_gpu`` sequences each; with several processes also exchange the
            rows of each optimizer step among them, so that all run about as many tokens. (Rows run
            without padding wherever that is exact, whether this is set or not; see docs/memory.md.)
        loss_reduction: What the loss is averaged over: ``"sequence"`` (the mean over sequences of
            each one's mean), ``"token"`` (the mean over all tokens), ``"constant"`` (divided by
            sequences times ``max_output_tokens``), ``"sum"`` or ``"prompt"`` (the mean over prompts
            of the mean over all tokens of their completions); None: token for cispo, else sequence.
        entropy_coef: Weight of the entropy bonus.
        top_entropy_quantile: Share of the tokens of a mini-batch that are not trained, those with
            least entropy: 0.8 keeps a fifth (0.2 in TRL); None: all are trained. KL and entropy
            bonus are of all tokens. Takes a forward over the first mini-batch more, and over rows
            without an advantage.
        stop_sequences: Texts that end a completion, such as ``["</answer>"]``, or one; the token
            that completes a text is the completion's last. Only generated text is searched, with
            special tokens as their text, from token ``min_output_tokens + 1`` on. The model's
            tokenizer must lie beside it (see ``model_name``). None: only the end of sequence.
        mask_truncated_completions: Mask completions that were cut off by their length, and
            truncated episodes: their tokens add nothing to the loss, but still count in what it is
            divided by, and their rewards in their groups' means and stds.
        optimizer: ``"adamw"``; ``"adamw_8bit"``, whose moments take a quarter of the memory and
            which needs bitsandbytes; or a function ``(parameter_groups, lr) ->
            torch.optim.Optimizer``, such as ``torch.optim.SGD``. With ZeRO only AdamW. The
            attribute of this name is torch's optimizer.
        weight_decay: Decoupled weight decay of AdamW, a share of ``lr``.
        adam_betas: AdamW's decay rates of the means of the gradient and of its square.
        lr_schedule: ``"constant"``, or after the warm-up ``"linear"`` or ``"cosine"`` decay to
            zero; one step of the schedule per ``learn``. None: ``cosine_lr_schedule_config``
            decides, or constant.
        lr_schedule_steps: Calls of ``learn`` until the learning rate is zero, warm-up included.
        warmup_steps: Calls of ``learn`` in which the learning rate rises linearly to ``lr``; below
            1 a share of ``lr_schedule_steps``.
        micro_batch_tokens: Most tokens per forward and backward of a process, in place of
            ``micro_batch_size_per_gpu``; a prompt counts once for its completions. A longer
            sequence runs alone.

    Raises:
        ValueError: For a value out of range, named with what is allowed.
        TypeError: For a value of a wrong type.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the public contract: flat keywords, each documented
        self,
        pad_token_id: int,
        pad_token: str,
        model_name: str | None = None,
        actor_network: PreTrainedModel | PeftModel | None = None,
        model_config: dict[str, Any] | None = None,
        hp_config: HyperparameterConfig | None = None,
        index: int = 0,
        batch_size: int = 16,
        beta: float = 0.001,
        lr: float = 5e-7,
        clip_coef: float | tuple[float, float] = 0.2,
        max_grad_norm: float = 0.1,
        update_epochs: int = 1,
        group_size: int = 8,
        temperature: float = 0.9,
        repetition_penalty: float = 1.0,
        top_p: float = 0.95,
        top_k: int | None = 50,
        min_p: float = 0.0,
        use_memory_efficient_params: bool = True,
        calc_position_embeddings: bool = True,
        micro_batch_size_per_gpu: int | Literal["auto"] | None = None,
        max_output_tokens: int | None = None,
        min_output_tokens: int | None = None,
        max_model_len: int | None = 1024,
        hf_generate_chunk_size: int | None = None,
        lora_config: LoraConfig | None = None,
        cosine_lr_schedule_config: CosineLRScheduleConfig | None = None,
        accelerator: Accelerator | None = None,
        device: str | torch.device = "cpu",
        wrap: bool = True,
        clone: bool = False,
        use_vllm: bool = False,
        vllm_config: VLLMConfig | None = None,
        seed: int = 42,
        gradient_checkpointing: bool = True,
        torch_compiler: str | None = None,
        use_liger_loss: bool = False,
        use_kl_advantage_shaping: bool = False,
        adv_norm: AdvNorm = "mean_std",
        loss_type: LossType = "grpo",
        importance_sampling_level: RatioLevel | None = None,
        advantage_granularity: str = "auto",
        action_granularity: str | None = None,
        use_separate_reference_adapter: bool = True,
        whiten_advantages: bool = False,
        adv_clip_range: float | None = None,
        filter_zero_adv: bool = False,
        adv_filter_eps: float = 0.0,
        reduce_memory_peak: bool = False,
        use_fused_linear_logprobs: bool = False,
        cast_logprobs_to_fp32: bool = True,
        fused_logprobs_chunk_rows: int | None = None,
        quantization_config: Any = None,
        activation_offload: bool = False,
        lora_target_scope: str | None = None,
        fused_loss_chunk_rows: int | None = None,
        vllm_importance_sampling_correction: bool = True,
        vllm_importance_sampling_cap: float = 2.0,
        use_sequence_packing: bool = False,
        *,
        loss_reduction: Reduction | None = None,
        stop_sequences: str | Sequence[str] | None = None,
        mask_truncated_completions: bool = False,
        importance_anchor: ImportanceAnchor = "old",
        importance_correction: ImportanceCorrection = "token_truncate",
        importance_floor: float | None = None,
        dual_clip: float | None = None,
        advantage_baseline: Baseline = "group_mean",
        entropy_coef: float = 0.0,
        top_entropy_quantile: float | None = None,
        optimizer: Literal["adamw", "adamw_8bit"] | OptimizerFactory = "adamw",
        weight_decay: float = 0.0,
        adam_betas: tuple[float, float] = (0.9, 0.999),
        lr_schedule: ScheduleKind | None = None,
        lr_schedule_steps: int | None = None,
        warmup_steps: float = 0,
        micro_batch_tokens: int | None = None,
    ) -> None:
        super().__init__(locals())
        if action_granularity is not None:
            warn("action_granularity is deprecated; use advantage_granularity", DeprecationWarning)
            self.advantage_granularity, self.action_granularity = action_granularity, None

    def learn(
        self,
        experiences: ExperiencesType,
        turn_ids: Sequence[torch.Tensor] | torch.Tensor | None = None,
        sampling_logps: Sequence[torch.Tensor | None] | None = None,
        *,
        trajectory_ids: Sequence[int] | torch.Tensor | None = None,
        sample_mask: torch.Tensor | Sequence[Any] | None = None,
        truncated: torch.Tensor | Sequence[Any] | None = None,
    ) -> dict[str, float]:
        """Update the actor on whole groups of completions.

        Args:
            experiences: ``(completion_ids, action_masks, rewards)`` as ``get_action`` and an
                environment give them; rewards ``(P, G)``, ``(B,)``, or per turn ``(B, U)``.
            turn_ids: ``(B, S)`` turn of each action, -1 elsewhere; for turn-level advantages and
                ratios.
            sampling_logps: Per row, the sampler's log-probs of the generated tokens, of the
                temperature-scaled distribution before top-p, top-k and min-p; corrects for a
                sampler that differs from the trainer. None: no correction, and refused with
                ``importance_anchor="sampler"``.
            trajectory_ids: ``(B,)``, the trajectory that each row belongs to, counted from 0 in the
                order of ``rewards``: an episode whose window slid gives several rows. They share
                the trajectory's advantage, and "sequence" means count the trajectory once; a
                ratio at "trajectory" level is pooled over a row. None: one row each.
            sample_mask: Bool, ``(P, G)`` or flat, one of each trajectory: False leaves it out, as
                if its rows were not in the batch, of its group's mean and std too. Its reward may
                be anything. A group with fewer than two left has no advantages; if all are left
                out, on all processes, the weights stay, and a warning says so. None: all count.
            truncated: Bool, shaped as ``sample_mask``: True for trajectories that were cut off,
                such as ``get_action(...).truncated``. Read with ``mask_truncated_completions``
                only, which needs it.

        Returns:
            ``mean_loss``, ``mean_kl`` (nan with ``beta=0``, which spares the reference pass),
            ``clip_fraction``, ``entropy``, ``grad_norm``, ``ratio_mean``, ``ratio_max``,
            ``advantage_mean``, ``advantage_std``, ``completion_length`` (generated tokens),
            ``zero_variance_groups``, ``skipped_steps``, ``lr`` (the actor's, with which this call
            stepped), and with a correction ``importance_weight_mean``, ``importance_weight_max``,
            ``importance_weight_capped`` (the share of weights that the bounds change),
            ``importance_weight_nonfinite`` (the share of weights that are inf or nan) and
            ``sampler_kl``, the KL divergence in nats from the sampler's policy to the trainer's:
            the mean over tokens of Schulman's k3, in which those that are not finite count as 0.
            With ``importance_anchor="sampler"`` instead of these ``sampler_kl`` and
            ``ratio_nonfinite``, the share of tokens left out because the sampler's log-probs are
            not finite; with ``dual_clip`` also ``dual_clip_fraction``, the share at its bound; with
            ``top_entropy_quantile`` also ``top_entropy_share``, that of the tokens kept.
            Ratio, entropy, clipping and what is measured of the sampler are over the rows that
            were run: those whose advantage is not zero, or all with a KL penalty or entropy bonus.

        Raises:
            TypeError: If ``sample_mask`` or ``truncated`` is not of True and False.
            ValueError: If shapes disagree, groups are incomplete, or a reward is not finite; if
                ``truncated`` or a completion's ``sampling_logps`` are needed and None; if
                ``micro_batch_size_per_gpu`` is "auto" and memory cannot be estimated.
            RuntimeError: Within :meth:`rollout`; or if there are several processes, and the agent
                is not wrapped.
            NonFiniteUpdateError: If three optimizer steps in a row had a non-finite loss or
                gradient.
        """
        self._require_ready(turn_ids)
        given = LearnInputs(
            experiences, turn_ids, sampling_logps, trajectory_ids, sample_mask, truncated
        )
        ranks = self.engine.ranks
        batch, equal_groups = training_batch(given, self.batch_config(), ranks, self.policy.device)
        self.engine.set_lr(list(self.learning_rates().values()))
        self.engine.set_adamw(self.optimizer_settings())
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.choose_micro_batch_size(several_turns=turn_ids is not None)
        with explained_out_of_memory(
            "update", self.policy.base.model, lambda: self._sizes_of(batch)
        ):
            metrics = run_update(
                self.policy,
                self.engine,
                batch,
                policy_objective(self.loss_config()),
                self.forward_config(),
                self.update_config(),
                self.rng,
                self.skipped_steps,
            )
        self.engine.advance_schedule()
        measured = batch_metrics(batch, equal_groups, ranks)
        return {**metrics.result(), **measured, "lr": lr}

    def _sizes_of(self, batch: TrainBatch) -> MemorySettings:
        """What an update on a batch is estimated by: as if all rows were as long as the longest."""
        return self.memory_settings(
            prompt_tokens=int(batch.prompt_lengths.max()),
            completion_tokens=max(1, int((batch.lengths - batch.prompt_lengths).max())),
            prompts=-(-len(batch) // self.group_size),
        )

    def sampling_config(self, training: bool = True) -> SamplingConfig:
        """How completions are drawn, from the attributes as they are now.

        With log-probs where ratios are against them, and where a correction needs them: a
        generator that is the trainer's own model leaves nothing to correct.
        """
        correct = self.vllm_importance_sampling_correction and self.generator.differs_from_trainer
        wanted = correct or self.importance_anchor == "sampler"
        return replace(super().sampling_config(training), return_logps=training and wanted)

    def _require_ready(self, turn_ids: Any) -> None:
        if self.policy.base.in_rollout:
            raise RuntimeError("learn was called within agent.rollout(); leave that first")
        require(
            turn_ids is not None or self.loss_config().ratio_level != "turn",
            "turn_ids is None, but importance_sampling_level is 'turn'; pass the turn of each "
            "action to learn()",
        )
        require(
            self.wrap or ranks_of(self.accelerator).world_size == 1,
            "this agent is not wrapped, so each process would learn on its own; call "
            "agent.wrap_models() on all of them first",
            RuntimeError,
        )
