"""Rebuild the bundled model: a tiny Qwen2, taught to spell short words backward, but not too well.

Plain supervised training on reasoning-gym's `spell_backward`, stopped where about two held-out
words in five come out right: reinforcement learning then has something to build on and much left
to gain. Nothing is downloaded; the same seed on the same kind of machine gives the same weights.

    python scripts/make_bundled_model.py

takes a few minutes on two CPU cores and logs the accuracies that it writes into the model card.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from warm_up import Batch, Supervised, make_batch, save, start

from agilerl.llm.prompts import PromptEncoder, fill_template
from agilerl.testing import (
    SPELL_BACKWARD_CONVERSATION,
    bundled_model_path,
    byte_tokenizer,
    spell_backward_correct,
    spell_backward_datasets,
    spell_backward_reward,
    tiny_model,
)
from agilerl.testing.tasks import MAX_WORD_LEN, MIN_WORD_LEN
from agilerl.testing.tokenizer import TURN_END_TOKEN

logger = logging.getLogger("make_bundled_model")

TRAIN_SIZE = 40_000
HELD_OUT_SIZE = 1_600
"""More than the 400 that examples hold out, so that the stop is not decided by chance."""
ROWS = 64
"""Questions in one training step."""
LR = 2e-3
RAMP_STEPS = 20
MAX_STEPS = 400
EVAL_BELOW_LOSS = 0.6
EVAL_EVERY = 2
"""Steps between evaluations once the loss is low: the accuracy takes off within a few dozen."""
START = 0.39
"""Training stops at the first greedy held-out accuracy from here on."""
LIMIT = 0.43
"""An accuracy that jumps past this is an error."""

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# A tiny Qwen2 that half knows how to spell words backward

A starting point for reinforcement learning on a CPU: demos, tests and documentation of `agilerl`
use it. It is good for nothing else.

* **Model**: Qwen2, {layers} layers, hidden size {hidden}, tied embeddings, float32,
  {parameters:,} parameters.
* **Tokenizer**: one id per byte (0 to 255), `<|pad|>`, `<|im_start|>`, `<|im_end|>` and
  `<|endoftext|>`. The chat template is ChatML without a default system message; `<|im_end|>`
  ends an answer.
* **Task**: reasoning-gym's `spell_backward`, words of {shortest} to {longest} letters. The user's
  message is the question as it is, the answer is the reversed word.
* **Training**: supervised, {steps} steps of {rows} questions, AdamW at {lr}, loss on the answer and
  the end of the turn. It was stopped on purpose at a greedy held-out accuracy of about 0.40.
  One word in eight is held out (`agilerl.testing.tasks.is_held_out`): none of these was seen.
* **Made by** `scripts/make_bundled_model.py --seed {seed}`: random initial weights, no other data.
* **Licence**: Apache-2.0.

| questions | accuracy | mean reward |
|---|---|---|
{results}

The {held_out:,} held-out words decided where the training stopped. The reward is reasoning-gym's
`score_answer`, which gives part of the mark for letters in place; the accuracy counts full marks.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.testing import bundled_model_path

model = AutoModelForCausalLM.from_pretrained(bundled_model_path())
tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
```
"""


def main() -> None:
    """Train, measure and save."""
    args = start(__doc__.splitlines()[0], bundled_model_path())

    tokenizer = byte_tokenizer()
    model = tiny_model(
        hidden_size=128, layers=4, seed=args.seed, intermediate_size=256, initializer_range=0.02
    )
    train, held_out = spell_backward_datasets(TRAIN_SIZE, HELD_OUT_SIZE, seed=args.seed)
    steps = warm_up(model, tokenizer, train, held_out)
    results = measure(model, tokenizer, train, held_out)
    save(model, tokenizer, card(model, results, steps, args.seed), args.output)


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, train: Dataset, held_out: Dataset
) -> int:
    """Train in place until the greedy accuracy on ``held_out`` reaches ``START``.

    Returns:
        The number of training steps.

    Raises:
        RuntimeError: The accuracy never got there, or jumped past ``LIMIT``.
    """
    training = Supervised(model, LR, lambda step: min(1.0, (step + 1) / RAMP_STEPS))
    for step, batch in enumerate(batches(tokenizer, train), start=1):
        loss = training.step(batch)
        if step == MAX_STEPS:
            break
        if step % EVAL_EVERY or loss > EVAL_BELOW_LOSS:
            continue
        accuracy, _ = evaluate(model, tokenizer, held_out)
        logger.info("step %d: loss %.3f, held-out accuracy %.3f", step, loss, accuracy)
        if accuracy > LIMIT:
            raise RuntimeError(f"accuracy jumped to {accuracy:.3f}, past {LIMIT}; try another seed")
        if accuracy >= START:
            return step
    raise RuntimeError(f"accuracy is below {START} after {MAX_STEPS} steps; try another seed")


