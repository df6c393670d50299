"""``learn`` with log-probs of a sampler that left some out, on two ranks and on one."""

from __future__ import annotations

from typing import Any

import torch
from agents_and_batches import PROMPTS_OF_RANK, Data, data, make_agent, weights

from agilerl.algorithms import GRPO

# Of the first: only rank 1's batch lacks one. Of the second: rank 1's sampler reported everything.
MISSING = {"a row of rank 1": [(1, 2)], "all rows of rank 0": [(0, row) for row in range(4)]}


def reported(prompts: list[int], missing: list[tuple[int, int]]) -> list[torch.Tensor | None]:
    """Log-probs of these prompts' rows, None for the missing ``(prompt, row)``."""
    everything = data()
    rows: list[torch.Tensor | None] = []
    for prompt in prompts:
        for row, mask in enumerate(everything.masks[prompt]):
            rng = torch.Generator().manual_seed(100 * prompt + row)
            logps = -5.5 + 0.3 * torch.randn(int(mask.sum()), generator=rng)
            rows.append(None if (prompt, row) in missing else logps)
    return rows


def learned(rank: int | None, accelerator: Any = None) -> dict[str, dict[str, Any]]:
    """What came of ``learn`` on a rank's prompts, or on all of them, by what was missing."""
    prompts = [0, 1, 2] if rank is None else PROMPTS_OF_RANK[rank]
    found = {}
    for name, missing in MISSING.items():
        agent: GRPO = make_agent(accelerator)
        part: Data = data().of(prompts)
        rows = reported(prompts, missing)
        metrics = agent.learn(part.experiences(), sampling_logps=rows)
        found[name] = {"weights": weights(agent), "metrics": metrics}
        agent.clean_up()
    return found
