"""Probe which ways of cached decoding are exact on a model, on a few tokens."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import nn

from agilerl.llm.causal_lm import PROBED_WINDOW, equal_up_to_rounding, short_windows
from agilerl.llm.generation.cached_decoder import CachedDecoder, LeftPadded
from agilerl.llm.generation.kv_cache.growing_cache import GrowingCache
from agilerl.llm.generation.kv_cache.shared_prefix import SharedPrefixCache
from agilerl.llm.policy import Policy
from agilerl.llm.shared_base import SharedBase

logger = logging.getLogger(__name__)

# Rows of different lengths whose last tokens are decoded: two one by one, as in sampling, then two
# at once, as when a turn continues a cached prefix.
_PROMPT_LENGTHS = (6, 3, 1)
_DECODED = 4
# Least share of the hidden states that must agree; wrong positions or masks change most of them.
_SHARE_IN_LOWER_PRECISION = 0.75


@dataclass(frozen=True)
class DecodingSupport:
    """Which ways of decoding give a model's own hidden states."""

    left_padding: bool
    """Rows of different lengths may share a batch."""
    single_query: bool
    """:func:`~agilerl.llm.generation.single_token.attention.single_query_attention` may replace its
    attention."""
    shared_prefix: bool = False
    """Rows may share a prompt's keys and values."""
    shared_turns: bool = False
    """They may go on doing so in later turns, with hidden columns between the prompt and what comes
    after it; not where columns count, as for sliding windows."""


# Fastest first.
_CHOICES = (
    DecodingSupport(left_padding=True, single_query=True),
    DecodingSupport(left_padding=True, single_query=False),
    DecodingSupport(left_padding=False, single_query=True),
    DecodingSupport(left_padding=False, single_query=False),
)
_known: WeakKeyDictionary[SharedBase, DecodingSupport] = WeakKeyDictionary()


def decoding_support(policy: Policy) -> DecodingSupport:
    """The fastest way of decoding that is exact on a policy's base model, which is probed once.

    Decodes rows of different lengths against a cache, as a rollout does, and compares hidden states
    with those of one forward over whole rows, as in training. On a partitioned base all ranks
    together.

    Raises:
        ValueError: If none is exact, as where layers keep another state (linear attention, Mamba).
    """
    support = _known.get(policy.base)
    if support is None:
        with policy.as_role(None):
            support = _known[policy.base] = _probe(policy.base)
        name = type(policy.base.model).__name__
        if support.left_padding and support.single_query and not support.shared_prefix:
            logger.info("completions of one prompt get copies of its keys and values on %s", name)
        if support.shared_prefix and not support.shared_turns:
            logger.info(
                "after their first turn, episodes get copies of their prompt's keys and values "
                "on %s: hidden columns make a difference, as to sliding windows",
                name,
            )
        if not support.single_query:
            logger.info(
                "single-query attention is off for %s: it cannot replace the model's own", name
            )
        if not support.left_padding:
            logger.info(
                "left padding is off for %s: only prompts of equal length are generated together, "
                "and turns are run from their start",
                name,
            )
    return support


@torch.no_grad()
def _probe(base: SharedBase) -> DecodingSupport:
    rows = _rows(base.model.config.get_text_config().vocab_size)
    error: Exception | None = None
    with short_windows(base.decoder):
        expected = _states_of_whole_rows(base.decoder, rows, base.device)
        for choice in _CHOICES:
            # Others do not look their attention function up, some go by the implementation's name.
            if choice.single_query and not base.model.is_backend_compatible():
                continue
            exact = False
            try:
                made = _decoded_states(base.decoder, rows, base.device, choice)
                exact = _agree(made, expected)
            except Exception as raised:  # noqa: BLE001 - of an unknown architecture; the next choice may do
                error = raised
            if _on_all_ranks(base, exact):
                return _with_sharing(base, rows, expected, choice)
    raise ValueError(
        f"{type(base.model).__name__} cannot be continued from keys and values alone (linear "
        "attention, Mamba and other recurrent layers are not supported); use a model with "
        "attention in every layer"
    ) from error


def _rows(vocab: int) -> list[torch.Tensor]:
    return [
        (torch.arange(length + _DECODED) * 3 + 7 * row + 1) % vocab
        for row, length in enumerate(_PROMPT_LENGTHS)
    ]


