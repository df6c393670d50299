"""Out of memory in a process whose address space is limited: the error says what to do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from agilerl.llm.memory.out_of_memory import advice
from agilerl.llm.memory.settings import MemorySettings
from agilerl.testing import tiny_model

SCRIPT = """
import json, resource
from pathlib import Path
import torch
from agilerl.algorithms import GRPO
from agilerl.llm.memory.out_of_memory import advice
from agilerl.testing import tiny_model

torch.set_num_threads(1)
agent = GRPO(
    0, "<pad>", actor_network=tiny_model(hidden_size=128, layers=4, heads=4), group_size=4,
    batch_size=64, max_output_tokens=8, max_model_len=2048, beta=0.0, lr=0.1,
    gradient_checkpointing=False,
)
def rollouts(rows, tokens):
    ids = torch.randint(97, 123, (rows, tokens))
    mask = torch.zeros(rows, tokens - 1, dtype=torch.bool)
    mask[:, 3:] = True
    return ids, mask, torch.rand(rows // 4, 4)

def prompt(tokens):
    return {"input_ids": torch.full((1, tokens), 97), "attention_mask": torch.ones(1, tokens)}

def state():
    moments = [value for each in agent.optimizer.state.values() for value in each.values()]
    return [t.detach().clone() for t in [*agent.policy.parameters().values(), *moments]]

def limited(call):
    before, unlimited = state(), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 400 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, unlimited[1]))
    try:
        call()
        found = {"type": None}
    except Exception as error:
        cause = error.__cause__
        found = {"type": type(error).__name__, "says": str(error), "cause": str(cause)}
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    found["same"] = all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    found["gradients"] = sum(p.grad is not None for p in agent.policy.parameters().values())
    return found

agent.get_action([prompt(4)])
agent.learn(rollouts(8, 12))
sizes = agent.memory_settings(prompt_tokens=4, completion_tokens=4)
advice("update", agent.policy.base.model, sizes)
learn = limited(lambda: agent.learn(rollouts(64, 500)))
act = limited(lambda: agent.get_action([prompt(1500 + i) for i in range(60)]))
agent.learn(rollouts(8, 12))
print(json.dumps({"learn": learn, "act": act}))
"""


@pytest.mark.process
def test_an_out_of_memory_error_names_the_owner_and_two_settings() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, check=True, timeout=240
    )
    found = json.loads(run.stdout.splitlines()[-1])
    for each in found.values():
        assert each["type"] == "RuntimeError"
        assert "DefaultCPUAllocator" in each["cause"]
        assert each["says"].startswith(each["cause"])
        assert each["same"]
        assert each["gradients"] == 0
    learn, act = found["learn"]["says"], found["act"]["says"]
    assert "the update takes" in learn
    assert "activations take" in learn
    assert "gradient_checkpointing=True (" in learn
    assert "micro_batch_size_per_gpu=32 (" in learn
    assert "the forward over the prompts takes" in act
    assert "hf_generate_chunk_size=30 (" in act


def test_the_two_settings_that_save_most_are_named() -> None:
    model = tiny_model(vocab_size=50000, layers=2)
    sizes = MemorySettings(
        64, 400, prompts=2, micro_batch_size_per_gpu=1, fused_logprobs_chunk_rows=4096
    )
    text = advice("update", model, sizes)
    assert "of which activations take" in text or "of which the logits tile takes" in text
    assert "micro_batch_size_per_gpu" not in text  # one row is the fewest
    assert "max_output_tokens=200 (" in text
    one = MemorySettings(8, 1, prompts=1, micro_batch_size_per_gpu=1)
    assert advice("update", model, one).endswith("A smaller base, or a quantized one, helps.")
    cut = MemorySettings(64, 400, prompts=2, micro_batch_tokens=1500)
    text = advice("update", model, cut)  # of three rows
    assert "micro_batch_size_per_gpu" not in text
    assert "micro_batch_tokens=630 (" in text
    text = advice("rollout", model, MemorySettings(16, 1000, prompts=8, top_k=5))
    assert "the cache of keys and values takes" in text
    assert "hf_generate_chunk_size=4 (" in text
    assert "max_output_tokens=500 (" in text
