r"""From messages to a tokenised prompt: fill the template, render the conversation, tokenise it.

With ``[{"role": "user", "content": "Q: {question}\nA:"}]`` and the question ``2+2?``::

    fill_template         [{"role": "user", "content": "Q: 2+2?\nA:"}]
    render_conversation   "<|im_start|>user\nQ: 2+2?\nA:<|im_end|>\n<|im_start|>assistant\n"
    ... no chat template  "Q: 2+2?\nA:"
    PromptEncoder.encode  [{"input_ids": (1, P), "attention_mask": (1, P), "text": that text}]
"""

from __future__ import annotations

import datetime
import decimal
import json
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from jinja2 import TemplateError

from agilerl.checks import require, shorten, warn_once
from agilerl.typing import ReasoningPrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages, each with a ``role`` and a ``content``, which are strings; other keys, such as
``tool_calls``, are the chat template's."""

EXAMPLE_TEMPLATE = '[{"role": "user", "content": "{question}"}]'
"""A conversation template for messages to users."""

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_WRITTEN_BY_STR = (datetime.date, datetime.time, decimal.Decimal, uuid.UUID)
_SET_BY_RENDERER = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict",
    "return_tensors", "tokenize", "tokenizer_kwargs", "truncation",
)  # fmt: skip


def check_template(conversation_template: Conversation) -> None:
    """Check that a template is a list of messages.

    Raises:
        TypeError: It is not a list of messages whose role and content are strings.
    """
    remedy = f"pass for example {EXAMPLE_TEMPLATE}"
    require(
        isinstance(conversation_template, Sequence) and not isinstance(conversation_template, str),
        f"conversation_template is of type {type(conversation_template).__name__}; it must be a "
        f"list of messages: {remedy}",
        TypeError,
    )
    for index, message in enumerate(conversation_template):
        require(
            isinstance(message, Mapping)
            and all(isinstance(message.get(key), str) for key in ("role", "content")),
            f"conversation_template[{index}] is {message!r}; it must be a dict whose 'role' and "
            f"'content' are strings: {remedy}",
            TypeError,
        )


def placeholders(conversation_template: Conversation) -> list[str]:
    """What stands between braces in the contents of a template, in order, each once."""
    found = [_PLACEHOLDER.findall(message["content"]) for message in conversation_template]
    return list(dict.fromkeys(name for names in found for name in names))


def fill_template(
    conversation_template: Conversation, values: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Replace ``{name}`` by the value of that name; every other brace stays as it is.

    The inserted text is not searched again, so a question may itself contain ``{question}``.

    Raises:
        TypeError: A value that cannot be shown as text.
    """

    # str.format would take any other brace, in the template or of a set or LaTeX, for a field.
    def fill(found: re.Match[str]) -> str:
        return as_text(values[found[1]]) if found[1] in values else found[0]

    return [
        {**message, "content": _PLACEHOLDER.sub(fill, message["content"])}
        for message in conversation_template
    ]


def as_text(value: Any) -> str:
    """A value as a prompt shows it: a string as it is, all else as JSON (dates as usual).

    A list is ``[3, 5, 7]``, a number ``24``, a dict ``{"x": 1}``.

    Raises:
        TypeError: The value is, or holds, something that is no text, such as an image.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, _WRITTEN_BY_STR):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=_as_json)


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    require(
        isinstance(value, _WRITTEN_BY_STR),
        f"a value of type {type(value).__name__} cannot be shown as text",
        TypeError,
    )
    return str(value)