def _states_of_whole_rows(
    decoder: nn.Module, rows: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Hidden states ``(N, _DECODED + 1, D)`` at the last positions, from right-padded rows."""
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)[:, None]
    mask = torch.arange(ids.shape[1], device=device) < lengths
    output = decoder(input_ids=ids, attention_mask=mask.long(), use_cache=False)
    last = lengths - 1 - torch.arange(_DECODED, -1, -1, device=device)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden[torch.arange(len(rows), device=device)[:, None], last]


def _with_sharing(
    base: SharedBase,
    rows: Sequence[torch.Tensor],
    expected: torch.Tensor,
    choice: DecodingSupport,
) -> DecodingSupport:
    """A choice, and whether rows that share prompts then have the hidden states of whole rows."""
    if not choice.left_padding or not choice.single_query:
        return choice
    exact = []
    for hidden_columns in (0, PROBED_WINDOW):
        agree = False
        with contextlib.suppress(Exception):  # of an unknown architecture; copies will do
            made = _shared_states(base.decoder, rows, base.device, hidden_columns)
            agree = _agree(made, expected)
        exact.append(_on_all_ranks(base, agree))
    return replace(choice, shared_prefix=exact[0], shared_turns=all(exact))


def _shared_states(
    decoder: nn.Module, rows: Sequence[torch.Tensor], device: torch.device, hidden_columns: int
) -> torch.Tensor:
    """As :func:`_decoded_states`, with two rows of each prompt, of which some leave.

    Args:
        decoder: The model without its head.
        rows: The prompts and what is decoded.
        device: The model's.
        hidden_columns: Behind the prompts. With them the first two tokens are run at once, as at
            the start of a later turn; else all are one by one.
    """
    model = CachedDecoder(decoder, left_padding=True, single_query=True)
    ids, mask, positions = LeftPadded.of(rows, 0, device)
    width, prompts = ids.shape[1] - _DECODED, len(rows)
    prompt_cache = GrowingCache(0)
    hidden = model.hidden(ids[:, :width], mask[:, :width], positions[:, :width], prompt_cache)
    # Hidden columns repeat the last token of the prompt.
    order = [*range(width), *[width - 1] * hidden_columns, *range(width, ids.shape[1])]
    ids, mask, positions = (each[:, order] for each in (ids, mask, positions))
    mask[:, width : width + hidden_columns] = False
    index = torch.arange(prompts, device=device).repeat(2)
    lengths = [len(row) - _DECODED for row in rows]
    cache = SharedPrefixCache.of_prompts(prompt_cache, index, lengths, 1)
    states, start = [hidden[:, -1:]], width
    first = 2 if hidden_columns else 1
    for end in range(width + hidden_columns + first, ids.shape[1] + 1):
        hidden = model.hidden(
            ids[index, start:end], mask[index, :end], positions[index, start:end], cache
        )
        states.append(hidden[-prompts:, hidden_columns if start == width else 0 :])
        if start == width:
            kept = torch.arange(prompts - 1, 2 * prompts, device=device)
            index = index[kept]
            cache.select(kept)
        start = end
    return torch.cat(states, dim=1)


def _decoded_states(
    decoder: nn.Module, rows: Sequence[torch.Tensor], device: torch.device, choice: DecodingSupport
) -> torch.Tensor:
    """The same hidden states, decoded in one batch or, without padding, row by row."""
    model = CachedDecoder(
        decoder, left_padding=choice.left_padding, single_query=choice.single_query
    )
    batches = [rows] if choice.left_padding else [[row] for row in rows]
    return torch.cat([_decode(model, batch, device) for batch in batches])


def _decode(
    model: CachedDecoder, rows: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    ids, mask, positions = LeftPadded.of(rows, 0, device)
    cache, states, start = GrowingCache(_DECODED), [], 0
    for end in (ids.shape[1] - _DECODED + step for step in (0, 1, 2, _DECODED)):
        columns = slice(start, end)
        hidden = model.hidden(ids[:, columns], mask[:, :end], positions[:, columns], cache)
        states.append(hidden if start else hidden[:, -1:])
        start = end
    return torch.cat(states, dim=1)


def _agree(made: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results ``(N, T, D)`` are the same up to rounding.

    In lower precision a few states may differ: rounding may send a token to other experts.
    """
    states = zip(made.flatten(0, 1), expected.flatten(0, 1), strict=True)
    equal = [equal_up_to_rounding(a, b) for a, b in states]
    full = expected.dtype in (torch.float32, torch.float64)
    return all(equal) if full else sum(equal) >= _SHARE_IN_LOWER_PRECISION * len(equal)


def _on_all_ranks(base: SharedBase, exact: bool) -> bool:
    """Ranks of a partitioned base must make the same choice: every forward is a collective."""
    return exact if base.partition is None else base.partition.most(int(not exact)) == 0
