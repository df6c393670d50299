"""GRPO written out on the functions of ``agilerl.llm``: no agent, no environment, no training loop.

    python examples/grpo_from_scratch.py --steps 60

Read it top to bottom: each block is one arrow of the pipeline

    prompts -> rollout -> rewards -> advantages -> log-probs -> loss -> update

and everything the library adds on top (checkpoints, logging, populations, ...) is left out.

Shapes: B sequences (= P prompts x G completions each) · T tokens of prompt and completion · S = T -
1 action positions (position s predicts token s + 1).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch
from peft import LoraConfig

from agilerl.llm.advantages import compute_advantages
from agilerl.llm.batch import make_batch
from agilerl.llm.config import AdvantageConfig, ForwardConfig, LossConfig, SamplingConfig
from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm.losses import policy_loss, reduction_counts, reduction_weights
from agilerl.llm.plan import split_into_micro_batches
from agilerl.llm.policy import Policy, scatter_actions
from agilerl.llm.prompts import PromptEncoder, fill_template
from agilerl.llm.shared_base import SharedBase
from agilerl.testing import (
    SPELL_BACKWARD_CONVERSATION,
    load_bundled_model,
    spell_backward_correct,
    spell_backward_datasets,
)

PROMPTS = 32
GROUP = 8
MINI_BATCH = 128  # sequences per optimizer step
MICRO_BATCH = 64  # sequences per forward and backward


def main() -> None:  # noqa: PLR0915 - one function on purpose, to be read top to bottom
    """Train for a number of rollouts, printing the reward as it rises."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = torch.Generator().manual_seed(args.seed)

    # ---- The model: a frozen base with two LoRA adapters on it, the actor (trained) and the
    # reference (for the KL).
    model, tokenizer = load_bundled_model()
    lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = Policy(SharedBase.of(model), {"actor": lora, "reference": lora}, seed=args.seed)
    optimizer = torch.optim.AdamW(policy.parameters("actor").values(), lr=5e-4, weight_decay=0.0)
    generator = HFGenerator(policy)

    # ---- The settings, one frozen record per stage.
    sampling = SamplingConfig(
        max_new_tokens=10,
        max_model_len=256,
        eos_token_ids=(model.generation_config.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
        temperature=1.0,
    )
    advantage = AdvantageConfig(group_size=GROUP)
    # "packed": the prompt goes through the model once for its eight completions, in training too,
    # and nothing is padded.
    forward = ForwardConfig(temperature=1.0, layout="packed")
    loss_config = LossConfig(
        loss_type="grpo",
        ratio_level="token",
        clip_band=(0.8, 1.2),
        beta=0.001,
    )

    train, test = spell_backward_datasets(
        train_size=PROMPTS * args.steps, test_size=200, seed=args.seed
    )
    encoder = PromptEncoder(tokenizer)
    before = evaluate(generator, encoder, tokenizer, test, sampling, rng)
    print(f"held-out accuracy before: {before:.3f}")

    for step in range(args.steps):
        started = time.perf_counter()

        # ---- Prompts: questions through the chat template to token ids.
        rows = train[step * PROMPTS : (step + 1) * PROMPTS]
        prompts = encode(encoder, rows["question"])

        # ---- Rollout: every prompt is completed GROUP times at the sampling temperature.
        completions = generator.generate(prompts, GROUP, sampling, rng).token_ids

        # ---- Rewards: one number per completion, from its text.
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        rewards = torch.tensor(
            [
                spell_backward_correct(
                    text, rows["answer"][i // GROUP], rows["question"][i // GROUP]
                )
                for i, text in enumerate(texts)
            ]
        )

        # ---- Batch: prompt + completion per row; the action mask is True where a generated token
        # is predicted.
        sequences, masks = [], []
        for i, completion in enumerate(completions):
            prompt = prompts[i // GROUP]
            sequences.append(torch.cat([prompt, completion]))
            masks.append(torch.arange(len(sequences[-1]) - 1) >= len(prompt) - 1)
        batch = make_batch(sequences, masks)

        # ---- Advantages: each completion relative to the others of its group.
        advantages, _ = compute_advantages(rewards, batch.action_mask, advantage)
        batch = replace(batch, advantages=advantages)

        # ---- Plan: the rows of every optimizer step, and which of them run together.
        mini_batches = [
            split_into_micro_batches(batch, rows, MICRO_BATCH, forward.layout)
            for rows in torch.arange(len(batch)).split(MINI_BATCH)
        ]
        micro_batches = [rows for mini_batch in mini_batches for rows in mini_batch]

        # ---- Log-probs of the rollout: under the policy that made it (old) and under the
        # reference.
        old_logp = policy.frozen_logprobs(batch, "actor", forward, micro_batches)
        ref_logp = policy.frozen_logprobs(batch, "reference", forward, micro_batches)
        batch = replace(batch, old_logp=old_logp, ref_logp=ref_logp)

        # ---- Update: one optimizer step per mini-batch, its gradient accumulated over
        # micro-batches.
        policy.set_role("actor")
        for mini_batch in mini_batches:
            # What a mean divides by is that of the whole mini-batch, so that the micro-batch size
            # changes nothing.
            counts = reduction_counts(batch.action_mask[torch.cat(mini_batch)])
            for rows_now in mini_batch:
                micro = batch.select(rows_now)
                logp = policy.logprobs(micro, forward).logp
                terms = policy_loss(
                    scatter_actions(logp, micro.action_mask),
                    micro.advantages,
                    micro.action_mask,
                    reduction_weights(micro.action_mask, "sequence", counts=counts),
                    loss_config,
                    old_logp=micro.old_logp,
                    ref_logp=micro.ref_logp,
                )
                terms.loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters("actor").values(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        seconds = time.perf_counter() - started
        print(f"step {step + 1:3d}  reward {rewards.mean():.3f}  {seconds:.2f} s")

    after = evaluate(generator, encoder, tokenizer, test, sampling, rng)
    print(f"held-out accuracy after: {after:.3f}")


def encode(encoder: PromptEncoder, questions: list[str]) -> list[torch.Tensor]:
    """Token ids ``(P,)`` of each question's prompt."""
    template = SPELL_BACKWARD_CONVERSATION
    conversations = [fill_template(template, {"question": question}) for question in questions]
    return [prompt["input_ids"][0] for prompt in encoder.encode(conversations)]


def evaluate(
    generator: HFGenerator,
    encoder: PromptEncoder,
    tokenizer,
    test,
    sampling: SamplingConfig,
    rng: torch.Generator,
) -> float:
    """Share of right greedy answers to the held-out questions."""
    greedy = SamplingConfig(**{**vars(sampling), "greedy": True})
    prompts = encode(encoder, test["question"])
    completions = generator.generate(prompts, 1, greedy, rng).token_ids
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rewards = map(spell_backward_correct, texts, test["answer"], test["question"])
    return sum(rewards) / len(texts)


if __name__ == "__main__":
    main()
