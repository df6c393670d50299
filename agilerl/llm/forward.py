"""Hidden states at the action positions of a batch, running each distinct prompt once.

The completions of a prompt share it, so a forward needs P + G·C tokens, not G·(P + C): the prompt
goes through the model once, with gradients, and the completions go through as a batch against its
keys and values. Where a model does not support that exactly (a probe compares both ways once per
model), plain rows are used.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from agilerl.llm.batch import TrainBatch
from agilerl.llm.causal_lm import equal_up_to_rounding, short_windows
from agilerl.llm.config import ForwardConfig

logger = logging.getLogger(__name__)

_RECOMPUTING = "_agilerl_recomputing"
"""Attribute of a layer: its forward under ``checkpoint``."""

# Below this share of tokens saved, the second model call costs more than the tokens it spares.
MIN_TOKENS_SAVED = 0.15


class _RecordedLayer(DynamicLayer):
    """Keeps the last call's keys and values; a layer recomputed in backward may call it again."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = key_states, value_states
        return key_states, value_states


class _PrefixLayer(DynamicLayer):
    """A prompt's keys and values in front of every call's own; never changed by a call."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        return torch.cat([self.keys, key_states], dim=-2), torch.cat(
            [self.values, value_states], dim=-2
        )


def action_hidden_states(
    decoder: nn.Module, batch: TrainBatch, config: ForwardConfig, *, share_prefixes: bool
) -> torch.Tensor:
    """Hidden states that predict the actions of a batch.

    Args:
        decoder: The model without its head.
        batch: The rows.
        config: Recomputation and position ids.
        share_prefixes: Whether this model supports running a prompt once for its completions.

    Returns:
        ``(N, D)``, in the order of ``batch.targets``.
    """
    recompute = config.recompute_layers and torch.is_grad_enabled()
    with recomputed_layers(decoder) if recompute else contextlib.nullcontext():
        rows = torch.arange(len(batch), device=batch.device)
        if share_prefixes and _shared_tokens(batch, rows) is not None:
            return _shared_prefix_rows(decoder, batch)
        return _plain_rows(decoder, batch, config.use_position_ids)


def supports_shared_prefixes(decoder: nn.Module, vocab_size: int) -> bool:
    """Compare shared prefixes with plain rows once on a ragged batch of a few tokens.

    Args:
        decoder: The model without its head, in evaluation mode.
        vocab_size: Rows of its embedding.
    """
    device = next(decoder.parameters()).device
    ids = torch.arange(40, device=device).remainder(max(1, min(vocab_size, 97))).view(4, 10)
    ids[1, :6], ids[3, :4] = ids[0, :6], ids[2, :4]
    mask = torch.zeros(4, 9, dtype=torch.bool, device=device)
    for row, (prompt, length) in enumerate([(6, 10), (6, 8), (4, 7), (4, 10)]):
        mask[row, prompt - 1 : length - 1] = True
    lengths = torch.tensor([10, 8, 7, 10], device=device)
    prompts = torch.tensor([6, 6, 4, 4], device=device)
    index = torch.tensor([0, 0, 1, 1], device=device)
    batch = TrainBatch(ids, mask, lengths, prompts, index, mask)
    try:
        with torch.no_grad(), short_windows(decoder):
            plain = _plain_rows(decoder, batch, use_position_ids=True)
            shared = _shared_prefix_rows(decoder, batch)
    except Exception as error:  # noqa: BLE001 - any failure of an unknown architecture has the same remedy: plain rows
        logger.info("shared prefixes are off for %s: %s", type(decoder).__name__, error)
        return False
    close = equal_up_to_rounding(shared, plain)
    if not close:
        logger.info(
            "shared prefixes are off for %s: they differ from plain rows", type(decoder).__name__
        )
    return close


@contextlib.contextmanager
def recomputed_layers(decoder: nn.Module) -> Iterator[None]:
    """Gradient checkpointing by layer that also works in evaluation mode and with caches.

    transformers' own runs in training mode only, and drops caches.
    """
    layers = [
        module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    # A forward set on the instance (an offloading hook, say) must be there again afterwards.
    own = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.__dict__["forward"] = _recomputing(layer)
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            if forward is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = forward


def _recomputing(layer: nn.Module) -> Callable[..., Any]:
    """The layer's forward under ``checkpoint``; always the same object for the same forward.

    A compiled model guards on it: a new one per call would be compiled per call.
    """
    forward = layer.forward
    kept = layer.__dict__.get(_RECOMPUTING)
    if kept is None or kept.args[0] != forward:
        kept = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        layer.__dict__[_RECOMPUTING] = kept
    return kept


def remove_recomputation(model: nn.Module) -> None:
    """Remove what :func:`recomputed_layers` keeps on the layers of a model."""
    for module in model.modules():
        module.__dict__.pop(_RECOMPUTING, None)


def padded_tokens(batch: TrainBatch, rows: torch.Tensor, share_prefixes: bool) -> int:
    """Tokens, padding counted, that a forward over some rows runs."""
    shared = _shared_tokens(batch, rows) if share_prefixes else None
    return _plain_tokens(batch, rows) if shared is None else shared


def _plain_tokens(batch: TrainBatch, rows: torch.Tensor) -> int:
    return len(rows) * (int(batch.lengths[rows].max()) - 1)


def _shared_tokens(batch: TrainBatch, rows: torch.Tensor) -> int | None:
    """Tokens of rows that share their prompts, padding counted; None: sharing spares too few."""
    lengths, prompt_lengths = batch.lengths[rows], batch.prompt_lengths[rows]
    prompts = int(batch.prompt_index[rows].unique().numel())
    completion = int((lengths - prompt_lengths).max())
    shared = prompts * int(prompt_lengths.max()) + len(rows) * max(completion - 1, 0)
    return shared if 1.0 - shared / _plain_tokens(batch, rows) >= MIN_TOKENS_SAVED else None


def _plain_rows(decoder: nn.Module, batch: TrainBatch, use_position_ids: bool) -> torch.Tensor:
    width = int(batch.lengths.max()) - 1  # the last token predicts nothing that is trained
    positions = torch.arange(width, device=batch.token_ids.device).expand(len(batch), -1)
    mask = (positions < batch.lengths[:, None]).long()
    kwargs = {"position_ids": positions} if use_position_ids else {}
    output = decoder(
        input_ids=batch.token_ids[:, :width], attention_mask=mask, use_cache=False, **kwargs
    )
    return output.last_hidden_state[batch.action_mask[:, :width]]


def _shared_prefix_rows(decoder: nn.Module, batch: TrainBatch) -> torch.Tensor:
    device = batch.token_ids.device
    first_row, row_prompt = _distinct_prompts(batch)
    prompt_lengths = batch.prompt_lengths[first_row]
    width = int(prompt_lengths.max())

    # Left padding keeps a prompt next to its completions, which sliding windows count on.
    offset = torch.arange(width, device=device) - (width - prompt_lengths)[:, None]
    prompt_mask = offset >= 0
    prompt_ids = batch.token_ids[first_row].gather(1, offset.clamp(min=0))
    recorded = Cache(layer_class_to_replicate=_RecordedLayer)
    prompt_hidden = decoder(
        input_ids=prompt_ids,
        attention_mask=prompt_mask.long(),
        position_ids=offset.clamp(min=0),
        past_key_values=recorded,
        use_cache=True,
    ).last_hidden_state
    hidden = prompt_hidden[:, -1:].index_select(0, row_prompt)

    starts = batch.prompt_lengths
    steps = int((batch.lengths - starts).max()) - 1
    if steps > 0:
        prefix = Cache(
            layers=[
                _PrefixLayer(
                    layer.keys.index_select(0, row_prompt), layer.values.index_select(0, row_prompt)
                )
                for layer in recorded.layers
            ]
        )
        positions = starts[:, None] + torch.arange(steps, device=device)
        inside = positions < batch.lengths[:, None]
        completion_hidden = decoder(
            input_ids=batch.token_ids.gather(1, positions.clamp(max=batch.token_ids.shape[1] - 1)),
            attention_mask=torch.cat([prompt_mask[row_prompt], inside], dim=1).long(),
            # Padding stays within the row: models with learned positions have no more of them.
            position_ids=torch.minimum(positions, batch.lengths[:, None] - 1),
            past_key_values=prefix,
            use_cache=True,
        ).last_hidden_state
        hidden = torch.cat([hidden, completion_hidden], dim=1)

    # hidden[:, j] sits at position prompt_length - 1 + j of its row.
    positions = starts[:, None] - 1 + torch.arange(hidden.shape[1], device=device)
    actions = batch.action_mask.gather(1, positions.clamp(max=batch.action_mask.shape[1] - 1))
    return hidden[actions & (positions < batch.action_mask.shape[1])]


def _distinct_prompts(batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """First row of each distinct prompt, ``(p,)``, and each row's place among them, ``(B,)``."""
    _, place = batch.prompt_index.unique(return_inverse=True)
    rows = torch.arange(len(batch), device=place.device)
    first = torch.full((int(place.max()) + 1,), len(batch), device=place.device)
    return first.scatter_reduce(0, place, rows, reduce="amin"), place
