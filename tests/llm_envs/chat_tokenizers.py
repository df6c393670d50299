"""Byte-level tokenizers with chat templates of the shapes that model families use."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agilerl.testing import byte_tokenizer

LOOP = "{% for message in messages %}"
CHATML = (
    LOOP + "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Trims contents, as Llama 3 does; the text begins with a BOS that the template writes.
LLAMA3 = (
    "{{ '<|begin|>' }}" + LOOP + "{{ '<|header|>' + message['role'] + '<|end_header|>\\n\\n' "
    "+ message['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\\n\\n' }}{% endif %}"
)
# Knows no system role, calls the assistant "model".
GEMMA = (
    "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    + LOOP
    + "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start>' + role + '\\n' + message['content'] | trim + '<end>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>model\\n' }}{% endif %}"
)
# The system prompt stands in the last user message; a turn ends with the eos; no header.
MISTRAL = (
    "{{ '<s>' }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if message['role'] == 'user' %}{{ '[INST]' }}"
    "{% if loop.last and system is defined %}{{ system + '\\n\\n' }}{% endif %}"
    "{{ message['content'] + '[/INST]' }}{% else %}{{ message['content'] + '</s>' }}{% endif %}"
    "{% endfor %}"
)
# Drops the reasoning of earlier answers, as Qwen 3 does.
REASONING = (
    LOOP + "{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and '</think>' in content and not loop.last %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

STYLES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "llama3": (LLAMA3, ("<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>"), "<|eot|>"),
    "gemma": (GEMMA, ("<bos>", "<start>", "<end>"), "<end>"),
    "mistral": (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>"),
    "reasoning": (REASONING, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
}
"""Template, special tokens, and which of these ends a turn."""

VOCAB_SIZE = 264


def chat_tokenizer(style: str) -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are the bytes, 256 is the padding, then the special tokens of the style."""
    template, specials, end = STYLES[style]
    core = Tokenizer(models.BPE(vocab=_bytes(), merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    names = ("<pad>", *specials)
    core.add_special_tokens([AddedToken(n, normalized=False, special=True) for n in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token=end,
        additional_special_tokens=[name for name in specials if name != end],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _bytes() -> dict[str, int]:
    vocabulary = byte_tokenizer().get_vocab()
    return {token: token_id for token, token_id in vocabulary.items() if token_id < 256}
