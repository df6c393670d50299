r"""The exact text that a chat template puts around turns, and its token ids.

With ChatML, a first observation ``Guess.``, the answer ``5`` and the next observation ``Higher.``::

    open     "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n"
    sampled  "5<|im_end|>"
    follow   "\n<|im_start|>user\nHigher.<|im_end|>\n<|im_start|>assistant\n"
    ... after an answer that was cut off before its end, with the "<|im_end|>" in front
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agilerl.checks import require, warn_once
from agilerl.llm.prompts import (
    check_template_arguments,
    has_chat_template,
    render_conversation,
    template_text,
)
from agilerl.llm_envs.conversation.text_environment import contents, without_tool_role

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_USER = {"role": "user", "content": "?"}


class TurnBoundary:
    """Writes the turns of one conversation at a time.

    Args:
        tokenizer: The model's tokenizer.
        apply_chat_template: Use its chat template; False: observations and answers are
            concatenated as they are.
        system_prompt: First message of every conversation; None: none.
        template_arguments: Further arguments of the template, such as ``enable_thinking``.
        tools: JSON schemas that the template shows.

    Raises:
        ValueError: The chat template refuses the system prompt, or does not show tools.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        apply_chat_template: bool = True,
        system_prompt: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.special_ids = special_ids(tokenizer)
        self.has_template = apply_chat_template and has_chat_template(tokenizer)
        if apply_chat_template and not self.has_template:
            warn_once(
                logger,
                "The tokenizer has no chat template: observations and answers are concatenated as "
                "they are.",
            )
        self._arguments = check_template_arguments(
            template_arguments, template_text(tokenizer) if self.has_template else None
        )
        self._without_tools = self._arguments
        self._tool_role: bool | None = None
        self._opening_messages: list[dict[str, Any]] = []
        if tools:
            self._show(list(tools))
        self._opening = self.open([_USER])[0]  # a template that refuses the roles fails here

    def open(self, messages: Sequence[dict[str, Any]]) -> tuple[str, list[int]]:
        """Begin a conversation.

        Returns:
            The first prompt, as text and as ids.

        Raises:
            ValueError: A system message beside the system prompt.
        """
        first = list(messages)
        if self.system_prompt is not None:
            require(
                first[0]["role"] != "system",
                "the environment's reset returned a system message, but there is a system_prompt "
                "too; use one of them",
            )
            first = [{"role": "system", "content": self.system_prompt}, *first]
        if not self.has_template:
            text = (self.system_prompt or "") + self._concatenated(messages)
            # Only here: a chat template writes the start of the text (BOS) itself.
            return text, self._tokenize(text, add_special_tokens=True)
        self._opening_messages = self._shown(first)
        self._opening = self._render(self._opening_messages)
        return self._opening, self._tokenize(self._opening)

    def follow(
        self, answer: Sequence[int], messages: Sequence[dict[str, Any]]
    ) -> tuple[str, list[int]]:
        """The template's and the environment's text between a sampled answer and the next one.

        The end-of-turn token is left out if the model sampled it.

        Args:
            answer: The sampled ids.
            messages: The environment's next observation.

        Returns:
            Text and ids, up to the next generation prompt.

        Raises:
            ValueError: The template does not show answers.
        """
        end = ""
        if answer[-1] in self.special_ids:
            end = str(self.tokenizer.convert_ids_to_tokens(answer[-1]))
        if self.has_template:
            text = self._after_answer(self.answer_text(answer), end, messages)
        else:
            text = self._concatenated(messages)
        if end and text.lstrip().startswith(end):
            text = text.lstrip()  # Some templates write a space first, which was not sampled.
        ids = self._tokenize_inside(text)
        if end and ids and ids[0] == answer[-1]:
            return text.removeprefix(end), ids[1:]
        return text, ids

    def answer_text(self, answer: Sequence[int]) -> str:
        """The answer as the template's ``content``: without the token that ended it."""
        ended = len(answer) > 0 and answer[-1] in self.special_ids
        ids = list(answer[:-1] if ended else answer)
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _after_answer(self, answer: str, end: str, messages: Sequence[dict[str, Any]]) -> str:
        """The text from the end of an answer's content to the next generation prompt.

        If the template rewrites earlier turns (drops or adds reasoning, trims answers, moves the
        system prompt), a warning is logged once; the ids that the model saw and sampled are kept.

        Args:
            answer: The text of the answer.
            end: The special token that ended it, empty if none did.
            messages: The environment's next observation.
        """
        opening, after = self._opening_messages, self._shown(messages)
        mark = _absent_from(contents([*opening, *after]))
        whole = self._render([*opening, _answered(answer), *after])
        if whole.startswith(self._opening + answer):
            rest = whole[len(self._opening) + len(answer) :]
            # An answer that is empty or was cut off may be the start of what a template puts before
            # answers, such as <think></think>.
            if (end and rest.lstrip().startswith(end)) or (
                self._render([*opening, _answered(mark), *after]) == self._opening + mark + rest
            ):
                return rest
        warn_once(
            logger,
            "The chat template renders earlier turns differently once the conversation goes on (it "
            "drops or adds reasoning, trims answers or moves the system prompt). The token ids "
            "that the model saw and sampled are kept as they are.",
            per=str(self.tokenizer.chat_template),
        )
        # Stands for the answer; without system prompt and tools, which some templates would put
        # here again at every turn.
        asked = [message for message in opening if message["role"] != "system"]
        whole = self._render([*asked, _answered(mark), *after], self._without_tools)
        _, found, rest = whole.rpartition(mark)
        require(
            bool(found),
            "the tokenizer's chat template leaves answers out of a conversation; use another "
            "template, or apply_chat_template=False",
        )
        return rest

    def _render(
        self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any] | None = None
    ) -> str:
        """A conversation up to a generation prompt."""
        if arguments is None:
            arguments = self._arguments
        return render_conversation(messages, self.tokenizer, arguments)

    def _show(self, tools: list[dict[str, Any]]) -> None:
        """Give the template tools, if it shows them."""
        remedy = (
            "; use a model whose template shows tools, or describe them in the observations, as "
            "ToolEnv does without native_tools=True"
        )
        require(
            self.has_template,
            f"tools are shown by a chat template, which is not used here{remedy}",
        )
        require(
            "tools" not in self._arguments,
            "tools are given, and chat_template_kwargs has 'tools' too; leave those out",
        )
        # Some tokenizers have a template of its own for tools.
        template = self.tokenizer.get_chat_template(tools=tools)
        self._without_tools = {**self._arguments, "chat_template": template}
        self._arguments = {**self._without_tools, "tools": tools}
        require(
            self._render([_USER]) != self._render([_USER], self._without_tools),
            f"the chat template of the tokenizer {self.tokenizer.name_or_path!r} does not show "
            f"tools: a conversation reads the same with and without them{remedy}",
        )

    def _concatenated(self, messages: Sequence[dict[str, Any]]) -> str:
        """What the environment says, without a template."""
        if [message["role"] for message in messages] != ["user"]:
            warn_once(
                logger,
                "The environment's observations are messages, but no chat template is used: their "
                "contents are concatenated, without roles.",
            )
        return contents(messages)

    def _shown(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages in roles that the template has."""
        if any(message["role"] == "tool" for message in messages) and not self._has_tool_role():
            return without_tool_role(messages)
        return list(messages)

    def _has_tool_role(self) -> bool:
        if self._tool_role is None:
            mark = _absent_from("")
            as_tool, as_answer, as_user = (
                self._rendered_as(role, mark) for role in ("tool", "assistant", "user")
            )
            # Some templates write a role that they do not know as one that they know.
            known = as_tool != as_user and not (as_answer and as_tool.startswith(as_answer))
            self._tool_role = mark in as_tool and known
        return self._tool_role

    def _rendered_as(self, role: str, content: str) -> str:
        """A conversation whose last message has this role; empty if the template refuses it."""
        last = {"role": role, "content": content, "name": "tool", "tool_call_id": "a1b2c3d4e"}
        try:
            return self._render([_USER, _answered("!"), last])
        except ValueError:
            return ""

    def _tokenize(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(
            self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        )

    def _tokenize_inside(self, text: str) -> list[int]:
        """Tokenise a text that does not start the sequence: no space may be put before it."""
        ids = self._tokenize(text)
        anchor = self.tokenizer.eos_token
        if not anchor or not ids or ids[0] in self.special_ids:
            return ids
        anchored = self._tokenize(anchor + text)
        return anchored[1:] if anchored[0] == self.tokenizer.eos_token_id else ids


def _answered(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _absent_from(text: str) -> str:
    """A word that a text does not hold."""
    return next(word for n in itertools.count() if (word := f"ANSWER-{n}-END") not in text)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of all special tokens: the named ones (eos, pad, ...) and those only added as special.

    Gemma's ``<end_of_turn>`` and Phi's ``<|end|>`` are of the second kind.
    """
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added if token.special}
