"""Tokenizers that need no files: bytes, or byte pairs; four special tokens, a ChatML template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from agilerl.checks import COUNT, Number

PAD_TOKEN = "<|pad|>"
TURN_START_TOKEN = "<|im_start|>"
TURN_END_TOKEN = "<|im_end|>"
DOCUMENT_END_TOKEN = "<|endoftext|>"

SPECIAL_TOKENS = (PAD_TOKEN, TURN_START_TOKEN, TURN_END_TOKEN, DOCUMENT_END_TOKEN)
"""In the order of their ids, which follow the 256 bytes."""

PAD_TOKEN_ID, TURN_START_TOKEN_ID, TURN_END_TOKEN_ID, DOCUMENT_END_TOKEN_ID = range(256, 260)
VOCAB_SIZE = 260

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, without a default system message: nothing is added to the conversation."""


def byte_tokenizer(*, model_max_length: int = 2048) -> PreTrainedTokenizerFast:
    """Build the byte-level tokenizer: ids 0..255 are the bytes, 256..259 the special tokens.

    Any text survives ``decode(encode(text))`` unchanged. The end of a turn is the eos token, as in
    chat models, and the pad token is another one, so padding is never mistaken for an ending.

    Args:
        model_max_length: Tokens that the model can take, 1 or more.

    Returns:
        A fast tokenizer of 260 ids that pads on the left, as generation needs.

    Raises:
        ValueError: ``model_max_length`` is below 1.
    """
    core = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    # use_regex=False keeps the text whole: with no merges, splitting into words gains nothing.
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _chat_tokenizer(core, model_max_length)


def trained_tokenizer(
    texts: Iterable[str],
    vocab_size: int = 512,
    *,
    sentences: Sequence[str] = (),
    model_max_length: int = 2048,
) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer, for texts that repeat themselves as an environment's do.

    The first 260 ids, the special tokens and the chat template are those of
    :func:`byte_tokenizer`, so any text survives ``decode(encode(text))`` here too. Then come the
    merges learned from ``texts``, within words as Qwen2 splits text (every digit is a word of its
    own), and one id for each of ``sentences``.

    Args:
        texts: What to learn merges from, without special tokens. Frequent words get short.
        vocab_size: Ids at most, 260 or more; there are fewer where the texts have no more pairs.
        sentences: Parts to spell with one id each, wherever they occur: fixed instructions.
        model_max_length: Tokens that the model can take, 1 or more.

    Returns:
        A fast tokenizer that pads on the left. The same arguments give the same tokenizer.

    Raises:
        ValueError: ``vocab_size`` leaves no room for bytes, special tokens and sentences, or
            ``model_max_length`` is below 1.
    """
    least = VOCAB_SIZE + len(sentences)
    Number(least, integer=True)("vocab_size", vocab_size)
    core = Tokenizer(models.BPE())
    # Whatever splits a saved tokenizer says, AutoTokenizer puts these in for a Qwen2 model.
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=256 + vocab_size - least,
        initial_alphabet=list(_byte_vocabulary()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    merges = [(left, right) for left, right in json.loads(core.to_str())["model"]["merges"]]
    core.model = models.BPE(vocab=_merged_vocabulary(merges), merges=merges)
    core.add_tokens([AddedToken(sentence, normalized=False) for sentence in sentences])
    return _chat_tokenizer(core, model_max_length)


def _chat_tokenizer(core: Tokenizer, model_max_length: int) -> PreTrainedTokenizerFast:
    """Add what both tokenizers share: byte decoder, special tokens, chat template, padding."""
    COUNT("model_max_length", model_max_length)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD_TOKEN,
        eos_token=TURN_END_TOKEN,
        additional_special_tokens=[TURN_START_TOKEN, DOCUMENT_END_TOKEN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
        padding_side="left",
    )


def _merged_vocabulary(merges: list[tuple[str, str]]) -> dict[str, int]:
    """Number the bytes, then the special tokens, then what the merges give."""
    vocabulary = _byte_vocabulary()
    for token in SPECIAL_TOKENS:
        vocabulary[token] = len(vocabulary)
    for left, right in merges:
        # Two merges may give the same string: it keeps its first id.
        vocabulary.setdefault(left + right, len(vocabulary))
    return vocabulary


def _byte_vocabulary() -> dict[str, int]:
    """Map the printable stand-in of each byte (GPT-2's byte-level alphabet) to the byte's value.

    Bytes that are printable in Latin-1 stand for themselves; the others take the code points from
    256 on, in order. `pre_tokenizers.ByteLevel` uses this alphabet but does not say which is which.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(256 + rank) for rank, byte in enumerate(hidden)}
    return {stand_ins.get(byte, chr(byte)): byte for byte in range(256)}
