"""An agent that generates until something ends it; says where its engine is first."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

from vllm_agents import agent_on, prompts_of

from agilerl.testing import load_bundled_model

if __name__ == "__main__":
    model = load_bundled_model()[0]
    model.name_or_path = model.config.name_or_path = ""  # so that it is written for vLLM
    written = []
    make = tempfile.mkdtemp

    def noted(**arguments: Any) -> str:
        written.append(make(**arguments))
        return written[-1]

    tempfile.mkdtemp = noted
    agent = agent_on(model)
    agent.get_action(prompts_of(3))
    directories = [agent.generator._files._directory, *written]
    fork = os.fork()
    if fork == 0:  # such as a worker of a DataLoader: no reason for the engine to stay
        time.sleep(600)
    print("ENGINE", agent.generator.engine._process.pid, fork, *directories, flush=True)
    while True:
        agent.get_action(prompts_of(3, 5, 7))
