"""Three steps of an agent on each rank, with an engine of its own; prints what the ranks found."""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from vllm_agents import agent_on, train

from agilerl.distributed import ranks_of
from agilerl.testing import load_bundled_model
from agilerl.utils.llm_utils import create_llm_accelerator

if __name__ == "__main__":
    stage = int(sys.argv[1])
    accelerator = create_llm_accelerator(zero_stage=stage or None, cpu=True)
    agent = agent_on(load_bundled_model()[0], accelerator=accelerator, seed=3)
    ranks = ranks_of(accelerator)
    metrics = [train(agent, seed=10 * step + ranks.rank) for step in range(3)]
    weights = torch.cat([p.detach().flatten() for p in agent.policy.parameters().values()])
    found = {
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "engine": agent.generator.engine._process.pid,
        "probe": agent.generator.probe_difference,
        "importance": [m["importance_weight_mean"] for m in metrics],
        "norms": [m["grad_norm"] for m in metrics],
    }
    gathered = ranks.gather(found)
    agent.clean_up()
    if ranks.rank == 0:
        print("FOUND", json.dumps(gathered), flush=True)
