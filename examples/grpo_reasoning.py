"""Finetune a language model on reasoning-gym tasks with GRPO, GSPO or CISPO; show what it learned.

    python examples/grpo_reasoning.py --algorithm cispo --seed 1

A byte-level model of 0.6 million parameters, warmed up until it spells about four words in ten
backward, is trained by reinforcement learning on words it is scored on by reasoning-gym, and
evaluated on held-out words. Written to the output folder: learning curve, checkpoint with the
adapter as a PEFT directory, metrics and sample completions. With --vllm completions are sampled by
a vLLM engine instead of by Hugging Face's model. Ctrl-C ends training early, and with --resume the
same command goes on from there.
"""

from __future__ import annotations

import argparse
import csv
import logging
import shlex
import sys
from pathlib import Path
from typing import Any

import matplotlib
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.llm_envs import ReasoningGym
from agilerl.testing import (
    SPELL_BACKWARD_CONVERSATION,
    bundled_model_path,
    load_bundled_model,
    spell_backward_correct,
    spell_backward_datasets,
)
from agilerl.training.callbacks import Callback, RunProgress
from agilerl.training.train_llm import finetune_llm_reasoning
from agilerl.typing import Evaluation
from agilerl.utils.algo_utils import VLLMConfig

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PROMPTS_PER_STEP = 32
GROUP_SIZE = 8
LORA_RANK = 32
ITERATIONS = 200
# All completions of a rollout at a time.
VLLM = VLLMConfig(max_num_seqs=PROMPTS_PER_STEP * GROUP_SIZE, max_lora_rank=LORA_RANK)

# Class and clip band of each algorithm. GSPO's paper has a far narrower band, for long completions
# and a small learning rate; here it would clip nearly everything. There are two optimizer steps per
# rollout, because with one the ratio is always 1 and the three algorithms are the same.
RECIPES = {
    "grpo": (GRPO, {"clip_coef": 0.2}),
    "gspo": (GSPO, {"clip_coef": (0.8, 1.25)}),
    "cispo": (CISPO, {"clip_coef": (0.0, 5.0)}),
}


class HowItEnded(Callback):
    """Keeps how far the run was when it ended, and why."""

    progress: RunProgress

    def on_end(self, progress: RunProgress) -> None:
        """When the run has ended."""
        self.progress = progress


def main() -> None:
    """Train, and print and save the results."""
    args = parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    output = Path(args.output) / f"{args.algorithm}-seed{args.seed}"
    model, tokenizer = load_bundled_model()
    env = make_env(tokenizer, args.seed)
    vllm = {"use_vllm": True, "vllm_config": VLLM} if args.vllm else {}
    agent = make_agent(args.algorithm, model, tokenizer, args.seed, **vllm)

    before = answer_test_split(agent, env)
    end = HowItEnded()
    finetune_llm_reasoning(
        [agent],
        env=env,
        max_steps=PROMPTS_PER_STEP * args.iterations,
        evaluation_interval=20,
        checkpoint_path=output / "run",
        resume_from=output / "run" if args.resume else None,
        callbacks=[end],
        max_reward=1.0,
        verbose=not args.quiet,
    )
    minutes = end.progress.wall_seconds / 60
    after = answer_test_split(agent, env)

    agent.save_checkpoint(output / "checkpoint")
    plot_learning_curve(output / "run" / "metrics.csv", output / "learning_curve.png", agent.algo)
    print_examples(before, after)
    generator = "vLLM" if args.vllm else "Hugging Face"
    print(
        f"\n{agent.algo}, seed {args.seed}, generation by {generator}: held-out accuracy "
        f"{accuracy(before):.3f} -> {accuracy(after):.3f} "
        f"(+{100 * (accuracy(after) - accuracy(before)):.1f} points) on "
        f"{len(after.questions)} questions, {minutes:.1f} minutes of training"
    )
    if end.progress.stopped_by is not None:
        print(how_to_continue(end.progress.iteration, args.iterations))
    print(
        f"learning curve: {output / 'learning_curve.png'}\n"
        f"adapter:        {output / 'checkpoint' / 'actor'}"
    )
    print(
        "\nUse the adapter with plain transformers and peft:\n\n"
        + usage_command(output / "checkpoint" / "actor")
    )


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", choices=sorted(RECIPES), default="grpo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--iterations", type=int, default=ITERATIONS, help="rollouts of 32 prompts x 8 completions"
    )
    parser.add_argument(
        "--vllm", action="store_true", help="generate with vLLM, which must be installed"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from where this command was stopped"
    )
    parser.add_argument("--output", default="demo_output")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def how_to_continue(iteration: int, iterations: int) -> str:
    """What to say of a run that was stopped early."""
    words = [arg for arg in sys.argv if arg != "--resume"]
    command = shlex.join([sys.executable, *words, "--resume"])
    return f"(stopped after iteration {iteration} of {iterations}; it goes on with: {command})"


