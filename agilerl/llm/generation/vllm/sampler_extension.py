"""Has vLLM report the log-probs that the trainer computes; imported in vLLM's processes only.

Trainer and sampler must mean the same distribution, or every importance weight is biased: vLLM
reports log-probs either before temperature (``raw_logprobs``) or after penalties and filters, which
are renormalised over the tokens that were kept (``processed_logprobs``). The trainer has the
temperature but no filters, because the ratio of the objective is of policies, not of what a filter
left of them. So the sampler is adapted: importing this module gives vLLM's samplers a third mode in
place of ``raw_logprobs``, after temperature and before penalties and filters.

For a server: ``--worker-extension-cls
agilerl.llm.generation.vllm.sampler_extension.TrainerLogprobs``.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2

_GREEDY = 1e-5  # temperatures below it are greedy, and their log-probs those of temperature 1


class TrainerLogprobs:
    """Named as vLLM's ``worker_extension_cls`` so that its workers import this module."""


def _scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    divisor = torch.where(temperature < _GREEDY, 1.0, temperature)
    return logits.float() / divisor.unsqueeze(1)


_forward = Sampler.forward


def _forward_scaled(
    self: Sampler, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any
) -> Any:
    """Vllm's, computing ``raw_logprobs`` at the temperature of each request."""
    temperature = sampling_metadata.temperature  # None where all are greedy

    def compute_logprobs(raw: torch.Tensor) -> torch.Tensor:
        scaled = raw if temperature is None else _scaled(raw, temperature)
        return Sampler.compute_logprobs(scaled)

    self.compute_logprobs = compute_logprobs
    try:
        return _forward(self, logits, sampling_metadata, *args, **kwargs)
    finally:
        del self.compute_logprobs  # prompts' log-probs have no temperature


_call_v2, _sample_v2 = SamplerV2.__call__, SamplerV2.sample


def _call_scaled_v2(self: SamplerV2, *args: Any, **kwargs: Any) -> Any:
    """Model runner V2's, reporting what the patched ``sample`` returns second."""
    mode, self.logprobs_mode = self.logprobs_mode, "processed_logprobs"
    try:
        return _call_v2(self, *args, **kwargs)
    finally:
        self.logprobs_mode = mode


def _sample_scaled_v2(
    self: SamplerV2,
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Model runner V2's, with scaled logits where it returns the filtered ones."""
    sampled, filtered = _sample_v2(self, logits, expanded_idx_mapping, *args, **kwargs)
    if not kwargs["return_logprobs"]:
        return sampled, filtered
    temperature = self.sampling_states.temperature.gpu[expanded_idx_mapping]
    return sampled, _scaled(logits, temperature)


Sampler.forward = _forward_scaled
SamplerV2.__call__ = _call_scaled_v2
SamplerV2.sample = _sample_scaled_v2

if current_platform.is_cpu():
    import agilerl.llm.generation.vllm.cpu_lora  # noqa: F401 - replaces functions of vLLM
