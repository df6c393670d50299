"""Rollouts of a population: agents that can share calls of their generator act together."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from agilerl.algorithms.core.llm_algorithm import LLMAlgorithm
from agilerl.training.protocols import Agent, Rollout, is_joint_collector

if TYPE_CHECKING:
    from agilerl.llm.generation import JointLimits
    from agilerl.training.collectors.experience import Experience
    from agilerl.training.population import Member


def roll_out(agent: Agent, rollout: Rollout) -> None:
    """Let one agent answer all prompts of a rollout, batch by batch."""
    _answer(agent, rollout)
    while rollout.draw_again():
        _answer(agent, rollout)


def _answer(agent: Agent, rollout: Rollout) -> None:
    """Let one agent answer the prompts of a batch."""
    with agent.rollout() if rollout.several_turns else nullcontext():
        while rollout.prompts:
            started = time.perf_counter()
            if rollout.several_turns:
                result = agent.get_action(rollout.prompts, training=True, repeat_prompts=False)
            else:
                result = agent.get_action(rollout.prompts, training=True)
            rollout.answer(result, time.perf_counter() - started)


def collect(members: Sequence[Member]) -> Iterator[Experience]:
    """An experience of each member, in their order.

    Where agents sample in the same way from the same base, or from the same vLLM engine, their
    prompts are completed in one call: the same completions as one by one, beyond rounding. Then all
    members act before the first one's completions are scored.
    """
    able = _able_to_begin(members) if len(members) > 1 else []
    groups = _joint_groups(able)
    rollouts = _begin(able) if groups else {}
    waiting = dict(rollouts)
    while waiting:
        _act(groups, waiting)
        # In the order of the members, which is the same on all processes.
        waiting = {m: rollout for m, rollout in waiting.items() if rollout.draw_again()}
    for member in members:
        if member in rollouts:
            yield rollouts[member].finish()
        else:
            yield member.collector.collect(member.agent)


def _act(groups: Sequence[Sequence[_Actor]], rollouts: Mapping[Member, Rollout]) -> None:
    """Let the agents of these rollouts answer the prompts of a batch, together where they can."""
    acting = [[actor for actor in group if actor.member in rollouts] for group in groups]
    parts = [part for group in acting for part in _that_fit(group, rollouts) if len(part) > 1]
    for part in parts:
        _answer_together([actor.agent for actor in part], [rollouts[a.member] for a in part])
    acted = {actor.member for part in parts for actor in part}
    for member, rollout in rollouts.items():
        if member not in acted:
            _answer(member.agent, rollout)


class _Actor(NamedTuple):
    """A member whose agent can share calls of its generator."""

    member: Member
    agent: LLMAlgorithm
    limits: JointLimits


def _joint_groups(members: Sequence[Member]) -> list[list[_Actor]]:
    """Members whose agents can share calls, at least two in each group."""
    groups: dict[Hashable, list[_Actor]] = {}
    for member in members:
        agent = member.agent
        if not _acts_by_its_generator(agent):
            continue
        limits = agent.generator.joint_limits(agent.sampling_config(), agent.group_size)
        if limits is not None:
            key = type(member.collector), limits.key
            groups.setdefault(key, []).append(_Actor(member, agent, limits))
    return [group for group in groups.values() if len(group) > 1]


def _acts_by_its_generator(agent: object) -> TypeGuard[LLMAlgorithm]:
    """Whether an agent's answers are its generator's: not if its class has a way of its own."""
    if not isinstance(agent, LLMAlgorithm):
        return False
    own, plain = type(agent), LLMAlgorithm
    return (own.get_action, own.rollout) == (plain.get_action, plain.rollout)


def _able_to_begin(members: Sequence[Member]) -> list[Member]:
    """Those whose collectors can begin the rollouts of all their members before one is over."""
    able: set[Member] = set()
    for sharing in _by_collector(members):
        collector = sharing[0].collector
        if is_joint_collector(collector) and collector.can_begin(len(sharing)):
            able.update(sharing)
    return [member for member in members if member in able]


def _begin(members: Sequence[Member]) -> dict[Member, Rollout]:
    """The rollouts of members that are able to begin them."""
    rollouts: dict[Member, Rollout] = {}
    for sharing in _by_collector(members):
        collector = sharing[0].collector
        assert is_joint_collector(collector)
        begun = collector.begin([member.agent for member in sharing])
        rollouts.update(zip(sharing, begun, strict=True))
    return rollouts


def _by_collector(members: Sequence[Member]) -> list[list[Member]]:
    """Members that share a collector, in their order."""
    sharing: dict[int, list[Member]] = {}
    for member in members:
        sharing.setdefault(id(member.collector), []).append(member)
    return list(sharing.values())


def _that_fit(
    group: Sequence[_Actor], rollouts: Mapping[Member, Rollout]
) -> Iterator[list[_Actor]]:
    """The group in parts whose completions may be generated at a time."""
    part: list[_Actor] = []
    rows, max_rows = 0, math.inf
    for actor in group:
        rollout, own_max = rollouts[actor.member], actor.limits.max_rows or math.inf
        own_rows = len(rollout.prompts) * (1 if rollout.several_turns else actor.agent.group_size)
        if part and rows + own_rows > min(max_rows, own_max):
            yield part
            part, rows, max_rows = [], 0, math.inf
        part.append(actor)
        rows, max_rows = rows + own_rows, min(max_rows, own_max)
    yield part


def _answer_together(agents: Sequence[LLMAlgorithm], rollouts: Sequence[Rollout]) -> None:
    """Let agents answer the prompts of a batch each in common calls."""
    several_turns = rollouts[0].several_turns
    for agent in agents:
        agent.generator.sync(agent.policy)
    joint = agents[0].generator.join([agent.generator for agent in agents[1:]])
    with joint.session() if several_turns else nullcontext():
        while waiting := {n: rollout for n, rollout in enumerate(rollouts) if rollout.prompts}:
            started = time.perf_counter()
            requests = {
                n: agents[n].generation_request(rollout.prompts, repeat_prompts=not several_turns)
                for n, rollout in waiting.items()
            }
            completions = joint.generate(requests)
            seconds = time.perf_counter() - started
            tokens = {n: sum(map(len, made.token_ids)) for n, made in completions.items()}
            for n, rollout in waiting.items():
                result = agents[n].action_result(requests[n], completions[n])
                # Its share of the call, by tokens.
                rollout.answer(result, seconds * tokens[n] / max(1, sum(tokens.values())))
