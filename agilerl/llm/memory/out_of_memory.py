"""What an out-of-memory error says: what takes most by the estimate, and which settings help."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from agilerl.llm.memory.estimate import Estimator, MemoryEstimate, readable
from agilerl.llm.memory.settings import MemorySettings

Phase = Literal["rollout", "update"]

# A setting that saves less is not worth naming.
LEAST_SAVING = 0.03


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or on a CPU the process, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextlib.contextmanager
def explained_out_of_memory(
    phase: Phase, model: PreTrainedModel, settings: Callable[[], MemorySettings]
) -> Iterator[None]:
    """Within it an out-of-memory error is raised anew, of the same type, with what to do.

    Args:
        phase: What is run.
        model: The base.
        settings: Gives the sizes that it is run with.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        # The tensors of the failed step are free from here on.
        traceback.clear_frames(error.__traceback__)
        try:
            text = advice(phase, model, settings())
        except Exception as failure:  # noqa: BLE001 - the error to report is the first one
            text = f"What takes how much could not be estimated: {failure!r}"
        raise type(error)(f"{error}\n{text}") from error


def advice(phase: Phase, model: PreTrainedModel, settings: MemorySettings) -> str:
    """What takes most, and the two settings that save most, with their values.

    Args:
        phase: Of which part of the step.
        model: The base.
        settings: As it is now.
    """
    estimator = Estimator(model, settings)
    now = estimator.estimate(settings)
    owner, size = max(_owners(phase, now).items(), key=lambda item: item[1])
    peak = _peak(phase, now)
    found = []
    for name, value, changes in _remedies(phase, settings):
        then = _peak(phase, estimator.estimate(replace(settings, **changes)))
        if then < (1 - LEAST_SAVING) * peak:
            # Shorter completions are another task: named where nothing else is left.
            found.append((name == "max_output_tokens", then, f"{name}={value} ({readable(then)})"))
    helps = " and ".join(text for *_, text in sorted(found)[:2])
    return (
        f"By estimate the {phase} takes {readable(peak)}, of which {owner} {readable(size)}. "
        + (f"What helps most: {helps}." if helps else "A smaller base, or a quantized one, helps.")
    )


def _peak(phase: Phase, estimate: MemoryEstimate) -> int:
    return estimate.rollout_peak if phase == "rollout" else estimate.update_peak


def _owners(phase: Phase, estimate: MemoryEstimate) -> dict[str, int]:
    """What only this part of the step has."""
    if phase == "rollout":
        return {
            "the cache of keys and values takes": estimate.kv_cache,
            "merged copies of weights take": estimate.merged_copies,
            "the forward over the prompts takes": estimate.prefill,
            "the logits of a decoding step take": estimate.decoding,
        }
    return {
        "activations take": estimate.activations + estimate.backward,
        "the logits tile takes": estimate.logits_tile,
    }


def _remedies(phase: Phase, settings: MemorySettings) -> list[tuple[str, Any, dict[str, Any]]]:
    """Settings that take less: an agent's argument, its value, and what changes here."""
    found: list[tuple[str, Any, dict[str, Any]]] = []
    longest = max(settings.completion_lengths)
    if longest > 1:
        found.append(("max_output_tokens", longest // 2, {"completion_tokens": longest // 2}))
    if phase == "rollout":
        chunk = settings.chunk_prompts
        if chunk > 1:
            change = {"hf_generate_chunk_size": chunk // 2}
            found.append(("hf_generate_chunk_size", chunk // 2, change))
        return found
    rows, tokens = settings.micro_batch_size, settings.micro_batch_tokens
    if rows > 1 and tokens is not None:
        tokens = min(tokens, settings.tokens_run(settings.micro_batch)) // 2
        found.append(("micro_batch_tokens", tokens, {"micro_batch_tokens": tokens}))
    elif rows > 1:
        rows = rows // 2
        found.append(("micro_batch_size_per_gpu", rows, {"micro_batch_size_per_gpu": rows}))
    if not settings.gradient_checkpointing:
        found.append(("gradient_checkpointing", True, {"gradient_checkpointing": True}))
    return found
