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
# Gives answers after the last message of the user reasoning, be it empty, as Qwen 3 does.
ADDED_REASONING = (
    "{% set last = namespace(user=0) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    + LOOP
    + "{{ '<|im_start|>' + message['role'] + '\\n' }}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' %}{% set parts = content.split('</think>') %}"
    "{% set content = parts[-1].lstrip('\\n') %}{% if loop.index0 > last.user %}"
    "{% set thought = parts[0] if parts | length > 1 else '' %}"
    "{{ '<think>\\n' + thought.split('<think>')[-1].strip('\\n') + '\\n</think>\\n\\n' }}"
    "{% endif %}{% endif %}{{ content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

PHI = (
    LOOP + "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

# Shows tools in the system message, and results of tools in one message of the user, as Qwen does.
HERMES = (
    "{% set own = messages[0]['role'] == 'system' %}"
    "{% if tools %}{{ '<|im_start|>system\\n' + (messages[0]['content'] + '\\n\\n' if own else '') "
    "+ '# Tools\\n' }}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% elif own %}"
    "{{ '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{% if messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\\n' }}"
    "{% endif %}{% elif message['role'] != 'system' %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Shows tools before the last message of the user, and knows two roles that take turns.
STRICT = (
    "{% for message in messages %}"
    "{% if message['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if tools and loop.index0 + 2 >= messages | length and message['role'] == 'user' %}"
    "{{ '[TOOLS]' + (tools | tojson) }}{% endif %}"
    "{{ '[' + message['role'] + ']' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)

STYLES: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
    "llama3": (LLAMA3, ("<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>"), *["<|eot|>"] * 2),
    # These two end a turn with a token that is special, but not one of the tokenizer's named ones.
    "gemma": (GEMMA, ("<bos>", "<eos>", "<start>", "<end>"), "<eos>", "<end>"),
    "phi": (PHI, ("<eos>", "<|user|>", "<|assistant|>", "<|end|>"), "<eos>", "<|end|>"),
    "mistral": (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "</s>"),
    "hermes": (HERMES, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
    "strict": (STRICT, ("</s>", "[user]", "[assistant]"), "</s>", "</s>"),
    "reasoning": (REASONING, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
    "added": (ADDED_REASONING, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
}
"""Template, special tokens, the tokenizer's eos, and what ends a turn."""

VOCAB_SIZE = 264


def chat_tokenizer(style: str) -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are the bytes, 256 is the padding, then the special tokens of the style."""
    template, specials, eos, _ = STYLES[style]
    core = Tokenizer(models.BPE(vocab=_bytes(), merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    names = ("<pad>", *specials)
    core.add_special_tokens([AddedToken(n, normalized=False, special=True) for n in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token=eos,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def turn_end(style: str, tokenizer: PreTrainedTokenizerFast) -> int:
    """Id of the token that ends a turn."""
    return int(tokenizer.convert_tokens_to_ids(STYLES[style][3]))


def _bytes() -> dict[str, int]:
    vocabulary = byte_tokenizer().get_vocab()
    return {token: token_id for token, token_id in vocabulary.items() if token_id < 256}
