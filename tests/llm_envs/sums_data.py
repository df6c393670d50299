"""A dataset of sums and the conversation they are asked in."""

from __future__ import annotations

from datasets import Dataset

TEMPLATE = [{"role": "user", "content": "Q: {question}\nA:"}]


def sums(start: int, count: int) -> Dataset:
    """Rows ``i+i?`` with the answer ``2i``."""
    return Dataset.from_dict(
        {
            "question": [f"{i}+{i}?" for i in range(start, start + count)],
            "answer": [str(2 * i) for i in range(start, start + count)],
        }
    )
