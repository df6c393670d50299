"""A tokenizer that needs no files: one id per byte, four special tokens, a ChatML chat template."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
    if model_max_length < 1:
        raise ValueError(f"model_max_length must be 1 or more, got {model_max_length}")
    core = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    # use_regex=False keeps the text whole: with no merges, splitting into words gains nothing.
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
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


def _byte_vocabulary() -> dict[str, int]:
    """Map the printable stand-in of each byte (GPT-2's byte-level alphabet) to the byte's value.

    Bytes that are printable in Latin-1 stand for themselves; the others take the code points from
    256 on, in order. `pre_tokenizers.ByteLevel` uses this alphabet but does not say which is which.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(256 + rank) for rank, byte in enumerate(hidden)}
    return {stand_ins.get(byte, chr(byte)): byte for byte in range(256)}
