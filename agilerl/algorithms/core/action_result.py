"""What ``get_action`` takes and returns: from prompt dicts to ids, from ids to ``ActionResult``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from agilerl.checks import require
from agilerl.llm.batch import stack_rows
from agilerl.llm.generation import Completions, GenerationRequest, new_token_limit
from agilerl.typing import ActionResult, ReasoningPrompts


def unpadded_prompts(obs: Sequence[ReasoningPrompts] | ReasoningPrompts) -> list[torch.Tensor]:
    """The 1-D ids of prompts, without padding on either side; copies, so ``obs`` stays as it is.

    Raises:
        TypeError: If a prompt is no dict with ``input_ids`` and ``attention_mask`` tensors.
        ValueError: If there is no prompt, or a dict does not hold exactly one.
    """
    require(
        isinstance(obs, Mapping | Sequence) and not isinstance(obs, str),
        f"obs is of type {type(obs).__name__}; it must be a list of prompt dicts",
        TypeError,
    )
    prompts = [
        _unpadded(i, prompt) for i, prompt in enumerate([obs] if isinstance(obs, Mapping) else obs)
    ]
    require(bool(prompts), "obs is empty; it must hold at least one prompt")
    return prompts


def _unpadded(index: int, prompt: Any) -> torch.Tensor:
    names = ("input_ids", "attention_mask")
    if not isinstance(prompt, Mapping) or not all(
        isinstance(prompt.get(name), torch.Tensor) for name in names
    ):
        raise TypeError(
            f"obs[{index}] is {prompt!r}; it must be a dict with tensors {names[0]!r} and "
            f"{names[1]!r} of shape (1, P), as tokenizer(text, return_tensors='pt') gives"
        )
    ids, mask = (prompt[name] for name in names)
    require(
        ids.shape == mask.shape and ids.numel() == ids.shape[-1],
        f"obs[{index}] has input_ids of shape {tuple(ids.shape)} and attention_mask of shape "
        f"{tuple(mask.shape)}; both must be (1, P), one prompt per dict",
    )
    return ids.reshape(-1)[mask.reshape(-1).bool()].cpu().long()


def action_result(
    request: GenerationRequest, completions: Completions, pad_token_id: int
) -> ActionResult:
    """Put completions behind their prompts, ``samples_per_prompt`` rows per prompt."""
    ids, masks, reasons = [], [], []
    samples, sampling = request.samples_per_prompt, request.sampling
    for i, prompt in enumerate(request.prompts):
        group = completions.token_ids[i * samples : (i + 1) * samples]
        rows = [torch.cat([prompt, completion]) for completion in group]
        ids.append(stack_rows(rows, pad_token_id))
        position = torch.arange(ids[-1].shape[1] - 1)
        # From lengths, not from ids: the sampled end-of-sequence token may be the padding's id.
        ends = torch.tensor([len(row) - 1 for row in rows])
        masks.append((position >= len(prompt) - 1) & (position < ends[:, None]))
        limit = new_token_limit(prompt, sampling)
        reasons.append([_finish_reason(each, limit, sampling.eos_token_ids) for each in group])
    logps: list[torch.Tensor | None] | None = (
        None if completions.logps is None else list(completions.logps)
    )
    return ActionResult(ids, masks, logps, reasons)


def _finish_reason(completion: torch.Tensor, limit: int, eos_token_ids: Sequence[int]) -> str:
    """Why a 1-D completion ended: a stop sequence that the very last token completes is missed."""
    cut_off = len(completion) == limit and int(completion[-1]) not in eos_token_ids
    return "length" if cut_off else "stop"
