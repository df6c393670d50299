"""Several rewards with weights, and what became of each. Minutes on a CPU.

    python examples/reward_list.py

The bundled tiny model spells words backward. It is rewarded for the right word, for every letter in
place, for the length of long words, and punished for completions that come near the limit.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from agilerl.algorithms import GRPO
from agilerl.llm_envs import ReasoningGym
from agilerl.rewards import batched_reward, exact_match, format_matches, soft_overlong_penalty
from agilerl.testing import (
    SPELL_BACKWARD_CONVERSATION,
    load_bundled_model,
    spell_backward_datasets,
)
from agilerl.training.train_llm import finetune_llm_reasoning

PROMPTS_PER_STEP = 32
MAX_OUTPUT_TOKENS = 10


@batched_reward
def letters_in_place(completions: list[str], answers: list[str]) -> list[float]:
    """Of all completions at once, as a model on a GPU would."""
    pairs = zip(completions, answers, strict=True)
    return [
        sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer)
        for text, answer in pairs
    ]


def length_of_long_words(completion: str, answer: str) -> float | None:
    """Does not apply to short words."""
    return float(len(completion) == len(answer)) if len(answer) >= 6 else None


REWARDS = {
    "right": exact_match,
    "letters": letters_in_place,
    "length": length_of_long_words,
    "lower_case": format_matches("[a-z]+"),
    "overlong": soft_overlong_penalty(max_length=MAX_OUTPUT_TOKENS, cache_length=2),
}
WEIGHTS = {"letters": 0.5, "length": 0.25, "lower_case": 0.1}  # the others have 1


def main(iterations: int, folder: Path) -> None:
    model, tokenizer = load_bundled_model()
    train, test = spell_backward_datasets(train_size=4096, test_size=200)
    env = ReasoningGym(
        train_dataset=train,
        test_dataset=test,
        tokenizer=tokenizer,
        reward_fn=REWARDS,
        reward_weights=WEIGHTS,
        conversation_template=SPELL_BACKWARD_CONVERSATION,
        data_batch_size_per_gpu=PROMPTS_PER_STEP,
    )
    agent = GRPO(
        actor_network=model,
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        batch_size=256,
        group_size=8,
        lr=5e-4,
        beta=0.0,
        max_output_tokens=MAX_OUTPUT_TOKENS,
        gradient_checkpointing=False,
    )
    finetune_llm_reasoning(
        [agent],
        env=env,
        max_steps=PROMPTS_PER_STEP * iterations,
        checkpoint_path=folder,
        max_reward=sum(WEIGHTS.get(name, 1.0) for name in REWARDS if name != "overlong"),
    )
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["reward_mean"]]
    print(f"{'reward':<12}{'weight':>8}{'first':>8}{'last':>8}   (mean of an iteration)")
    for name in REWARDS:
        first, last = (float(row[f"rewards/{name}/mean"]) for row in (rows[0], rows[-1]))
        print(f"{name:<12}{WEIGHTS.get(name, 1.0):>8}{first:>8.2f}{last:>8.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("demo_output/reward_list"))
    arguments = parser.parse_args()
    main(arguments.iterations, arguments.output)