def make_env(
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    test_size: int = 400,
    env_class: type[ReasoningGym] = ReasoningGym,
    **settings: Any,
) -> ReasoningGym:
    """The task: words to spell backward, none of the held-out ones among those to train on."""
    train, test = spell_backward_datasets(train_size=16_384, test_size=test_size, seed=seed)
    env = env_class(
        train_dataset=train,
        test_dataset=test,
        tokenizer=tokenizer,
        reward_fn=spell_backward_correct,
        conversation_template=SPELL_BACKWARD_CONVERSATION,
        seed=seed,
        **{"data_batch_size_per_gpu": PROMPTS_PER_STEP, "eval_batch_size": 400, **settings},
    )
    env.name = "spell_backward"
    return env


def make_agent(
    algorithm: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    **settings: Any,
) -> GRPO:
    """An agent with the settings of this demonstration, or others where they are given."""
    agent_class, recipe = RECIPES[algorithm]
    defaults = {
        "lora_config": LoraConfig(
            r=LORA_RANK, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        "batch_size": 128,
        "micro_batch_size_per_gpu": 128,
        "group_size": GROUP_SIZE,
        "lr": 5e-4,
        "beta": 0.0,
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_output_tokens": 10,
        "max_model_len": 256,
        "gradient_checkpointing": False,
    }
    return agent_class(
        actor_network=model,
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        seed=seed,
        **{**defaults, **recipe, **settings},
    )


def answer_test_split(agent: GRPO, env: ReasoningGym) -> Evaluation:
    """Greedy answers to every held-out question."""
    return env.evaluate(lambda prompts: agent.get_action(prompts, training=False))


def accuracy(evaluation: Evaluation) -> float:
    """Share of answers with full marks."""
    return int((evaluation.rewards == 1.0).sum()) / len(evaluation.rewards)


def print_examples(before: Evaluation, after: Evaluation, count: int = 8) -> None:
    """A table of the first held-out questions, before and after training."""
    print(f"\n{'held-out question':<58} {'before':<12} {'after':<12} right answer")
    for i in range(count):
        marked = [
            f"{'+' if run.rewards[i] == 1.0 else '-'} {run.completions[i]:<10}"
            for run in (before, after)
        ]
        question = after.questions[i].replace("\n", " ")
        print(f"{question[:57]:<58} {' '.join(marked)} {after.answers[i]}")


def plot_learning_curve(metrics: Path, image: Path, label: str) -> None:
    """Held-out accuracy and training reward over time, from ``metrics.csv``."""
    with metrics.open() as file:
        rows = list(csv.DictReader(file))
    minutes = [float(row["wall_seconds"]) / 60 for row in rows]
    figure, axes = plt.subplots(figsize=(7, 4))
    trained = [
        (m, float(row["reward_mean"]))
        for m, row in zip(minutes, rows, strict=True)
        if row["reward_mean"]
    ]
    tested = [
        (m, float(row["eval_accuracy"]))
        for m, row in zip(minutes, rows, strict=True)
        if row["eval_accuracy"]
    ]
    axes.plot(*zip(*trained, strict=True), alpha=0.4, label="training reward (sampled)")
    axes.plot(*zip(*tested, strict=True), marker="o", label="held-out accuracy (greedy)")
    axes.set(xlabel="minutes", ylim=(0, 1), title=f"{label} on spell_backward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(image, dpi=120)


def usage_command(adapter: Path) -> str:
    """A shell command that answers one question with the finetuned model, without this library."""
    return f"""{sys.executable} - <<'PYTHON'
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base = "{bundled_model_path()}"
tokenizer = AutoTokenizer.from_pretrained(base)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "{adapter.resolve()}")
question = [{{"role": "user", "content": "Spell this word backward (example: sun -> nus): lemon"}}]
inputs = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = model.generate(**inputs, max_new_tokens=10, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
PYTHON"""


if __name__ == "__main__":
    main()
