"""What a vLLM engine is asked for, wherever it runs, in plain data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from agilerl.llm.config import SamplingConfig
from agilerl.llm.generation.vllm.config import VLLMConfig


class EngineError(RuntimeError):
    """An engine died, hangs, or refused a request; says which, with its last log lines."""


@dataclass(frozen=True)
class StagedAdapter:
    """One version of an adapter, as PEFT writes it to disk."""

    name: str
    """Unlike that of every other version of every adapter, so that nothing cached is mistaken."""
    number: int
    """vLLM's ``lora_int_id``: of no other version in this process."""
    path: str


@dataclass(frozen=True)
class Request:
    """Completions to be sampled of one prompt."""

    prompt: list[int]
    parameters: dict[str, Any]
    """Of :class:`vllm.SamplingParams`, which the servers' requests share."""
    adapter: StagedAdapter


@dataclass(frozen=True)
class Sample:
    """One completion."""

    token_ids: list[int]
    logps: list[float] | None
    """Of its tokens under the temperature-scaled distribution, before penalties and filters."""


@dataclass(frozen=True)
class Answer:
    """What an engine made of a request."""

    samples: list[Sample]
    prompt_logps: list[float] | None = None
    """Of the prompt's tokens but the first at temperature 1, if asked for."""


class Engine(Protocol):
    """A vLLM engine; several agents on one base share it."""

    @property
    def ended(self) -> bool:
        """Whether it can serve nothing any more."""
        ...

    @property
    def sleep_level(self) -> int:
        """0: it never sleeps; 1: all comes back; 2: its adapters are lost with every sleep."""
        ...

    def awake(self) -> AbstractContextManager[None]:
        """Within it the engine holds its memory; may be nested."""
        ...

    def load_adapter(self, adapter: StagedAdapter) -> None:
        """Serve an adapter from now on."""
        ...

    def unload_adapter(self, adapter: StagedAdapter) -> None:
        """Serve it no longer, and forget what was cached of it."""
        ...

    def complete(self, requests: Sequence[Request]) -> list[Answer]:
        """Answers in the order of the requests.

        Raises:
            EngineError: The engine died, or made no progress for ``request_timeout`` seconds.
        """
        ...

    def complete_on_each(self, request: Request) -> dict[str, Answer]:
        """The answer of every engine behind this one, by what to call it in a sentence."""
        ...


def sampling_parameters(
    sampling: SamplingConfig, config: VLLMConfig, samples: int, max_tokens: int, seed: int
) -> dict[str, Any]:
    """The parameters of a request to vLLM.

    Ends of sequence are given as stop tokens, and the model's own are ignored, so that exactly the
    agent's end a completion and count for ``min_new_tokens``.
    """
    stop = [*sampling.stop_sequences, *(config.stop_sequences or ())]
    # Kept in the completion, and found in the text of special tokens too, as without vLLM.
    reading = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    return {
        "n": samples,
        "seed": seed,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "min_tokens": min(sampling.min_new_tokens, max_tokens),
        "max_tokens": max_tokens,
        "stop_token_ids": list(sampling.eos_token_ids),
        "ignore_eos": True,
        "logprobs": 0 if sampling.return_logps else None,
        **({"stop": stop, **reading} if stop else {}),
    }
