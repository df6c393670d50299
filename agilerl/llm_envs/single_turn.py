"""Batches of prompts from a dataset: handed out, scored, evaluated, and where training is."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from agilerl.checks import COUNT, OPTIONAL_COUNT, require
from agilerl.llm_envs.completion_checks import check_completions, takes_action
from agilerl.llm_envs.dataset import HeldOutRows, PromptBatch, TrainingBatches
from agilerl.llm_envs.dataset.conversations import question_text
from agilerl.llm_envs.failures import EvaluationRows
from agilerl.llm_envs.rewards import RewardError, RewardPool
from agilerl.llm_envs.rewards.columns import CompletionReader
from agilerl.llm_envs.rewards.scorer import score_groups
from agilerl.typing import Act, ActionResult, Evaluation, ReasoningPrompts

logger = logging.getLogger(__name__)


class SingleTurnEnvironment:
    """What a ``ReasoningGym`` does with its data and rewards, once they are made.

    Args:
        train: Training batches of this process.
        test: The held-out rows of all processes, if there are any.
        rewards: The reward functions.
        reader: From completion ids to texts.
        eval_batch_size: Prompts per test batch.
        return_raw_completions: Whether ``step`` returns the texts of the completions too.
        shares: This process's number, and the number of processes that share the rows.
        extract_answer: Finds the answer in the text of a completion, for majority votes.
    """

    def __init__(
        self,
        train: TrainingBatches,
        test: HeldOutRows | None,
        rewards: RewardPool,
        reader: CompletionReader,
        eval_batch_size: int,
        return_raw_completions: bool = False,
        shares: tuple[int, int] = (0, 1),
        extract_answer: Callable[[str], str | None] | None = None,
    ) -> None:
        self._train, self._test, self._rewards, self._reader = train, test, rewards, reader
        self.eval_batch_size = eval_batch_size
        self._extract_answer = extract_answer
        self._rank, self.num_processes = shares
        """Processes that share the rows."""
        self._test_rows: Sequence[int] = ()
        self._test_batch_size = eval_batch_size
        self._test_offset: int | None = None
        self._current: PromptBatch | None = None

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
        self._evaluation_failure: RewardError | None = None
        """The first of the present evaluation."""

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
    def max_failure_share(self) -> float:
        """Largest share of a step's completions, of all processes, that may fail."""
        return self._rewards.policy.max_failure_share

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
        return f"{self._train.fingerprint()}-{self._test_fingerprint()}"

    def _test_fingerprint(self) -> str:
        return "none" if self._test is None else self._test.fingerprint()

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
        return [_prompts(batch) for batch in self._train.batches(count)]

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
                too many did, in training with a single process.
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
            *(self._rewards, self._reader, batch, completion_ids, action),
            # The others of several processes would wait for one that raised by itself.
            bounded=training and self.num_processes == 1,
        )
        self.last_questions, self.last_answers = _texts(batch), list(batch.answers)
        self.last_completions = scored.texts
        self.last_rewards = scored.named_rewards
        self.last_failures, self.last_sample_mask = scored.failures, scored.sample_mask
        if not training:
            self._evaluation_failure = self._evaluation_failure or scored.first_failure
        if scored.failed and training:
            logger.warning(
                "%d of %d completions failed and %s. The first: %s",
                *(scored.failed, scored.rewards.numel()),
                *(self._rewards.policy.outcome, scored.first_failure),
            )
        if self._test_offset is None:
            self._train.advance()
        else:
            self._test_offset += self._test_batch_size
        prompts = self._hand_out()
        if self.return_raw_completions:
            return prompts, scored.rewards, self.last_completions
        return prompts, scored.rewards

    def evaluate(
        self, act: Act, loop: int = 1, *, rows: int | None = None, samples: int = 1
    ) -> Evaluation:
        """Answer every test row (of this process's share) once, ``loop`` times over.

        Training is afterwards exactly where it was.

        Args:
            act: Answers prompts, each once or with a group.
            loop: Times to go through the test split.
            rows: Answer only so many rows of each test set, drawn at random, always the same; None:
                all.
            samples: Answers per prompt that ``act`` gives: batches have that many prompts less.

        Returns:
            The answers that were scored.

        Raises:
            RewardError: More than ``max_failure_share`` of the answers failed. With several
                processes ``agent.test`` raises that, on all of them, by the failures of all.
            ValueError: There are no test rows.
            Exception: What :meth:`step` raises.
        """
        OPTIONAL_COUNT("rows", rows)
        COUNT("samples", samples)
        answered = EvaluationRows(self._rewards.policy, "completions")
        total = 0
        with self.eval_mode(rows, samples) as of_all_processes:
            for _ in range(loop):
                prompts = self.reset()
                while prompts:
                    numbers, action = self._waiting_rows(), act(prompts)
                    known = {"action": action} if takes_action(self.step) else {}
                    prompts, scored = self.step(action.completion_ids, **known)[:2]
                    group = scored.shape[1]
                    total = loop * len(self._test_rows) * group
                    self._add_scored(answered, numbers, scored)
                    excess = answered.excess(loop * of_all_processes * group)
                    if excess and self.num_processes == 1:
                        first = self._evaluation_failure
                        why = "" if first is None else f". The first: {first}"
                        raise RewardError(excess + why) from first and first.__cause__
        return answered.result(total)

    def _add_scored(
        self, answered: EvaluationRows, numbers: Sequence[int], scored: torch.Tensor
    ) -> None:
        """Add the answers of the last ``step``, whose rewards are ``(P, G)``."""
        assert self._test is not None
        for p, g in itertools.product(range(len(scored)), range(scored.shape[1])):
            name, text = self._test.set_of(numbers[p]), self.last_completions[p][g]
            answered.add(
                *(float(scored[p, g]), self.last_questions[p], text, self.last_failures[p][g]),
                numbers[p],
                answers=[self.last_answers[p]],
                sets=[] if name is None else [name],
                final_answers=[] if self._extract_answer is None else [self._extract_answer(text)],
            )

    @contextmanager
    def eval_mode(self, rows: int | None = None, samples: int = 1) -> Iterator[int]:
        """``reset`` and ``step`` go through the test rows inside it; gives their number, over all.

        Afterwards training is exactly where it was: a batch that was handed out can be stepped.

        Args:
            rows: As for :meth:`evaluate`.
            samples: As for :meth:`evaluate`.

        Raises:
            ValueError: There are no test rows.
        """
        test = self._test
        require(
            test is not None,
            "test_dataset is None, so there is nothing to evaluate on; build the environment with "
            "test_dataset=...",
        )
        assert test is not None
        outside = self._current, self._test_offset
        rows_outside = self._test_rows, self._test_batch_size
        self._current, self._test_offset, self._evaluation_failure = None, 0, None
        self._test_batch_size = max(1, self.eval_batch_size // samples)
        numbers = range(len(test)) if rows is None else test.chosen(rows)
        # Equal shares would leave test rows out or score some twice.
        self._test_rows = numbers[self._rank :: self.num_processes]
        try:
            yield len(numbers)
        finally:
            self._current, self._test_offset = outside
            self._test_rows, self._test_batch_size = rows_outside

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

    def with_appended_rows(self, state: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
        """A position in fewer training rows as one in those of this environment, for it to load.

        The pass goes on in the same order, and then over the appended rows; see
        ``docs/checkpoints.md``.

        Args:
            state: What :meth:`state_dict` gave there.
            fingerprint: What :meth:`fingerprint` gave there.

        Raises:
            ValueError: The training rows do not begin with those, or the test rows are others.
        """
        train, _, test = fingerprint.partition("-")
        position = self._train.with_appended_rows(state, train)
        require(
            test == self._test_fingerprint(),
            "test_dataset is another one; rows can be appended to train_dataset alone",
        )
        return position

    def close(self) -> None:
        """Stop the thread that async reward functions run on."""
        self._rewards.close()

    def _hand_out(self) -> list[ReasoningPrompts]:
        if self._test_offset is None:
            (self._current,) = self._train.batches(1)
        elif self._test is not None:
            rows = self._waiting_rows()
            self._current = self._test.batch(rows) if rows else None
        return [] if self._current is None else _prompts(self._current)

    def _waiting_rows(self) -> Sequence[int]:
        """The numbers of the test rows that are handed out."""
        assert self._test_offset is not None
        return self._test_rows[self._test_offset : self._test_offset + self._test_batch_size]


def _prompts(batch: PromptBatch) -> list[ReasoningPrompts]:
    """For the caller, who may set other values: the batch is handed out again."""
    return [prompt.copy() for prompt in batch.prompts]


def _texts(batch: PromptBatch) -> list[str]:
    return [question_text(question) for question in batch.questions]
