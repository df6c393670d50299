"""Countdown: make a target out of given numbers, each used once. Two rewards, minutes on a CPU.

    python examples/countdown.py

trains a tiny model that was warmed up to write equations, on three numbers, plus and minus. With a
model and a dataset from the Hugging Face Hub, on one GPU (see docs/recipes.md):

    python examples/countdown.py --model Qwen/Qwen2.5-1.5B-Instruct \
        --dataset Jiayi-Pan/Countdown-Tasks-3to4
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.algorithms import GRPO
from agilerl.llm_envs import ReasoningGym
from agilerl.rewards import format_matches
from agilerl.testing import COUNTDOWN_CONVERSATION, calculator, countdown_model, countdown_rows
from agilerl.training.train_llm import finetune_llm_reasoning

# Every column of the rows can stand in a template, lists and numbers too.
CONVERSATION = [
    {
        "role": "system",
        "content": "Think inside <think> and </think>, then give the equation, without an equals "
        "sign, inside <answer> and </answer>.",
    },
    {
        "role": "user",
        "content": "Using each of the numbers {nums} once, with + - * / and brackets, make an "
        "equation that equals {target}.",
    },
    {"role": "assistant", "content": "<think>"},
]
TINY = {"group_size": 16, "lr": 1e-3, "max_output_tokens": 24, "batch_size": 512}
REAL = {
    "group_size": 8,
    "lr": 2e-5,
    "batch_size": 64,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "max_output_tokens": 1024,
    "max_model_len": 1280,
}


def equation(completion: str, nums: list[int], target: int) -> float:
    """1 if the answer uses exactly the given numbers and equals the target, else 0."""
    answers = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    answer = answers[-1] if answers else ""
    # 3.5 is not a 3 and a 5, and neither powers nor // are allowed.
    if not re.fullmatch(r"[\d\s()+*/-]+", answer) or re.search(r"\*\*|//", answer):
        return 0.0
    if sorted(map(int, re.findall(r"\d+", answer))) != sorted(nums):
        return 0.0
    try:
        return float(abs(calculator(answer) - target) < 1e-6)
    except (ValueError, ZeroDivisionError):
        return 0.0


def main(args: argparse.Namespace) -> None:
    if args.model is None:
        model, tokenizer = countdown_model(args.warm_up_steps)
        template, settings, answer_only = COUNTDOWN_CONVERSATION, TINY, r"<answer>.*</answer>"
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
        template, settings, answer_only = (
            CONVERSATION, REAL, r".*</think>\s*<answer>[^<]*</answer>"
        )  # fmt: skip
    train, test = rows(args)
    env = ReasoningGym(
        train_dataset=train,
        test_dataset=test,
        tokenizer=tokenizer,
        reward_fn={"equation": equation, "format": format_matches(answer_only)},
        reward_weights={"format": 0.1},
        conversation_template=template,
        data_batch_size_per_gpu=args.prompts,
        seed=args.seed,
    )
    env.name = "countdown"
    agent = GRPO(
        actor_network=model,
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        beta=0.0,
        gradient_checkpointing=args.model is not None,
        use_vllm=args.vllm,
        seed=args.seed,
        **settings,
    )
    finetune_llm_reasoning(
        [agent],
        env=env,
        max_steps=args.prompts * args.iterations,
        evaluation_interval=20,
        checkpoint_path=args.output,
        max_reward=1.1,
    )
    for question, completion in shown(agent, env):
        print(f"{question}   {completion}")
    # Both rewards of a right answer: 1 and 0.1 times 1.
    print(f"held-out reward, at most 1.1: {agent.fitness[0]:.3f} -> {agent.fitness[-1]:.3f}")


def rows(args: argparse.Namespace) -> tuple[Any, Any]:
    """To train on, and held out; no task is in both."""
    if args.dataset is not None:
        split = load_dataset(args.dataset, split="train").train_test_split(args.test_rows, seed=0)
        return split["train"], split["test"]
    drawn = countdown_rows(400 + args.test_rows, seed=args.seed)
    return drawn[args.test_rows :], drawn[: args.test_rows]


def shown(agent: GRPO, env: ReasoningGym, count: int = 5) -> list[tuple[str, str]]:
    """Some held-out tasks with the agent's answers."""
    done = env.evaluate(lambda prompts: agent.get_action(prompts, training=False))
    return list(zip(done.questions, done.completions, strict=True))[:count]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="of the Hub, or a folder; none: a tiny model")
    parser.add_argument("--dataset", help="with the columns nums and target; none: drawn")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=32, help="in one iteration")
    parser.add_argument("--test-rows", type=int, default=150)
    parser.add_argument("--warm-up-steps", type=int, default=250, help="of the tiny model")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("demo_output/countdown"))
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_arguments())
