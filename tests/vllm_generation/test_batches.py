"""Batches that vLLM's CPU build needs help with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel
from vllm_agents import CONFIG, agent_on, prompts_of, train

from agilerl.algorithms import GRPO
from agilerl.llm.generation import GenerationRequest
from agilerl.llm.generation.vllm.engine import Answer, Request
from agilerl.llm.generation.vllm.generator import VLLMGenerator

MakeAgent = Callable[..., GRPO]


def test_prompts_of_more_tokens_than_a_forward_takes(make_agent: MakeAgent) -> None:
    """Of a prompt that is run in parts, vLLM's CPU build cannot take back the random numbers."""
    agent = make_agent(max_output_tokens=2)
    prompts = prompts_of(*[100] * 60)  # 6000 tokens; a forward takes 4096
    action = agent.get_action(prompts, repeat_prompts=False)
    assert all(mask.sum() >= 1 for mask in action.action_masks)


def test_a_forward_that_does_not_take_the_longest_row(base: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 127; .* is 128, or None"):
        agent_on(base, vllm_config=replace(CONFIG, max_num_batched_tokens=127))


def greedy(generator: VLLMGenerator, prompt: list[int]) -> Request:
    assert generator._served is not None
    parameters = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
    return Request(prompt, parameters, generator._served)


def test_adapters_of_two_agents_in_one_batch(make_agent: MakeAgent) -> None:
    first, second = (make_agent(lr=0.05) for _ in range(2))
    train(first, 2, seed=1)
    train(second, 2, seed=2)
    generators = [agent.generator for agent in (first, second)]
    requests: list[Request] = []
    for generator in generators:
        assert isinstance(generator, VLLMGenerator)
        with generator.session():
            requests += [greedy(generator, [7, *range(20, 20 + n)]) for n in (3, 40)]
    engine = generators[0].engine
    assert engine is generators[1].engine
    together = engine.complete([requests[n] for n in (0, 2, 3, 1)])
    alone = [engine.complete([request])[0] for request in requests]

    def logps(answer: Answer) -> torch.Tensor:
        return torch.tensor(answer.prompt_logps)

    for n, answer in zip((0, 2, 3, 1), together, strict=True):
        torch.testing.assert_close(logps(answer), logps(alone[n]), rtol=0, atol=1e-4)
    assert not torch.allclose(logps(alone[0]), logps(alone[2]), rtol=0, atol=1e-2)


def test_two_agents_get_in_one_call_what_each_gets_alone(make_agent: MakeAgent) -> None:
    agents = [make_agent(lr=0.05, max_output_tokens=6, temperature=t) for t in (1.0, 0.7)]
    for seed, agent in enumerate(agents):
        train(agent, 2, seed=seed)
    prompts = [prompts_of(7, 20), prompts_of(30)]
    generators = [agent.generator for agent in agents]
    limits = [
        agent.generator.joint_limits(agent.sampling_config(), agent.group_size) for agent in agents
    ]
    assert limits[0] == limits[1]

    def requests() -> dict[int, GenerationRequest]:
        for seed, agent in enumerate(agents):
            agent.rng.manual_seed(seed)
        return {
            n: agent.generation_request(prompts[n], repeat_prompts=True)
            for n, agent in enumerate(agents)
        }

    joint = generators[0].join(generators[1:])
    with joint.session():
        made = [joint.generate(requests()) for _ in range(2)]
    assert joint.generate(requests()).keys() == {0, 1}  # outside of a session too
    for n, agent in enumerate(agents):
        requests()
        alone = agent.get_action(prompts[n])
        result = agent.action_result(agent.generation_request(prompts[n]), made[0][n])
        for mine, theirs in zip(result.completion_ids, alone.completion_ids, strict=True):
            assert torch.equal(mine, theirs)
        assert made[1][n].logps is not None
