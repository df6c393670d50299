"""Whether an engine computes what the trainer computes, asked with a short fixed sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from agilerl.llm.generation.vllm.config import VLLMConfig
from agilerl.llm.generation.vllm.engine import Answer, EngineError
from agilerl.llm.policy import Policy

LENGTH = 24
"""Tokens of the sequence."""
TEMPERATURE = 2.0
"""Of the one token that is sampled after it, with the filter ``top_k=1``. Its log-prob at this
temperature, at temperature 1, and after the filter (0) are apart even where the model is sure."""


class PolicyMismatchError(EngineError):
    """The policy that is sampled is not the one that is trained."""


@dataclass(frozen=True)
class Expected:
    """What the trainer's weights say of the sequence."""

    logps: torch.Tensor
    """``(LENGTH - 1,)`` float32, of all tokens but the first, at temperature 1."""
    next_token: int
    """The most likely one after it."""
    next_logp: float
    """Its log-prob at :data:`TEMPERATURE`."""
    next_raw_logp: float
    """At temperature 1."""


def probe_sequence(vocab_size: int) -> list[int]:
    """Token ids spread over the vocabulary."""
    return [(7919 * n + 11) % vocab_size for n in range(LENGTH)]


def probe_parameters() -> dict[str, Any]:
    """The request's, for :class:`vllm.SamplingParams`."""
    return {
        "n": 1, "seed": 0, "temperature": TEMPERATURE, "top_k": 1, "max_tokens": 1,
        "prompt_logprobs": 0, "logprobs": 0, "ignore_eos": True,
    }  # fmt: skip


@torch.no_grad()
def expected_logprobs(policy: Policy) -> Expected:
    """What the trainer computes under its role; on a partitioned base all ranks together."""
    base = policy.base
    ids = torch.tensor([probe_sequence(base.model.config.get_text_config().vocab_size)])
    with base.whole(), policy.as_role(policy.role):
        # The whole model: it applies whatever it does to its logits.
        logits = policy.model(input_ids=ids.to(policy.device), use_cache=False).logits[0].float()
    if not bool(logits.isfinite().all()):
        raise RuntimeError(
            "the model's logits hold NaN or inf: its weights have diverged (was the learning rate "
            "too high?) or its dtype overflows"
        )
    logps = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None].to(logits.device)).squeeze(1)
    scaled = (logits[-1] / TEMPERATURE).log_softmax(-1)
    raw = logits[-1].log_softmax(-1)
    return Expected(logps.cpu(), int(scaled.argmax()), float(scaled.max()), float(raw.max()))


def compare(
    name: str,
    expected: Expected,
    answer: Answer,
    config: VLLMConfig,
    dtype: str,
    last: tuple[Expected, Answer] | None = None,
) -> float:
    """The mean difference, in nats, of the log-probs of the sequence.

    Args:
        name: What to call the engine in a message.
        expected: What the trainer computes.
        answer: What the engine does.
        config: Has the tolerance.
        dtype: The trainer's.
        last: The same of the last version. A step may change log-probs by less than the tolerance;
            an engine that still serves the old version gives itself away by not changing at all.

    Raises:
        PolicyMismatchError: It is above the tolerance; or the engine reports log-probs of another
            temperature, or after its filters.
    """
    found = torch.tensor(answer.prompt_logps)
    tolerance = config.tolerance(dtype)
    difference = float((found - expected.logps).abs().mean())
    if not difference <= tolerance:  # nan too
        raise PolicyMismatchError(
            f"the policy that {name} samples is not the one that is trained: their log-probs of a "
            f"fixed sequence differ by {difference:.3g} nats on average, and the tolerance is "
            f"{tolerance:g}. It may serve another base model (vllm_config."
            "vllm_model_name_or_path), an old version of the adapter, or compute in another "
            "precision (vllm_config.probe_tolerance)"
        )
    if last is not None and answer.prompt_logps == last[1].prompt_logps:
        moved = float((expected.logps - last[0].logps).abs().mean())
        if moved > tolerance / 100:
            raise PolicyMismatchError(
                f"the policy that {name} samples is not the one that is trained: log-probs of a "
                f"fixed sequence have moved by {moved:.3g} nats on average, and {name}'s have not "
                "moved. It serves an old version of the adapter"
            )
    sample = answer.samples[0]
    if sample.token_ids == [expected.next_token] and sample.logps is not None:
        reported = sample.logps[0]
        others = min(abs(reported), abs(reported - expected.next_raw_logp))
        if others + 1e-3 < abs(reported - expected.next_logp):
            raise PolicyMismatchError(
                f"{name} reports log-probs of its samples at another temperature, or after its "
                f"filters: {sample.logps[0]:.4f} where the trainer computes "
                f"{expected.next_logp:.4f}. Start the servers with --worker-extension-cls "
                "agilerl.llm.generation.vllm.sampler_extension.TrainerLogprobs"
            )
    return difference