def batches(tokenizer: PreTrainedTokenizerFast, train: Dataset) -> Iterator[Batch]:
    """Yield shuffled batches of ``ROWS`` questions with their answers, without end."""
    while True:
        order = torch.randperm(len(train)).tolist()
        for at in range(0, len(order) - ROWS + 1, ROWS):
            yield encode(tokenizer, train.select(order[at : at + ROWS]))


def encode(tokenizer: PreTrainedTokenizerFast, rows: Dataset) -> Batch:
    """Turn rows into a batch whose labels are the answers and the ends of the turns only."""
    prompts = tokenizer(render(tokenizer, rows)).input_ids
    answers = tokenizer([answer + TURN_END_TOKEN for answer in rows["answer"]]).input_ids
    return make_batch(
        tokenizer,
        [
            (prompt + answer, [False] * len(prompt) + [True] * len(answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
    )


def render(tokenizer: PreTrainedTokenizerFast, rows: Dataset) -> list[str]:
    """Write the prompts just as `ReasoningGym` will."""
    encoder = PromptEncoder(tokenizer)
    return [
        encoder.render(fill_template(SPELL_BACKWARD_CONVERSATION, {"question": question}))
        for question in rows["question"]
    ]


@torch.no_grad()
def evaluate(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Dataset, samples: int = 0
) -> tuple[float, float]:
    """Return the mean accuracy and the mean reward over ``rows``.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        rows: Questions and answers.
        samples: 0 for greedy decoding, else the answers to draw at temperature 1 per question.
    """
    model.eval()
    inputs = tokenizer(render(tokenizer, rows), return_tensors="pt", padding=True)
    how = {"num_return_sequences": samples, "top_k": 0} if samples else {}
    outputs = model.generate(
        **inputs, max_new_tokens=MAX_WORD_LEN + 2, do_sample=samples > 0, **how
    )
    answers = outputs[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    keys = [row for row in rows for _ in range(max(samples, 1))]
    pairs = list(zip(texts, keys, strict=True))
    correct = [spell_backward_correct(text, **key) for text, key in pairs]
    rewards = [spell_backward_reward(text, **key) for text, key in pairs]
    return sum(correct) / len(correct), sum(rewards) / len(rewards)


def measure(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, train: Dataset, held_out: Dataset
) -> str:
    """Log how good the finished model is and return it as the rows of a Markdown table."""
    first = held_out.select(range(400))
    table = []
    for name, rows, samples in (
        (f"{len(held_out):,} held-out words, greedy", held_out, 0),
        ("the first 400 of them, greedy", first, 0),
        ("the same 400, 8 samples each at temperature 1", first, 8),
        ("400 words of the training side, greedy", train.select(range(400)), 0),
    ):
        accuracy, reward = evaluate(model, tokenizer, rows, samples)
        logger.info("%s: accuracy %.3f, mean reward %.3f", name, accuracy, reward)
        table.append(f"| {name} | {accuracy:.3f} | {reward:.3f} |")
    return "\n".join(table)


def card(model: Qwen2ForCausalLM, results: str, steps: int, seed: int) -> str:
    """Write the model card."""
    return CARD.format(
        layers=model.config.num_hidden_layers,
        hidden=model.config.hidden_size,
        parameters=model.num_parameters(),
        shortest=MIN_WORD_LEN,
        longest=MAX_WORD_LEN,
        steps=steps,
        rows=ROWS,
        lr=LR,
        seed=seed,
        results=results,
        held_out=HELD_OUT_SIZE,
    )


if __name__ == "__main__":
    main()
