"""Hidden states at the action positions of a batch.

The completions of a prompt share it, so a forward needs P + G·C tokens, not G·(P + C). Rows are
laid out in the first of these ways that is exact on a model:

* ``"packed"``: the tokens of all prompts and completions in one row, without padding.
* ``"shared_prompts"``: prompts as a padded batch, then completions as one, each against a copy of
  its prompt's keys and values.
* ``"padded"``: prompt and completion as a row of a padded batch.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from agilerl.llm.batch import TrainBatch
from agilerl.llm.config import ForwardConfig, RowLayout
from agilerl.llm.forward.packed_attention import PackedAttention, attending_packed
from agilerl.llm.forward.packed_rows import PackedRows, packed_tokens
from agilerl.llm.forward.prefix_cache_rows import prefix_cache_hidden_states
from agilerl.llm.forward.recomputation import recomputed_layers

# Below this share of tokens saved, the second model call costs more than the tokens it spares.
MIN_TOKENS_SAVED = 0.15


def action_hidden_states(
    decoder: nn.Module, batch: TrainBatch, config: ForwardConfig, layout: RowLayout
) -> torch.Tensor:
    """Hidden states that predict the actions of a batch.

    Args:
        decoder: The model without its head.
        batch: The rows.
        config: Recomputation and position ids.
        layout: How the rows are laid out; one that is exact on this model.

    Returns:
        ``(N, D)``, in the order of ``batch.targets``.
    """
    recompute = config.recompute_layers and torch.is_grad_enabled()
    if layout == "packed":
        return packed_hidden_states(decoder, batch, recompute=recompute)
    with recomputed_layers(decoder) if recompute else contextlib.nullcontext():
        rows = torch.arange(len(batch), device=batch.device)
        if layout == "shared_prompts" and _shared_tokens(batch, rows) is not None:
            return prefix_cache_hidden_states(decoder, batch)
        return padded_hidden_states(decoder, batch, use_position_ids=config.use_position_ids)


def tokens_run(batch: TrainBatch, rows: torch.Tensor, layout: RowLayout) -> int:
    """Tokens, padding counted, that a forward over some rows runs."""
    if layout == "packed":
        return packed_tokens(batch, rows)
    shared = _shared_tokens(batch, rows) if layout == "shared_prompts" else None
    return _padded_tokens(batch, rows) if shared is None else shared


def _padded_tokens(batch: TrainBatch, rows: torch.Tensor) -> int:
    return len(rows) * (int(batch.lengths[rows].max()) - 1)


def _shared_tokens(batch: TrainBatch, rows: torch.Tensor) -> int | None:
    """Tokens of rows that share their prompts, padding counted; None: sharing spares too few."""
    lengths, prompt_lengths = batch.lengths[rows], batch.prompt_lengths[rows]
    prompts = int(batch.prompt_index[rows].unique().numel())
    completion = int((lengths - prompt_lengths).max())
    shared = prompts * int(prompt_lengths.max()) + len(rows) * max(completion - 1, 0)
    return shared if 1.0 - shared / _padded_tokens(batch, rows) >= MIN_TOKENS_SAVED else None


def packed_hidden_states(decoder: nn.Module, batch: TrainBatch, *, recompute: bool) -> torch.Tensor:
    """The same in the layout ``"packed"``."""
    return packed_rows_hidden_states(decoder, PackedRows.of(batch), recompute=recompute)


def packed_rows_hidden_states(
    decoder: nn.Module, rows: PackedRows, *, recompute: bool
) -> torch.Tensor:
    """The same of rows that are packed already."""
    attention = PackedAttention(rows)

    def attending() -> contextlib.AbstractContextManager[None]:
        return attending_packed(decoder, attention)

    recomputation = recomputed_layers(decoder, attending) if recompute else contextlib.nullcontext()
    with attending(), recomputation:
        output = decoder(input_ids=rows.token_ids, position_ids=rows.positions, use_cache=False)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden[0].index_select(0, rows.predictors)


def padded_hidden_states(
    decoder: nn.Module, batch: TrainBatch, *, use_position_ids: bool
) -> torch.Tensor:
    """The same in the layout ``"padded"``."""
    width = int(batch.lengths.max()) - 1  # the last token predicts nothing that is trained
    positions = torch.arange(width, device=batch.token_ids.device).expand(len(batch), -1)
    mask = (positions < batch.lengths[:, None]).long()
    kwargs = {"position_ids": positions} if use_position_ids else {}
    output = decoder(
        input_ids=batch.token_ids[:, :width], attention_mask=mask, use_cache=False, **kwargs
    )
    hidden: torch.Tensor = output.last_hidden_state
    return hidden[batch.action_mask[:, :width]]
