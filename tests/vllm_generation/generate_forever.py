"""An agent that generates until something ends it; says where its engine is first."""

from __future__ import annotations

from vllm_agents import agent_on, prompts_of

from agilerl.testing import load_bundled_model

if __name__ == "__main__":
    agent = agent_on(load_bundled_model()[0])
    agent.get_action(prompts_of(3))
    directories = [agent.generator.engine._directory, agent.generator._files._directory]
    print(agent.generator.engine._process.pid, *directories, flush=True)
    while True:
        agent.get_action(prompts_of(3, 5, 7))
