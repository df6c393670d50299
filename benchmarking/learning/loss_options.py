"""Accuracy and entropy of the bundled model trained on spell_backward with options of the loss.

Forty updates on sixteen questions with eight answers each; accuracy is over eight sampled
answers to each of 150 held-out questions, before and after.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarking/learning/loss_options.py --out build/loss.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from agilerl.algorithms import CISPO, GRPO
from agilerl.llm_envs import ReasoningGym
from agilerl.testing import (
    SPELL_BACKWARD_CONVERSATION,
    load_bundled_model,
    spell_backward_correct,
    spell_backward_datasets,
)

ITERATIONS, PROMPTS, HELD_OUT = 40, 16, 150
SETTINGS: dict[str, Any] = {
    "group_size": 8,
    "batch_size": 64,
    "lr": 1e-3,
    "beta": 0.0,
    "max_grad_norm": 1.0,
    "max_output_tokens": 10,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "gradient_checkpointing": False,
}
BAND = {"clip_coef": (0.0, 5.0)}
AGAINST_SAMPLER = BAND | {"importance_anchor": "sampler"}
CASES: dict[str, tuple[type[GRPO], dict[str, Any]]] = {
    "default": (GRPO, {}),
    "entropy_coef 0.001": (GRPO, {"entropy_coef": 0.001}),
    "entropy_coef 0.01": (GRPO, {"entropy_coef": 0.01}),
    "entropy_coef 0.1": (GRPO, {"entropy_coef": 0.1}),
    "top_entropy_quantile 0.5": (GRPO, {"top_entropy_quantile": 0.5}),
    "top_entropy_quantile 0.8": (GRPO, {"top_entropy_quantile": 0.8}),
    "loss_reduction prompt": (GRPO, {"loss_reduction": "prompt"}),
    "adv_norm mean_only": (GRPO, {"adv_norm": "mean_only"}),
    "adv_norm batch_std": (GRPO, {"adv_norm": "batch_std"}),
    "leave_one_out, mean_only": (
        GRPO,
        {"advantage_baseline": "leave_one_out", "adv_norm": "mean_only"},
    ),
    "cispo": (CISPO, BAND),
    "cispo, against the sampler": (CISPO, AGAINST_SAMPLER),
    "cispo, as ScaleRL": (
        CISPO,
        AGAINST_SAMPLER | {"loss_reduction": "prompt", "adv_norm": "batch_std"},
    ),
}


def run(agent_class: type[GRPO], options: dict[str, Any], seed: int) -> dict[str, float]:
    """Train one agent; accuracy before and after, and the entropy of the last update."""
    model, tokenizer = load_bundled_model()
    tokens = {"pad_token_id": tokenizer.pad_token_id, "pad_token": tokenizer.pad_token}
    agent = agent_class(actor_network=model, seed=seed, **tokens, **SETTINGS, **options)
    train, test = spell_backward_datasets(
        train_size=PROMPTS * ITERATIONS, test_size=HELD_OUT, seed=seed
    )
    env = ReasoningGym(
        train_dataset=train,
        test_dataset=test,
        tokenizer=tokenizer,
        reward_fn=spell_backward_correct,
        conversation_template=SPELL_BACKWARD_CONVERSATION,
        data_batch_size_per_gpu=PROMPTS,
        eval_batch_size=HELD_OUT,
    )
    before = accuracy(agent, env)
    prompts, metrics = env.reset(), {}
    for _ in range(ITERATIONS):
        action = agent.get_action(prompts)
        prompts, rewards = env.step(action.completion_ids)
        metrics = agent.learn((*action, rewards), sampling_logps=action.sampling_logps)
    result = {
        "before": before,
        "after": accuracy(agent, env),
        "entropy": metrics["entropy"],
    }
    env.close()
    agent.clean_up()
    return {name: round(value, 4) for name, value in result.items()}


def accuracy(agent: GRPO, env: ReasoningGym) -> float:
    """Share of right answers, sampled."""
    with env.eval_mode():
        prompts = env.reset()
        action = agent.get_action(prompts)
        _, rewards = env.step(action.completion_ids)
    return float(rewards.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for seed in range(args.seeds):
        for name, (agent_class, options) in CASES.items():
            found[name].append(run(agent_class, options, seed))
            print(seed, name, found[name][-1], flush=True)
            text = json.dumps({"settings": SETTINGS, "seeds": found}, indent=1)
            args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
