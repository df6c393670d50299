"""The single-turn environment: dataset questions as prompts, completions scored by functions."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch

from agilerl.checks import COUNT, FLAG, OPTIONAL_COUNT, Number, require
from agilerl.llm.prompts import Conversation, PromptEncoder
from agilerl.llm_envs.completion_checks import check_completions, takes_action
from agilerl.llm_envs.dataset import PromptBatch, PromptReader, Splits
from agilerl.llm_envs.dataset.conversations import question_text
from agilerl.llm_envs.dataset.procedural import ProceduralTask, beside, default_template
from agilerl.llm_envs.failures import EvaluationRows, OnFailure
from agilerl.llm_envs.rewards import RewardError, RewardFunctions, RewardPool
from agilerl.llm_envs.rewards.columns import OFFERED, CompletionReader, dataset_columns
from agilerl.llm_envs.rewards.scorer import score_groups
from agilerl.typing import Act, ActionResult, Evaluation, ReasoningPrompts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset, IterableDataset
    from reasoning_gym.dataset import ProceduralDataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_LEAST_EVAL_BATCH = 64


class ReasoningGym:
    """Provides prompts and scores their completions.

    Training rows come in a new order every epoch, given by the seed alone; the last batch of an
    epoch may be short. :meth:`evaluate` answers the test rows in their own order, each once::

        prompts = env.reset()
        prompts, rewards = env.step(agent.get_action(prompts).completion_ids)  # (P, G) float32

        env.evaluate(lambda prompts: agent.get_action(prompts, training=False)).rewards  # (rows,)

    Args:
        train_dataset: A ``datasets.Dataset``, a list of dicts, or a streaming ``IterableDataset``,
            whose own order is kept. Rows have a column ``question``, or those that the template
            shows, or a conversation in the column ``prompt`` or ``messages``; ``answer`` (never
            part of a prompt) and others for rewards that ask for them. See ``docs/data.md``.
        test_dataset: The held-out rows, same columns; None: there is no evaluation.
        tokenizer: The model's tokenizer. Without a chat template the contents of the conversation
            are concatenated.
        reward_fn: A function, a list of functions or a dict by name, plain or async, called in
            several threads at a time. Each gets what its parameters name: ``completion``, columns
            of both datasets, ``completion_ids`` (list of int), ``finish_reason`` (``"stop"`` or
            ``"length"``), ``info`` (that column, or a dict of the other columns). One whose
            parameters name none of them gets completion, answer and question by position. It
            returns one finite number; in a list or dict None where it does not apply to a row. See
            :mod:`agilerl.rewards` for functions that get lists, and for some to use.
        conversation_template: Messages ``{"role": ..., "content": ...}``; ``{question}`` or any
            other column but ``{answer}`` in them is replaced, other braces stay. If the last
            message is the assistant's, it is continued. Where rows hold conversations: None, or
            messages without a column, to stand in front.
        data_batch_size_per_gpu: Prompts per training batch and process.
        accelerator: With several processes, each gets its own share of every batch and of the test
            rows; no row is dropped or repeated.
        return_raw_completions: Whether ``step`` returns the texts of the completions too.
        max_context_length: Rows whose prompt has more tokens are dropped; None keeps all, which a
            stream does not allow.
        seed: Seed of the training order, 0 or more; a stream has its own.
        reward_timeout: Seconds that one call of a reward function may take.
        reward_workers: Largest number of ``reward_fn`` calls at the same time.
        eval_batch_size: Prompts per test batch; None: 64 or, if more, ``data_batch_size_per_gpu``.
        reward_weights: Factors of several rewards, whose weighted sum is the reward: a list in the
            order of the functions, or a dict by name. Those left out have 1.
        skip_special_tokens: False keeps special tokens in the texts that rewards and samples show,
            except padding and an end-of-sequence token at the end.
        chat_template_kwargs: Further arguments of the chat template, such as
            ``{"enable_thinking": False}``.
        on_failure: What becomes of a completion for which a reward call raises or runs out of time:
            ``"raise"`` raises ``RewardError`` with the completion shown; ``"drop"`` leaves it out
            (see :attr:`last_sample_mask`); a number is its reward.
        max_failure_share: Largest share of the completions of a training step, or of an evaluation,
            that may fail; above it ``RewardError`` is raised.
        failure_retries: Further calls of a function that raised or ran out of time, before it
            counts as failed.

    Raises:
        TypeError: An argument of the wrong type; a reward whose parameter names nothing.
        ValueError: A missing column, no rows (or none that fits), a row that gives no prompt, a
            size below 1, a template that shows no column, a tokenizer without a pad token.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the public contract
        self,
        train_dataset: Dataset | IterableDataset | Sequence[Mapping[str, Any]],
        test_dataset: Dataset | Sequence[Mapping[str, Any]] | None,
        tokenizer: PreTrainedTokenizerBase,
        reward_fn: RewardFunctions,
        conversation_template: Conversation | None,
        data_batch_size_per_gpu: int = 8,
        accelerator: Accelerator | None = None,
        return_raw_completions: bool = False,
        max_context_length: int | None = None,
        seed: int = 42,
        *,
        reward_timeout: float = 60.0,
        reward_workers: int = 16,
        eval_batch_size: int | None = None,
        reward_weights: Sequence[float] | Mapping[str, float] | None = None,
        skip_special_tokens: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_failure: OnFailure = "raise",
        max_failure_share: float = 0.5,
        failure_retries: int = 0,
    ) -> None:
        COUNT("data_batch_size_per_gpu", data_batch_size_per_gpu)
        OPTIONAL_COUNT("eval_batch_size", eval_batch_size)
        OPTIONAL_COUNT("max_context_length", max_context_length)
        Number(0, integer=True)("seed", seed)
        self.data_batch_size_per_gpu = data_batch_size_per_gpu
        self.eval_batch_size = eval_batch_size or max(_LEAST_EVAL_BATCH, data_batch_size_per_gpu)
        FLAG("skip_special_tokens", skip_special_tokens)
        splits = Splits(train_dataset, test_dataset)
        self._rewards = RewardPool(
            *(reward_fn, reward_timeout, reward_workers),
            on_failure=on_failure,
            max_failure_share=max_failure_share,
            failure_retries=failure_retries,
            reward_weights=reward_weights,
            columns=[*OFFERED, *splits.column_names],
        )
        splits.check_answers(self._rewards.named_columns)
        encoder = PromptEncoder(tokenizer, chat_template_kwargs)
        require(
            tokenizer.pad_token_id is not None,
            "tokenizer has no pad token, so padding cannot be told from text; set for example "
            "tokenizer.pad_token = tokenizer.eos_token",
        )
        self.tokenizer = tokenizer
        self._reader = CompletionReader(tokenizer, skip_special_tokens)
        prompts = PromptReader(
            splits.conversations(conversation_template),
            encoder,
            dataset_columns(self._rewards.columns, splits.column_names),
        )
        rank, processes = _rank_and_processes(accelerator)
        self.num_processes = processes
        """Processes that share the rows."""
        self._train, self._test = splits.prompts(
            *(prompts, max_context_length, data_batch_size_per_gpu, int(seed), rank, processes)
        )
        # Equal shares would leave test rows out or score some twice.
        self._test_rows = range(0 if self._test is None else len(self._test))[rank::processes]
        self._test_offset: int | None = None
        self._current: PromptBatch | None = None

        self.name = "ReasoningGym"
        """Names runs and their folders; set it to the task's name."""
        self.return_raw_completions = return_raw_completions
        self.last_completions: list[list[str]] = []
        """Texts that the last ``step`` scored, ``[P][G]``; its questions and answers beside it."""
        self.last_questions: list[str] = []
        self.last_answers: list[Any] = []
        self.last_rewards: dict[str, torch.Tensor] = {}
        """Each of several rewards of the last ``step``, without its weight: ``(P, G)`` float32, NaN
        where it does not apply or failed."""
        self.last_failures: list[list[str | None]] = []
        """Why completions of the last ``step`` failed, ``[P][G]``; None for those that did not."""
        self.last_sample_mask: torch.Tensor | None = None
        """``(P, G)`` bool for ``learn``: False for completions of the last ``step`` that were
        dropped, whose rewards mean nothing; None before it."""

    @classmethod
    def from_reasoning_gym(  # noqa: PLR0913 - options of the task, and of the environment
        cls,
        task: str | ProceduralDataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        size: int | None = None,
        seed: int | None = None,
        test_size: int = 100,
        config: Mapping[str, Any] | None = None,
        answer_tag: str | None = "answer",
        reward_fn: RewardFunctions | None = None,
        conversation_template: Conversation | None = None,
        **settings: Any,
    ) -> Self:
        """A task of reasoning-gym, scored by its own ``score_answer``.

        Args:
            task: A name, such as ``"chain_sum"``, or a dataset of reasoning-gym.
            tokenizer: The model's tokenizer.
            size: Training questions; None: 1,000, or the dataset's.
            seed: Of the questions and of the training order; None: 42, or the dataset's.
            test_size: Held-out questions, none of which is a training question; 0: no evaluation.
            config: Further parameters of the task, such as ``{"max_terms": 3}``.
            answer_tag: The answer is what stands between ``<answer>`` and ``</answer>``, for
                ``"answer"``; None: all of the completion.
            reward_fn: Further rewards. They may ask for ``metadata``, and for ``entry``, all that
                the task generated. The task's own is called ``score_answer``.
            conversation_template: None: reasoning-gym's, which asks to think first and for the
                answer between ``<answer>`` tags.
            **settings: Further arguments of the class.

        Raises:
            ImportError: reasoning-gym is not installed.
            TypeError: An argument of the wrong type.
            ValueError: No task of that name; parameters that it does not take; questions so few
                that none is left to be held out.
        """
        source = ProceduralTask(task, size, seed, test_size, config, answer_tag)
        rewards, template = beside(source, reward_fn), conversation_template or default_template()
        env = cls(
            source.train, source.test, tokenizer, rewards, template, seed=source.seed, **settings
        )
        env.name = source.name
        return env

    def __len__(self) -> int:
        """Training rows of all processes, without those dropped as too long.

        Raises:
            TypeError: They are a stream.
        """
        return len(self._train)

    @property
    def num_epochs(self) -> int:
        """Completed passes over the training rows."""
        return self._train.epoch

    @property
    def has_test_rows(self) -> bool:
        """Whether it can be evaluated."""
        return self._test is not None

    @property
    def questions(self) -> list[str]:
        """Questions of the current batch as text; without that column the user's last messages."""
        return [] if self._current is None else _texts(self._current)

    @property
    def answers(self) -> list[Any]:
        """Answers of the batch that waits for its completions."""
        return [] if self._current is None else list(self._current.answers)

    def prompt_lengths(self) -> list[int]:
        """Tokens of every prompt, template included: the training rows', then the test rows'.

        A stream counts as one prompt of ``max_context_length`` tokens.
        Counted at the first call, unless ``max_context_length`` had them counted before.
        """
        return self._train.lengths() + ([] if self._test is None else self._test.lengths())

    def fingerprint(self) -> str:
        """Digests of the training and of the test split: questions, answers and templates.

        Rows dropped as too long are not part of it.
        """
        test = "none" if self._test is None else self._test.fingerprint()
        return f"{self._train.fingerprint()}-{test}"

    def reset(self, reset_dataloaders: bool = False) -> list[ReasoningPrompts]:
        """Hand out the present training batch; in ``eval_mode`` the first test batch.

        Only ``step`` moves to the next batch: one that is not scored yet is handed out again.

        Args:
            reset_dataloaders: Go back to the first training batch of the first epoch.
        """
        if self._test_offset is not None:
            self._test_offset = 0
        elif reset_dataloaders:
            self._train.restart()
        return self._hand_out()

    def upcoming(self, count: int) -> list[list[ReasoningPrompts]]:
        """The prompts of the present training batch and those after it, ``count`` batches in all.

        The training position stays.
        """
        return [list(batch.prompts) for batch in self._train.upcoming(count)]

    def step(
        self,
        completion_ids: Sequence[torch.Tensor],
        action: ActionResult | None = None,
    ) -> tuple[Any, ...]:
        """Score the completions of the batch handed out last.

        Args:
            completion_ids: Per prompt a ``(G, T)`` long tensor: prompt, completion, right padding.
            action: What ``get_action`` returned, with these ids. It says where completions end, and
                why; None: told from the ids, which do not show that a stop sequence ended one.

        Returns:
            The next prompts (``[]`` after the last test batch) and the rewards, ``(P, G)`` float32
            on the CPU; with ``return_raw_completions`` also the texts, ``[P][G]``.

        Raises:
            RuntimeError: No batch is waiting: ``reset`` comes first.
            TypeError: Not a list of integer tensors; ``reward_fn`` returned no number.
            ValueError: Completions that do not belong to this batch; a reward that is not finite; a
                row to which no reward applies.
            RewardError: A reward call raised or ran out of time, and ``on_failure`` is ``"raise"``;
                too many did, in training.
        """
        batch = self._current
        if batch is None:
            raise RuntimeError("no prompts are waiting for completions; call reset() first")
        check_completions(completion_ids, batch.prompts)
        sizes = {ids.shape[0] for ids in completion_ids}
        require(
            len(sizes) == 1,
            f"completion_ids have groups of sizes {sorted(sizes)}; use one size G",
        )
        training = self._test_offset is None
        scored = score_groups(
            *(self._rewards, self._reader, batch, completion_ids, action), bounded=training
        )
        self.last_questions, self.last_answers = _texts(batch), list(batch.answers)
        self.last_completions = scored.texts
        self.last_rewards = scored.named_rewards
        self.last_failures, self.last_sample_mask = scored.failures, scored.sample_mask
        if scored.failed and training:
            logger.warning(
                "%d of %d completions %s. The first: %s",
                *(scored.failed, scored.rewards.numel()),
                *(self._rewards.policy.outcome, scored.first_failure),
            )
        if self._test_offset is None:
            self._train.advance()
        else:
            self._test_offset += self.eval_batch_size
        prompts = self._hand_out()
        if self.return_raw_completions:
            return prompts, scored.rewards, self.last_completions
        return prompts, scored.rewards

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
        """Answer every test row (of this process's share) once, ``loop`` times over.

        Training is afterwards exactly where it was.

        Args:
            act: Answers prompts, each once or with a group.
            loop: Times to go through the test split.

        Returns:
            The answers that were scored.

        Raises:
            RewardError: More than ``max_failure_share`` failed, in a single process.
            ValueError: There are no test rows.
            Exception: What :meth:`step` raises.
        """
        rows = EvaluationRows(self._rewards.policy, "completions")
        total = 0
        with self.eval_mode():
            for _ in range(loop):
                prompts = self.reset()
                while prompts:
                    action = act(prompts)
                    known = {"action": action} if takes_action(self.step) else {}
                    prompts, scored = self.step(action.completion_ids, **known)[:2]
                    group = scored.shape[1]
                    total = loop * len(self._test_rows) * group
                    for p, g in itertools.product(range(len(scored)), range(group)):
                        rows.add(
                            *(float(scored[p, g]), self.last_questions[p]),
                            *(self.last_completions[p][g], self.last_failures[p][g]),
                            answers=[self.last_answers[p]],
                        )
                    # With several processes agent.test decides, by the failures of all.
                    if self.num_processes == 1 and (excess := rows.excess(total)):
                        raise RewardError(excess)
        return rows.result(total)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """``reset`` and ``step`` go through the test rows inside it.

        Afterwards training is exactly where it was: a batch that was handed out can be stepped.

        Raises:
            ValueError: There are no test rows.
        """
        require(
            self._test is not None,
            "test_dataset is None, so there is nothing to evaluate on; build the environment with "
            "test_dataset=...",
        )
        outside = self._current, self._test_offset
        self._current, self._test_offset = None, 0
        try:
            yield
        finally:
            self._current, self._test_offset = outside

    def state_dict(self) -> dict[str, Any]:
        """The training position: the first batch that is not scored yet. JSON-compatible."""
        return self._train.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved training position; ``reset`` then hands out the batch there.

        Raises:
            RuntimeError: Inside ``eval_mode``, which restores the position when it ends.
            ValueError: ``state`` was saved with other training rows.
        """
        require(
            self._test_offset is None,
            "load_state_dict inside eval_mode; leave eval_mode first",
            RuntimeError,
        )
        self._train.load_state_dict(state)
        self._current = None

    def close(self) -> None:
        """Stop the thread that async reward functions run on."""
        self._rewards.close()

    def _hand_out(self) -> list[ReasoningPrompts]:
        if self._test_offset is None:
            self._current = self._train.current()
        elif self._test is not None:
            end = self._test_offset + self.eval_batch_size
            rows = self._test_rows[self._test_offset : end]
            self._current = self._test.batch(rows) if rows else None
        return [] if self._current is None else list(self._current.prompts)


def _texts(batch: PromptBatch) -> list[str]:
    return [question_text(question) for question in batch.questions]


def _rank_and_processes(accelerator: Accelerator | None) -> tuple[int, int]:
    if accelerator is None:
        return 0, 1
    try:
        return accelerator.process_index, accelerator.num_processes
    except AttributeError as exc:
        raise TypeError(
            f"accelerator must be an accelerate.Accelerator or None, got {accelerator!r}"
        ) from exc
