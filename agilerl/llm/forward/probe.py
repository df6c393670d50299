"""Probe which layouts of rows are exact on a model, on a few tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from agilerl.llm.batch import TrainBatch
from agilerl.llm.causal_lm import equal_up_to_rounding, short_windows
from agilerl.llm.config import RowLayout
from agilerl.llm.forward.hidden_states import packed_hidden_states, padded_hidden_states
from agilerl.llm.forward.packed_attention import can_attend_packed
from agilerl.llm.forward.prefix_cache_rows import prefix_cache_hidden_states

logger = logging.getLogger(__name__)


def fastest_layout(decoder: PreTrainedModel, vocab_size: int) -> RowLayout:
    """The layout that runs fewest tokens of those that are exact.

    Compares hidden states and gradients with those of padded rows on a ragged batch of a few
    tokens.

    Args:
        decoder: The model without its head, in evaluation mode.
        vocab_size: Rows of its embedding.
    """
    batch = _probed_batch(decoder, vocab_size)
    name = type(decoder).__name__
    candidates: dict[RowLayout, Callable[[], torch.Tensor]] = {
        "packed": lambda: packed_hidden_states(decoder, batch, recompute=False),
        "shared_prompts": lambda: prefix_cache_hidden_states(decoder, batch),
    }
    reasons: dict[RowLayout, str] = {}
    if not can_attend_packed(decoder):
        del candidates["packed"]
        reasons["packed"] = "there is no kernel for its attention implementation, dtype and device"
    with short_windows(decoder):
        padded = _states_and_gradient(
            decoder, lambda: padded_hidden_states(decoder, batch, use_position_ids=True)
        )
        for layout, hidden_states in candidates.items():
            try:
                made = _states_and_gradient(decoder, hidden_states)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - any failure of an unknown architecture has the same remedy: another layout
                reasons[layout] = str(error)
                continue
            if all(map(equal_up_to_rounding, made, padded)):
                if reasons:
                    logger.info("rows of %s are not packed: %s", name, reasons["packed"])
                return layout
            reasons[layout] = "results differ from those of padded rows"
    logger.info(
        "rows of %s are padded, and prompts run once per completion: %s",
        name,
        reasons["shared_prompts"],
    )
    return "padded"


def _states_and_gradient(
    decoder: PreTrainedModel, hidden_states: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states ``(N, D)``, and ``(D,)`` the sum of the embeddings' gradients."""
    leaves: list[torch.Tensor] = []

    def as_leaf(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    hook = decoder.get_input_embeddings().register_forward_hook(as_leaf)
    try:
        with torch.enable_grad():
            hidden = hidden_states()
            weights = torch.arange(hidden.numel(), device=hidden.device).cos().view(hidden.shape)
            gradients = torch.autograd.grad((hidden * weights).sum(), leaves)
    finally:
        hook.remove()
    return hidden.detach(), sum(g.flatten(0, -2).sum(0) for g in gradients)  # type: ignore[return-value]


def _probed_batch(decoder: nn.Module, vocab_size: int) -> TrainBatch:
    """Two prompts with completions of two lengths each, and one with a completion of one token."""
    device = next(decoder.parameters()).device
    ids = torch.arange(50, device=device).remainder(max(1, min(vocab_size, 97))).view(5, 10)
    ids[1, :6], ids[3, :4] = ids[0, :6], ids[2, :4]
    mask = torch.zeros(5, 9, dtype=torch.bool, device=device)
    for row, (prompt, length) in enumerate([(6, 10), (6, 8), (4, 7), (4, 10), (3, 4)]):
        mask[row, prompt - 1 : length - 1] = True
    lengths = torch.tensor([10, 8, 7, 10, 4], device=device)
    prompts = torch.tensor([6, 6, 4, 4, 3], device=device)
    index = torch.tensor([0, 0, 1, 1, 2], device=device)
    return TrainBatch(ids, mask, lengths, prompts, index, mask)
