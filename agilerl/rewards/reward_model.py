"""A reward from a trained reward model: a transformer with a head that scores a whole text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from agilerl.checks import COUNT, OPTIONAL_COUNT, InstanceOf, Number, require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RewardModel:
    """Scores each question with its completion by a sequence classification model.

    A batched reward: it runs once per step, ``batch_size`` texts at a time, sorted by length::

        reward = RewardModel.from_pretrained("my-reward-model", device="cuda")
        env = ReasoningGym(..., reward_fn={"judge": reward, "brief": brief})

    Args:
        model: From ``AutoModelForSequenceClassification``; used as it is, in evaluation mode. Its
            padding id is set to the tokenizer's: such models read the last token that is not
            padding.
        tokenizer: The model's tokenizer; has a pad token.
        batch_size: Texts at a time.
        max_length: Longest text in tokens, beyond which it is cut where the tokenizer cuts
            (``truncation_side``). None: the model's own limit, where its config says one.
        use_chat_template: Whether the text is a conversation of question and completion, in the
            tokenizer's chat template; otherwise they are a pair of texts. None: where there is a
            template.
        label: For a model with several labels: the one whose probability is the reward. The score
            of a model with one label is the reward as it is.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An argument out of range; a tokenizer without pad token, or without the template
            that is asked for; several labels and no ``label``.
    """

    batched = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 16,
        max_length: int | None = None,
        use_chat_template: bool | None = None,
        label: int | None = None,
    ) -> None:
        COUNT("batch_size", batch_size)
        OPTIONAL_COUNT("max_length", max_length)
        has_template = tokenizer.chat_template is not None
        InstanceOf(bool, "True or False")("use_chat_template", use_chat_template)
        require(
            has_template or not use_chat_template,
            "use_chat_template is True, but the tokenizer has no chat template; set "
            "tokenizer.chat_template, or use_chat_template=False",
        )
        require(
            tokenizer.pad_token_id is not None,
            "tokenizer has no pad token, so texts cannot be scored side by side; set "
            "tokenizer.pad_token to a token that no text ends with",
        )
        labels = model.config.num_labels
        Number(0, labels - 1, integer=True, optional=True)("label", label)
        require(
            labels == 1 or label is not None,
            f"the model has {labels} labels; pass label=0 to {labels - 1}: its probability is the "
            "reward",
        )
        self.model = model.eval()
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_length = _own_limit(model, tokenizer) if max_length is None else max_length
        self.use_chat_template = has_template if use_chat_template is None else use_chat_template
        self.label = label

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | str = "auto",
        model_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Load model and tokenizer.

        Args:
            model_name: Name or path. Code that comes with a model does not run unless
                ``model_config`` says so.
            device: Where it runs. With several processes each has a copy: pass
                ``accelerator.device``.
            dtype: Of the weights; ``"auto"``: as they were saved.
            model_config: Further keyword arguments of
                ``AutoModelForSequenceClassification.from_pretrained``.
            **options: Those of the class.

        Raises:
            OSError: There is no such model.
            ValueError: See the class.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        settings = {"trust_remote_code": False, **(model_config or {})}
        model = AutoModelForSequenceClassification.from_pretrained(
            model_name, dtype=dtype, **settings
        )
        tokenizer = AutoTokenizer.from_pretrained(
            model_name, trust_remote_code=settings["trust_remote_code"]
        )
        return cls(model.to(device), tokenizer, **options)

    def __call__(self, completion: Sequence[str], question: Sequence[str]) -> list[float]:
        """Score completions, each to its own question."""
        inputs = self._inputs(question, completion)
        order = sorted(range(len(inputs)), key=lambda row: len(inputs[row]["input_ids"]))
        scores = [0.0] * len(inputs)
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            for row, score in zip(rows, self._scores([inputs[r] for r in rows]), strict=True):
                scores[row] = score
        return scores

    def _inputs(
        self, questions: Sequence[str], completions: Sequence[str]
    ) -> list[dict[str, list[int]]]:
        """What the tokenizer makes of each text, without padding."""
        options: dict[str, Any] = {"truncation": self.max_length is not None}
        options["max_length"] = self.max_length
        if self.use_chat_template:
            # The template writes special tokens itself.
            texts = [self._conversation(*pair) for pair in zip(questions, completions, strict=True)]
            encoded = self.tokenizer(texts, add_special_tokens=False, **options)
        else:
            encoded = self.tokenizer(list(questions), list(completions), **options)
        return [{name: encoded[name][row] for name in encoded} for row in range(len(completions))]

    def _conversation(self, question: str, completion: str) -> str:
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": completion},
        ]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False))

    @torch.inference_mode()
    def _scores(self, inputs: list[dict[str, list[int]]]) -> list[float]:
        # On the right: encoders count positions from the first column.
        padded = self.tokenizer.pad(inputs, padding_side="right", return_tensors="pt")
        padded = padded.to(self.model.device)
        logits = self.model(**padded).logits.float()
        scores = logits[:, 0] if self.label is None else logits.softmax(-1)[:, self.label]
        return scores.tolist()


def _own_limit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Most tokens that the model takes, as far as its config and tokenizer say."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (positions, tokenizer.model_max_length) if limit]
    limit = min(limits, default=None)
    # Tokenizers without a limit say 10^30.
    return None if limit is None or limit > 2**31 else int(limit)
