"""Padded completions against copies of their prompt's keys and values.

For models that packed rows are not exact on: the prompt goes through the model once, with
gradients, its keys and values are copied for each of its completions, and the completions go
through as a batch against these. Any attention does; caches must be differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from agilerl.llm.batch import TrainBatch
from agilerl.llm.forward.packed_rows import distinct_prompts


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


def prefix_cache_hidden_states(decoder: nn.Module, batch: TrainBatch) -> torch.Tensor:
    """Hidden states ``(N, D)`` that predict the actions, in the order of ``batch.targets``."""
    device = batch.token_ids.device
    first_row, row_prompt = distinct_prompts(batch)
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
