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
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class TurnBoundary:
    """Writes the turns of one conversation at a time.

    Args:
        tokenizer: The model's tokenizer.
        apply_chat_template: Use its chat template; False: observations and answers are
            concatenated as they are.
        system_prompt: First message of every conversation; None: none.
        template_arguments: Further arguments of the template, such as ``enable_thinking``.

    Raises:
        ValueError: The chat template refuses the system prompt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        apply_chat_template: bool = True,
        system_prompt: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.special_ids = special_ids(tokenizer)
        self.has_template = apply_chat_template and has_chat_template(tokenizer)
        self.template_arguments = check_template_arguments(template_arguments, self.has_template)
        if apply_chat_template and not self.has_template:
            warn_once(
                logger,
                "The tokenizer has no chat template: observations and answers are concatenated as "
                "they are.",
            )
        self._first_observation = ""
        self._opening = self.open("?")[0]  # a template that refuses the roles fails here

    def open(self, observation: str) -> tuple[str, list[int]]:
        """Begin a conversation.

        Returns:
            The first prompt, as text and as ids.
        """
        self._first_observation = observation
        if not self.has_template:
            text = (self.system_prompt or "") + observation
            # Only here: a chat template writes the start of the text (BOS) itself.
            return text, self._tokenize(text, add_special_tokens=True)
        self._opening = self._render()
        return self._opening, self._tokenize(self._opening)

    def follow(self, answer: Sequence[int], observation: str) -> tuple[str, list[int]]:
        """The template's and the environment's text between a sampled answer and the next one.

        The end-of-turn token is left out if the model sampled it.

        Args:
            answer: The sampled ids.
            observation: The environment's next observation.

        Returns:
            Text and ids, up to the next generation prompt.

        Raises:
            ValueError: The template does not show answers.
        """
        text = self._after_answer(answer, observation)
        ids = self._tokenize_inside(text)
        last = answer[-1]
        if ids and ids[0] == last and last in self.special_ids:
            return text.removeprefix(str(self.tokenizer.convert_ids_to_tokens(last))), ids[1:]
        return text, ids

    def _after_answer(self, answer: Sequence[int], observation: str) -> str:
        """The text from the end of an answer's content to the next generation prompt.

        If the template rewrites earlier turns (drops reasoning, trims answers, moves the system
        prompt), a warning is logged once; the ids that the model saw and sampled are kept.
        """
        if not self.has_template:
            return observation
        text = self._answer_text(answer)
        whole = self._render(text, observation)
        if whole.startswith(self._opening + text):
            return whole[len(self._opening) + len(text) :]
        warn_once(
            logger,
            "The chat template renders earlier turns differently once the conversation goes on (it "
            "drops reasoning, trims answers or moves the system prompt). The token ids that the "
            "model saw and sampled are kept as they are.",
            per=str(self.tokenizer.chat_template),
        )
        # Stands for the answer; without the system prompt, which some templates would put here
        # again at every turn.
        mark = _absent_from(self._first_observation + observation)
        _, found, after = self._render(mark, observation, system=False).rpartition(mark)
        require(
            bool(found),
            "the tokenizer's chat template leaves answers out of a conversation; use another "
            "template, or apply_chat_template=False",
        )
        return after

    def _render(self, *after: str, system: bool = True) -> str:
        """The conversation up to a generation prompt; ``after``: answer, observation."""
        messages = []
        if system and self.system_prompt is not None:
            messages.append({"role": "system", "content": self.system_prompt})
        contents = (self._first_observation, *after)
        for number, content in enumerate(contents):
            messages.append({"role": "assistant" if number % 2 else "user", "content": content})
        return render_conversation(messages, self.tokenizer, self.template_arguments)

    def _answer_text(self, answer: Sequence[int]) -> str:
        """The answer as the template's ``content``: without the token that ended it."""
        ended = len(answer) > 0 and answer[-1] in self.special_ids
        ids = list(answer[:-1] if ended else answer)
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

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


def _absent_from(text: str) -> str:
    """A word that a text does not hold."""
    return next(word for n in itertools.count() if (word := f"ANSWER-{n}-END") not in text)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of all special tokens: the named ones (eos, pad, ...) and those only added as special.

    Gemma's ``<end_of_turn>`` and Phi's ``<|end|>`` are of the second kind.
    """
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added if token.special}
