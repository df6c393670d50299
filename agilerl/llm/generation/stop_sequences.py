"""Stop sequences: texts that end a completion, found in the generated text as vLLM finds them.

Only generated text is searched, tokens that are special included, and the token that completes a
text is the completion's last. Both generators read ids with the same tokenizer, the one that lies
beside the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from agilerl.checks import require


@lru_cache(maxsize=8)
def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a model's name or path, as vLLM loads it.

    Raises:
        OSError: If there is none.
        ValueError: If it cannot be loaded without running code of its own, or is not a fast one.
    """
    # Without a tokenizer's files, AutoTokenizer makes an empty one of the model's type.
    cached_file(name, "tokenizer_config.json")
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    require(
        isinstance(tokenizer, PreTrainedTokenizerFast),
        f"the tokenizer of {name} is a {type(tokenizer).__name__}, which has no fast "
        "implementation (one of the tokenizers library)",
    )
    return tokenizer


def find_tokenizer(*names: str | None) -> PreTrainedTokenizerFast | None:
    """The tokenizer of the first of some models' names or paths that has one."""
    for name in filter(None, names):
        try:
            return load_tokenizer(name)
        except (OSError, ValueError, ImportError):
            continue
    return None


def required_tokenizer(
    argument: str, texts: Sequence[str], *names: str | None
) -> PreTrainedTokenizerFast:
    """Like :func:`find_tokenizer`, where stop sequences need one.

    Args:
        argument: Names the stop sequences in the message.
        texts: The stop sequences.
        *names: Where to look.

    Raises:
        ValueError: If there is none.
    """
    tokenizer = find_tokenizer(*names)
    if tokenizer is None:
        places = ", ".join(dict.fromkeys(filter(None, names))) or "it was loaded from no directory"
        raise ValueError(
            f"{argument} is {tuple(texts)}, and finding texts takes the model's tokenizer, but "
            f"there is no fast one beside the model ({places}): save both into one directory "
            "(model.save_pretrained, tokenizer.save_pretrained) and load the model from there, by "
            f"model_name or from_pretrained, or leave {argument} unset"
        )
    return tokenizer


class StopSequenceMatcher:
    """Reads the rows of a batch as they are generated.

    Args:
        tokenizer: From ids to text.
        texts: The stop sequences.
        prompts: The 1-D prompt of each row: how a token reads may depend on what precedes it.
        min_new_tokens: A text that is complete before a row has more tokens than this ends nothing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        prompts: Sequence[torch.Tensor],
        min_new_tokens: int = 0,
    ) -> None:
        self._tokenizer, self._texts, self._min_new_tokens = tokenizer, texts, min_new_tokens
        self._kept = max(map(len, texts)) - 1
        self._streams = [DecodeStream(ids=prompt.tolist()) for prompt in prompts]
        # The end of each row's generated text, as long as the beginning of a match can be.
        self._ends = [""] * len(prompts)

    def completes(self, rows: Sequence[int], tokens: Sequence[int], generated: int) -> list[bool]:
        """Add a token to each of some rows; True where it completes a stop sequence.

        Args:
            rows: Indices into the prompts.
            tokens: Their next tokens.
            generated: How many came before.
        """
        allowed = generated >= self._min_new_tokens
        return [self._add(row, token) and allowed for row, token in zip(rows, tokens, strict=True)]

    def _add(self, row: int, token: int) -> bool:
        new, end = self._read(row, token), self._ends[row]
        if not new:  # part of a character
            return False
        text = end + new
        self._ends[row] = text[max(len(text) - self._kept, 0) :]
        return any(text.find(stop, max(len(end) - len(stop) + 1, 0)) >= 0 for stop in self._texts)

    def _read(self, row: int, token: int) -> str:
        """The text that a token adds to its row."""
        try:
            return self._streams[row].step(self._tokenizer, token) or ""
        except Exception as error:
            # Invalid UTF-8 can change what was read before; like vLLM, go on from here.
            if "Invalid prefix" not in str(error):
                raise
            self._streams[row] = DecodeStream()
            return self._streams[row].step(self._tokenizer, token) or ""
