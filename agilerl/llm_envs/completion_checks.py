"""Checks of the completions that come back for the prompts an environment handed out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from agilerl.checks import require
from agilerl.typing import ReasoningPrompts

REMEDY = "pass the completion_ids that get_action returned for the prompts handed out last"


def check_completions(
    completion_ids: Any, prompts: Sequence[ReasoningPrompts], group_size: int | None = None
) -> None:
    """Check that ``completion_ids`` is a list with one ``(G, T)`` tensor of ids per prompt.

    Args:
        completion_ids: What the caller passed.
        prompts: The prompts handed out last.
        group_size: G; None: any.

    Raises:
        TypeError: Not a list of tensors of ids.
        ValueError: Another number of tensors, another shape, rows that do not start with their
            prompt.
    """
    require(
        isinstance(completion_ids, list | tuple),
        f"completion_ids is of type {type(completion_ids).__name__}; it must be a list of "
        f"tensors: {REMEDY}",
        TypeError,
    )
    require(
        len(completion_ids) == len(prompts),
        f"completion_ids has {len(completion_ids)} entries for the {len(prompts)} prompts handed "
        f"out; {REMEDY}",
    )
    for index, (ids, prompt) in enumerate(zip(completion_ids, prompts, strict=True)):
        check_completion(f"completion_ids[{index}]", ids, prompt["input_ids"], group_size)


def check_completion(
    name: str, ids: Any, prompt: torch.Tensor, group_size: int | None = None
) -> None:
    """Check that ``ids`` are ``(G, T)`` long, each row with the ``(1, P)`` prompt in front.

    Raises:
        TypeError: Not a tensor of ids.
        ValueError: Another shape, or other ids in front.
    """
    is_tensor = isinstance(ids, torch.Tensor)
    require(
        is_tensor and not ids.is_floating_point(),
        f"{name} is of type {ids.dtype if is_tensor else type(ids).__name__}; it must be a tensor "
        f"of token ids: {REMEDY}",
        TypeError,
    )
    length, shape = prompt.shape[1], tuple(ids.shape)
    require(
        len(shape) == 2 and shape[0] > 0 and group_size in (None, shape[0]),
        f"{name} has shape {shape}; it must be ({group_size or 'G'}, T), one row per completion: "
        f"{REMEDY}{', with repeat_prompts=False' if group_size == 1 else ''}",
    )
    require(
        shape[1] >= length and bool((ids[:, :length].cpu() == prompt.cpu()).all()),
        f"{name} does not start with the {length} tokens of its prompt; {REMEDY}",
    )


def check_answer_length(name: str, ids: torch.Tensor, prompt: torch.Tensor, env: Any) -> None:
    """Check that an answer, prompt included, is longer than its prompt and fits its environment.

    Raises:
        ValueError: No token after the prompt; or more tokens than the ``max_model_len`` that the
            environment may have, trailing ``pad_id`` not counted.
    """
    require(ids.shape[1] > prompt.shape[1], f"{name} has no token after its prompt; {REMEDY}")
    # Attributes that an environment of the user's may have.
    limit, pad_id = getattr(env, "max_model_len", None), getattr(env, "pad_id", None)
    tokens = torch.ones_like(ids[0], dtype=torch.bool) if pad_id is None else ids[0] != pad_id
    length = int(tokens.nonzero().max()) + 1 if tokens.any() else 0
    require(
        limit is None or length <= limit,
        f"{name} has {length} tokens, but max_model_len is {limit} in its environment: give the "
        "agent the same max_model_len, or a max_output_tokens that fits",
    )


def takes_action(step: Callable[..., Any]) -> bool:
    """Whether an environment's ``step`` takes the ``ActionResult`` beside its ids.

    One that overrides or wraps ``ReasoningGym.step`` may not.
    """
    return "action" in inspect.signature(step).parameters
