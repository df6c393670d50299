"""What the scripts that make bundled models share: arguments, supervised steps, padding, saving."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

logger = logging.getLogger("warm_up")

NOT_TRAINED = -100
"""Label of a token without a loss."""

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""``input_ids``, ``attention_mask``, ``labels``: ``(B, T)`` long, labels -100 off the answers."""


def start(description: str, output: Path) -> argparse.Namespace:
    """Read ``--seed`` and ``--output``; make what follows a function of the seed.

    Args:
        description: Of the script.
        output: Folder to save to, unless told otherwise.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=output)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)  # the number of threads changes the order of sums, so the weights
    torch.manual_seed(args.seed)
    return args


class Supervised:
    """AdamW on a model, one step per batch.

    Args:
        model: Trained in place.
        lr: Learning rate.
        schedule: Factor of ``lr`` at step 0, 1, ...
    """

    def __init__(
        self, model: Qwen2ForCausalLM, lr: float, schedule: Callable[[int], float]
    ) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)

    def step(self, batch: Batch) -> float:
        """Take one step and return the loss before it, per trained token."""
        input_ids, attention_mask, labels = batch
        self.model.train()
        loss = self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


def make_batch(
    tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[list[int], list[bool]]]
) -> Batch:
    """Pad rows of token ids on the left; only tokens marked True have a label."""
    padded = tokenizer.pad({"input_ids": [ids for ids, _ in rows]}, return_tensors="pt")
    labels = torch.full_like(padded["input_ids"], NOT_TRAINED)
    for label, (ids, trained) in zip(labels, rows, strict=True):
        label[-len(ids) :] = torch.where(torch.tensor(trained), torch.tensor(ids), NOT_TRAINED)
    return padded["input_ids"], padded["attention_mask"], labels


def save(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str, folder: Path
) -> None:
    """Write model, tokenizer and model card."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
    logger.info("saved to %s", folder)