def check_template_arguments(
    chat_template_kwargs: Mapping[str, Any] | None, chat_template: str | None
) -> dict[str, Any]:
    """Check further arguments of the chat template.

    Args:
        chat_template_kwargs: Such as ``{"enable_thinking": False}``.
        chat_template: The template that gets them; None: there is none.

    Returns:
        They, ``{}`` for None.

    Raises:
        TypeError: Not a dict by name.
        ValueError: An argument that is set here already.
    """
    if chat_template_kwargs is None:
        return {}
    require(
        isinstance(chat_template_kwargs, Mapping)
        and all(isinstance(name, str) for name in chat_template_kwargs),
        f"chat_template_kwargs is {shorten(chat_template_kwargs)}; it must be a dict by name, such "
        'as {"enable_thinking": False}, or None',
        TypeError,
    )
    for name in chat_template_kwargs:
        remedy = "leave it out"
        if name == "chat_template":
            remedy = "set tokenizer.chat_template instead"
        require(
            name not in _SET_BY_RENDERER,
            f"chat_template_kwargs has {name!r}, which is set by the rendering itself: {remedy}",
        )
    unused = [name for name in chat_template_kwargs if name not in (chat_template or "")]
    if unused:
        why = "no chat template is used" if chat_template is None else "the template has no such"
        warn_once(logger, "chat_template_kwargs %s have no effect: %s.", sorted(unused), why)
    return dict(chat_template_kwargs)


def render_conversation(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation as the text that the model continues.

    If the last message is the assistant's, the model continues it; otherwise the header of a new
    assistant turn is added. Without a chat template the contents are concatenated, without roles.

    Args:
        conversation: The messages.
        tokenizer: Whose chat template is used.
        template_arguments: Further arguments of the template, such as ``enable_thinking``.

    Raises:
        ValueError: The tokenizer's chat template refuses the conversation.
    """
    if not has_chat_template(tokenizer):
        return "".join(message["content"] for message in conversation)
    continued = conversation[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in conversation],
            tokenize=False,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            **(template_arguments or {}),
        )
    except TemplateError as exc:
        roles = [message["role"] for message in conversation]
        raise ValueError(
            f"the tokenizer's chat template refuses a conversation of roles {roles} ({exc}); "
            "change the roles (some models know no system message)"
        ) from exc
    return str(text)


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether ``tokenizer`` can render a conversation."""
    return getattr(tokenizer, "chat_template", None) is not None


def template_text(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat templates of a tokenizer, which may have several by name."""
    template = getattr(tokenizer, "chat_template", None)
    return "".join(template.values()) if isinstance(template, dict) else template


class PromptEncoder:
    """Turns conversations into prompts.

    Args:
        tokenizer: The tokenizer of the model that will read the prompts.
        chat_template_kwargs: Further arguments of its chat template, such as ``enable_thinking``.

    Raises:
        TypeError: No tokenizer; arguments of the template that are no dict.
        ValueError: An argument of the template that is set here.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        require(
            callable(tokenizer) and hasattr(tokenizer, "batch_decode"),
            f"tokenizer is of type {type(tokenizer).__name__}; it must be a transformers "
            "tokenizer: pass the model's own, such as AutoTokenizer.from_pretrained(model_name)",
            TypeError,
        )
        self.tokenizer = tokenizer
        self.chat_template_kwargs = check_template_arguments(
            chat_template_kwargs, template_text(tokenizer)
        )
        if not has_chat_template(tokenizer):
            logger.warning(
                "The tokenizer has no chat template: prompts are the contents of the messages "
                "concatenated as they are, roles have no effect."
            )

    def render(self, conversation: Conversation) -> str:
        """The prompt as text."""
        return render_conversation(conversation, self.tokenizer, self.chat_template_kwargs)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered prompts, one list each."""
        if not texts:
            return []
        # A chat template writes the special tokens itself; adding them again would double the BOS.
        encoded = self.tokenizer(
            list(texts), add_special_tokens=not has_chat_template(self.tokenizer), verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def encode(self, conversations: Sequence[Conversation]) -> list[ReasoningPrompts]:
        """Encode conversations, one prompt dict each.

        Raises:
            ValueError: A prompt has no token at all, so there is nothing to continue; the chat
                template refuses a conversation.
        """
        texts = [self.render(conversation) for conversation in conversations]
        prompts: list[ReasoningPrompts] = []
        for text, ids, conversation in zip(texts, self.tokenize(texts), conversations, strict=True):
            require(
                bool(ids),
                f"{shorten(list(conversation))} gives a prompt without any token; drop it from the "
                "dataset or add text in conversation_template",
            )
            input_ids = torch.tensor([ids], dtype=torch.long)
            prompts.append(
                ReasoningPrompts(
                    input_ids=input_ids, attention_mask=torch.ones_like(input_ids), text=text
                )
            )
        return prompts
