"""A tool-using task: sums that are answered with a calculator. Runs in seconds on a CPU.

python examples/tool_calculator.py
"""

from __future__ import annotations

import random
from typing import Any

from transformers import PreTrainedTokenizerBase

from agilerl.llm_envs import (
    EVALUATION_SEED_START,
    SyncMultiTurnVecEnv,
    TokenObservationWrapper,
    ToolEnv,
)
from agilerl.testing import byte_tokenizer, calculator


def make_task(seed: int | None) -> dict[str, str]:
    """A question and its answer. Every seed gives another one, so evaluation seeds do too."""
    draw = random.Random(seed)
    a, b, c = (draw.randint(100, 999) for _ in range(3))
    return {"question": f"What is {a} * {b} - {c}?", "answer": str(a * b - c)}


def correct(completion: str, answer: Any, question: str) -> float:
    return float(completion.strip().endswith(answer))


def make_text_env() -> ToolEnv:
    return ToolEnv(
        make_task,
        tools={"calculator": calculator},
        reward_fn=correct,
        max_calls=3,
        call_cost=0.01,
        tool_timeout=5.0,
    )


def play_by_hand() -> None:
    """The text interface, which is all that an environment has to have."""
    env = make_text_env()
    observation, _ = env.reset(seed=7)
    print(f"--- the environment\n{observation}")
    question = observation.splitlines()[-1]
    expression = question.removeprefix("What is ").removesuffix("?")
    replies = (
        # Mistakes come back as text that the model can react to.
        '<tool_call>{"name": "calculate", "arguments": {}}</tool_call>',
        f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}'
        "</tool_call>",
        f"It is {calculator(expression)}",
    )
    for reply in replies:
        observation, reward, terminated, _, _ = env.step(reply)
        print(f"--- the player\n{reply}")
        print(f"--- the environment (reward {reward:g}, over: {terminated})\n{observation}")


def make_env(tokenizer: PreTrainedTokenizerBase) -> TokenObservationWrapper:
    """What training takes, as ``env_factory``: the same environment as token ids."""
    return TokenObservationWrapper(make_text_env(), tokenizer, max_turns=4)


if __name__ == "__main__":
    play_by_hand()

    # For training, pass make_env to finetune_llm_multiturn:
    #   finetune_llm_multiturn([agent], max_turns=4, env_factory=make_env,
    #                          env_config={"tokenizer": tokenizer}, ...)
    # which plays many episodes at a time, two groups of two of them here:
    envs = SyncMultiTurnVecEnv(
        make_env, batch_size=2, group_size=2, env_config={"tokenizer": byte_tokenizer()}
    )
    prompts = envs.reset([0, 1])
    print(f"--- prompts of {[prompt['input_ids'].shape[1] for prompt in prompts]} tokens")
    print(f"evaluation starts with: {make_task(EVALUATION_SEED_START)['question']}")
    envs.close()
