"""Scripted episodes, played with and without keys and values that are kept between turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from generation_helpers import sampling_of

from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm.policy import Policy

# Many tokens end a completion, so that rows of a batch finish at different steps.
ENDS = tuple(range(2, 24))
Feedback = Callable[[int, int], list[int]]
"""(turn, episode) -> the tokens the environment adds, [] where the episode is over."""


@dataclass
class Played:
    """What every turn of every episode sampled, in order."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    logps: list[torch.Tensor] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)
    """Shape of the block of ids at the start of each batch."""


@contextmanager
def recorded_reads(policy: Policy, reads: list[tuple[int, int]]) -> Iterator[None]:
    def note(module: torch.nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            reads.append(tuple(kwargs["input_ids"].shape))

    handle = policy.base.decoder.register_forward_pre_hook(note, with_kwargs=True)
    yield
    handle.remove()


def play(
    policy: Policy,
    first: list[torch.Tensor],
    feedback: Feedback,
    turns: int,
    *,
    cached: bool,
    drop: Mapping[int, int] | None = None,
    after_turn: Callable[[HFGenerator], None] = lambda generator: None,
    **changes: object,
) -> Played:
    """Play scripted episodes.

    ``drop``: by episode, tokens that leave the front of its prompt of turn 2. ``after_turn`` sees
    the generator after each turn.
    """
    generator, rng = HFGenerator(policy), torch.Generator().manual_seed(5)
    sampling = sampling_of(return_logps=True, **({"max_new_tokens": 4} | changes))
    played, prompts = Played(), dict(enumerate(first))
    context = generator.session() if cached else nullcontext()
    with context, recorded_reads(policy, played.reads):
        for turn in range(turns):
            made = generator.generate(list(prompts.values()), 1, sampling, rng)
            assert made.logps is not None
            after_turn(generator)
            played.tokens += made.token_ids
            played.logps += made.logps
            for episode, completion in zip(list(prompts), made.token_ids, strict=True):
                added = feedback(turn, episode)
                grown = torch.cat([prompts[episode], completion, torch.tensor(added).long()])
                prompts[episode] = grown[(drop or {}).get(episode, 0) :] if turn == 1 else grown
                if not added:
                    del prompts[episode]
    return played


def assert_same(cached: Played, plain: Played) -> None:
    assert len(cached.tokens) == len(plain.tokens)
    for a, b in zip(cached.tokens, plain.tokens, strict=True):
        assert torch.equal(a, b)
    assert (torch.cat(cached.logps) - torch.cat(plain.logps)).abs().max() < 1e-4
