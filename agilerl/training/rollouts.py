"""Rollouts of a population: agents that can share calls of their generator act together."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

from agilerl.checks import missing_members
from agilerl.training.protocols import Agent, JointAgent, JointCollector, Rollout

if TYPE_CHECKING:
    from agilerl.llm.generation import JointLimits
    from agilerl.training.experience import Experience
    from agilerl.training.population import Member


def roll_out(agent: Agent, rollout: Rollout) -> None:
    """Let one agent answer all prompts of a rollout."""
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
    rollouts: dict[int, Rollout] = {}
    groups = _joint_groups(members)
    if groups:
        rollouts = _begin(members)
        parts = [part for group in groups for part in _that_fit(group, rollouts) if len(part) > 1]
        for part in parts:
            _roll_out_together([(agent, rollouts[id(member)]) for member, agent in part])
        acted = {id(member) for part in parts for member, _ in part}
        for member in members:
            if id(member) in rollouts and id(member) not in acted:
                roll_out(member.agent, rollouts[id(member)])
    for member in members:
        rollout = rollouts.get(id(member))
        yield member.collector.collect(member.agent) if rollout is None else rollout.finish()


_Group = list[tuple["Member", JointAgent]]


def _joint_groups(members: Sequence[Member]) -> list[_Group]:
    """Members whose agents can share calls, at least two in each group."""
    groups: dict[Hashable, _Group] = {}
    for member in members:
        if _begins(member, members) and not missing_members(member.agent, JointAgent):
            agent = cast(JointAgent, member.agent)
            limits = _limits(agent)
            if limits is not None:
                key = type(member.collector), limits.key
                groups.setdefault(key, []).append((member, agent))
    return [group for group in groups.values() if len(group) > 1]


def _limits(agent: JointAgent) -> JointLimits | None:
    return agent.generator.joint_limits(agent.sampling_config(training=True), agent.group_size)


def _begins(member: Member, members: Sequence[Member]) -> bool:
    """Whether a member's collector can begin the rollouts of all its members before one is over."""
    collector = member.collector
    if missing_members(collector, JointCollector):
        return False
    sharing = sum(other.collector is collector for other in members)
    return sharing <= cast(JointCollector, collector).max_rollouts


def _begin(members: Sequence[Member]) -> dict[int, Rollout]:
    """The rollouts by id of the member, of all whose collectors can begin them."""
    able = [member for member in members if _begins(member, members)]
    rollouts: dict[int, Rollout] = {}
    for collector in {id(member.collector): member.collector for member in able}.values():
        sharing = [member for member in able if member.collector is collector]
        begun = cast(JointCollector, collector).begin([member.agent for member in sharing])
        rollouts |= {id(member): made for member, made in zip(sharing, begun, strict=True)}
    return rollouts


def _that_fit(group: _Group, rollouts: Mapping[int, Rollout]) -> Iterator[_Group]:
    """The group in parts whose completions may be generated at a time."""
    part: _Group = []
    rows, max_rows = 0, math.inf
    for member, agent in group:
        rollout, limits = rollouts[id(member)], _limits(agent)
        assert limits is not None
        own_rows = len(rollout.prompts) * (1 if rollout.several_turns else agent.group_size)
        own_max = math.inf if limits.max_rows is None else limits.max_rows
        if part and rows + own_rows > min(max_rows, own_max):
            yield part
            part, rows, max_rows = [], 0, math.inf
        part.append((member, agent))
        rows, max_rows = rows + own_rows, min(max_rows, own_max)
    yield part


def _roll_out_together(actors: Sequence[tuple[JointAgent, Rollout]]) -> None:
    """Let agents answer all prompts of their rollouts in common calls."""
    agents, several_turns = [agent for agent, _ in actors], actors[0][1].several_turns
    for agent in agents:
        agent.generator.sync(agent.policy)
    joint = agents[0].generator.join([agent.generator for agent in agents[1:]])
    with joint.session() if several_turns else nullcontext():
        while waiting := {n: rollout for n, (_, rollout) in enumerate(actors) if rollout.prompts}:
            started = time.perf_counter()
            requests = {
                n: agents[n].generation_request(rollout.prompts, True, not several_turns)
                for n, rollout in waiting.items()
            }
            completions = joint.generate(requests)
            seconds = time.perf_counter() - started
            tokens = {n: sum(map(len, made.token_ids)) for n, made in completions.items()}
            for n, rollout in waiting.items():
                result = agents[n].action_result(requests[n], completions[n])
                # Its share of the call, by tokens.
                rollout.answer(result, seconds * tokens[n] / sum(tokens.values()))
