"""The demonstration of grpo_reasoning.py on several processes; it goes on where it was stopped.

    torchrun --nproc_per_node 2 examples/grpo_distributed.py --zero-stage 2

Each process answers its share of the prompts; all take one optimizer step together. Started alone,
by plain `python`, the same script trains in one process.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.llm_envs import ReasoningGym
from agilerl.testing import (
    SPELL_BACKWARD_CONVERSATION,
    load_bundled_model,
    spell_backward_correct,
    spell_backward_datasets,
)
from agilerl.training.checkpoint.run_checkpoint import complete_checkpoints
from agilerl.training.train_llm import finetune_llm_reasoning
from agilerl.utils.llm_utils import create_llm_accelerator

PROMPTS_PER_STEP = 32


def main() -> None:
    """Train, and print the results."""
    args = parse_arguments()
    # First of all: environment and agent get the accelerator (None in a single process).
    accelerator = create_llm_accelerator(zero_stage=args.zero_stage)
    processes = 1 if accelerator is None else accelerator.num_processes
    model, tokenizer = load_bundled_model()
    train, test = spell_backward_datasets(train_size=16_384, test_size=400)
    env = ReasoningGym(
        train_dataset=train,
        test_dataset=test,
        tokenizer=tokenizer,
        reward_fn=spell_backward_correct,
        conversation_template=SPELL_BACKWARD_CONVERSATION,
        data_batch_size_per_gpu=PROMPTS_PER_STEP // processes,
        eval_batch_size=400,
        accelerator=accelerator,
    )
    agent = GRPO(
        actor_network=model,
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        lora_config=LoraConfig(
            r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        batch_size=128,  # over all processes
        group_size=8,
        lr=5e-4,
        beta=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_output_tokens=10,
        max_model_len=256,
        gradient_checkpointing=False,
        accelerator=accelerator,
    )
    run = Path(args.output) / "distributed"
    finetune_llm_reasoning(
        [agent],
        env=env,
        max_steps=PROMPTS_PER_STEP * args.iterations,
        evaluation_interval=20,
        checkpoint_steps=20,
        checkpoint_path=run,
        resume_from=run if complete_checkpoints(run) else None,
        verbose=not args.quiet,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        plugin = None if accelerator is None else accelerator.deepspeed_plugin
        stage = "without DeepSpeed" if plugin is None else f"ZeRO stage {plugin.zero_stage}"
        print(
            f"{processes} process(es), {stage}: held-out accuracy "
            f"{agent.fitness[0]:.3f} -> {agent.fitness[-1]:.3f}; run directory: {run}"
        )


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zero-stage", type=int, choices=[0, 1, 2, 3], help="default: as launched")
    parser.add_argument("--iterations", type=int, default=100, help="of the whole run")
    parser.add_argument(
        "--output", default="demo_output", help="a run found in its folder 'distributed' is resumed"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


if __name__ == "__main__":
    main()
