r"""From a question to a tokenised prompt: fill the conversation template, render it, tokenise it.

With ``[{"role": "user", "content": "Q: {question}\nA:"}]`` and the question ``2+2?``::

    fill_template         [{"role": "user", "content": "Q: 2+2?\nA:"}]
    render_conversation   "<|im_start|>user\nQ: 2+2?\nA:<|im_end|>\n<|im_start|>assistant\n"
    ... no chat template  "Q: 2+2?\nA:"
    PromptEncoder.encode  [{"input_ids": (1, P), "attention_mask": (1, P), "text": that text}]
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jinja2 import TemplateError

from agilerl.checks import require
from agilerl.typing import ReasoningPrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Conversation: TypeAlias = Sequence[Mapping[str, str]]
"""Messages, each with a ``role`` and a ``content``."""

PLACEHOLDER = "{question}"


def check_template(conversation_template: Conversation) -> None:
    """Check that a template can be filled.

    Raises:
        TypeError: It is not a list of messages whose role and content are strings.
        ValueError: It is empty, or no content has the placeholder ``{question}``.
    """
    remedy = 'pass for example [{"role": "user", "content": "{question}"}]'
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
    require(
        any(PLACEHOLDER in message["content"] for message in conversation_template),
        f"conversation_template has no {PLACEHOLDER} in any content, so every prompt would be the "
        f"same, got {list(conversation_template)!r}; {remedy}",
    )


def fill_template(conversation_template: Conversation, question: str) -> list[dict[str, str]]:
    """Replace ``{question}`` in the template; every other brace stays as it is.

    The inserted text is not searched again, so a question may itself contain ``{question}``.
    """
    # str.format would take any other brace, in the template or of a set or LaTeX, for a field.
    return [
        {**message, "content": message["content"].replace(PLACEHOLDER, question)}
        for message in conversation_template
    ]


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
            "change the roles in conversation_template (some models know no system message)"
        ) from exc
    return str(text)


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether ``tokenizer`` can render a conversation."""
    return getattr(tokenizer, "chat_template", None) is not None


class PromptEncoder:
    """Turns questions into prompts: one tokenizer, one conversation template.

    Args:
        tokenizer: The tokenizer of the model that will read the prompts.
        conversation_template: Messages, at least one of them with ``{question}`` in its content.

    Raises:
        TypeError: No tokenizer, or a template that is not a list of messages.
        ValueError: A template without ``{question}``, or one that the chat template refuses.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, conversation_template: Conversation
    ) -> None:
        require(
            callable(tokenizer) and hasattr(tokenizer, "batch_decode"),
            f"tokenizer is of type {type(tokenizer).__name__}; it must be a transformers "
            "tokenizer: pass the model's own, such as AutoTokenizer.from_pretrained(model_name)",
            TypeError,
        )
        check_template(conversation_template)
        self.tokenizer = tokenizer
        self.conversation_template = [dict(message) for message in conversation_template]
        if not has_chat_template(tokenizer):
            logger.warning(
                "The tokenizer has no chat template: prompts are the contents of "
                "conversation_template concatenated as they are, its roles have no effect."
            )
        self.render("?")  # A chat template that refuses the roles fails here, not in training.

    def render(self, question: str) -> str:
        """The prompt for ``question`` as text."""
        return render_conversation(
            fill_template(self.conversation_template, question), self.tokenizer
        )

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered prompts, one list each."""
        if not texts:
            return []
        # A chat template writes the special tokens itself; adding them again would double the BOS.
        encoded = self.tokenizer(
            list(texts), add_special_tokens=not has_chat_template(self.tokenizer), verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def encode(self, questions: Sequence[str]) -> list[ReasoningPrompts]:
        """Encode questions, one prompt dict each.

        Raises:
            ValueError: A prompt has no token at all, so there is nothing to continue.
        """
        texts = [self.render(question) for question in questions]
        prompts: list[ReasoningPrompts] = []
        for text, ids, question in zip(texts, self.tokenize(texts), questions, strict=True):
            require(
                bool(ids),
                f"question {question!r} gives a prompt without any token; drop it from the "
                "dataset or add text around {question} in conversation_template",
            )
            input_ids = torch.tensor([ids], dtype=torch.long)
            prompts.append(
                ReasoningPrompts(
                    input_ids=input_ids, attention_mask=torch.ones_like(input_ids), text=text
                )
            )
        return prompts
