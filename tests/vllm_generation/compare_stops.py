"""Random token streams through vLLM's detokenizer and ours; ends with an error where they differ.

A process of its own, as the trainer does not import vllm.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from agilerl.llm.generation.stop_sequences import StopSequenceMatcher
from agilerl.testing import byte_tokenizer

STREAMS, LENGTH = 400, 80


def byte_fallback() -> PreTrainedTokenizerFast:
    """As of Llama 2: what is not in the vocabulary is spelt in bytes."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {piece: 257 + i for i, piece in enumerate(("▁", "▁ab", "ab", "b", "é", "ba▁"))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")


def vllm_stop(
    tokenizer: PreTrainedTokenizerFast,
    prompt: list[int],
    tokens: list[int],
    stops: list[str],
    least: int,
) -> int | None:
    """Tokens of the completion that vLLM makes of a stream; None: nothing ends it."""
    parameters = SamplingParams(
        stop=stops,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        min_tokens=least,
        max_tokens=LENGTH,
    )
    request = SimpleNamespace(
        request_id="0", prompt_token_ids=prompt, prompt_embeds=None, sampling_params=parameters
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    for count, token in enumerate(tokens, 1):
        if detokenizer.update([token], False) is not None:
            return count
    return None


def our_stop(
    tokenizer: PreTrainedTokenizerFast,
    prompt: list[int],
    tokens: list[int],
    stops: list[str],
    least: int,
) -> int | None:
    """The same of ours."""
    matcher = StopSequenceMatcher(tokenizer.backend_tokenizer, stops, [torch.tensor(prompt)], least)
    for step, token in enumerate(tokens):
        if matcher.completes([0], [token], step)[0]:
            return step + 1
    return None


def main() -> None:
    stopped = 0
    for name, tokenizer, top in (
        ("bytes", byte_tokenizer(), 260),
        ("byte fallback", byte_fallback(), 264),
    ):
        for seed in range(STREAMS):
            rng = random.Random(seed)
            # Few different ids, so that texts come again; now and then any.
            few = [rng.randrange(1, top) for _ in range(4)] + list(range(top - 8, top))
            prompt, tokens = (
                [rng.choice(few) if rng.random() < 0.9 else rng.randrange(top) for _ in range(n)]
                for n in (rng.randrange(1, 6), LENGTH)
            )
            text = tokenizer.decode(tokens)
            stops = [
                text[at : at + rng.randrange(1, 8)] or "a"
                for at in (rng.randrange(len(text) or 1) for _ in range(rng.randrange(1, 4)))
            ]
            least = rng.choice([0, 0, 1, 5, 30])
            case = (tokenizer, prompt, tokens, stops, least)
            expected, found = vllm_stop(*case), our_stop(*case)
            assert found == expected, (name, seed, expected, found)
            stopped += found is not None
    print(f"{stopped} of {2 * STREAMS} streams stopped")


if __name__ == "__main__":
    main()
