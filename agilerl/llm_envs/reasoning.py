"""The single-turn environment: dataset questions as prompts, completions scored by functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from agilerl.checks import COUNT, FLAG, OPTIONAL_COUNT, Number, require
from agilerl.llm.prompts import Conversation, PromptEncoder
from agilerl.llm_envs.dataset import PromptReader, Splits
from agilerl.llm_envs.dataset.procedural import ProceduralTask, default_template, with_task_score
from agilerl.llm_envs.failures import OnFailure
from agilerl.llm_envs.rewards import RewardFunctions, RewardPool
from agilerl.llm_envs.rewards.columns import BUILT_IN_COLUMNS, CompletionReader, dataset_columns
from agilerl.llm_envs.single_turn import SingleTurnEnvironment

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset, IterableDataset
    from reasoning_gym.dataset import ProceduralDataset
    from transformers import PreTrainedTokenizerBase

    TestRows: TypeAlias = Dataset | Sequence[Mapping[str, Any]]

_LEAST_EVAL_BATCH = 64


class ReasoningGym(SingleTurnEnvironment):
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
        test_dataset: The held-out rows, same columns, or several sets of them by name,
            ``{"easy": rows, "hard": rows}``; None: there is no evaluation.
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
            that may fail; above it ``RewardError`` is raised. With several processes the training
            function and ``agent.test`` do so, on all of them alike, by the failures of all.
        failure_retries: Further calls of a function that raised or ran out of time, before it
            counts as failed.
        extract_answer: From the text of a completion to its answer, or None where it gives none,
            such as :func:`agilerl.rewards.answers.extract_boxed`. Sampled evaluations then take a
            majority vote.

    Raises:
        TypeError: An argument of the wrong type; a reward with an unknown parameter.
        ValueError: A missing column, no rows (or none that fits), a row that gives no prompt, a
            size below 1, a template that shows no column, a tokenizer without a pad token.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the public contract
        self,
        train_dataset: Dataset | IterableDataset | Sequence[Mapping[str, Any]],
        test_dataset: TestRows | Mapping[str, TestRows] | None,
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
        extract_answer: Callable[[str], str | None] | None = None,
    ) -> None:
        require(
            extract_answer is None or callable(extract_answer),
            f"extract_answer is {extract_answer!r}; pass a function from text to text, or None",
            TypeError,
        )
        COUNT("data_batch_size_per_gpu", data_batch_size_per_gpu)
        OPTIONAL_COUNT("eval_batch_size", eval_batch_size)
        OPTIONAL_COUNT("max_context_length", max_context_length)
        Number(0, integer=True)("seed", seed)
        FLAG("skip_special_tokens", skip_special_tokens)
        splits = Splits(train_dataset, test_dataset)
        rewards = RewardPool(
            *(reward_fn, reward_timeout, reward_workers),
            on_failure=on_failure,
            max_failure_share=max_failure_share,
            failure_retries=failure_retries,
            reward_weights=reward_weights,
            columns=[*BUILT_IN_COLUMNS, *splits.column_names],
        )
        splits.check_answers(rewards.named_columns)
        encoder = PromptEncoder(tokenizer, chat_template_kwargs)
        require(
            tokenizer.pad_token_id is not None,
            "tokenizer has no pad token, so padding cannot be told from text; set for example "
            "tokenizer.pad_token = tokenizer.eos_token",
        )
        prompts = PromptReader(
            splits.conversations(conversation_template),
            encoder,
            dataset_columns(rewards.columns, splits.column_names),
        )
        shares = _rank_and_processes(accelerator)
        train, test = splits.prompts(
            *(prompts, max_context_length, data_batch_size_per_gpu, int(seed), *shares)
        )
        super().__init__(
            *(train, test, rewards, CompletionReader(tokenizer, skip_special_tokens)),
            eval_batch_size=eval_batch_size or max(_LEAST_EVAL_BATCH, data_batch_size_per_gpu),
            return_raw_completions=return_raw_completions,
            shares=shares,
            extract_answer=extract_answer,
        )
        self.tokenizer, self.data_batch_size_per_gpu = tokenizer, data_batch_size_per_gpu
        self.name = "ReasoningGym"
        """Names runs and their folders; set it to the task's name."""

    @classmethod
    def from_reasoning_gym(  # noqa: PLR0913 - options of the task, and of the environment
        cls,
        task: str | Sequence[str] | ProceduralDataset,
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
            task: A name, such as ``"chain_sum"``, a list of names, or a dataset of reasoning-gym.
            tokenizer: The model's tokenizer.
            size: Training questions; None: 1,000, or the dataset's.
            seed: Of the questions and of the training order; None: 42, or the dataset's.
            test_size: Held-out questions, none of which is a training question; 0: no evaluation.
            config: Further parameters of the task, such as ``{"max_terms": 3}``; of several tasks,
                such dicts by name.
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
        settings = {"extract_answer": source.extract_answer} | settings
        rewards = with_task_score(source, reward_fn)
        template = conversation_template or default_template()
        env = cls(
            source.train, source.test, tokenizer, rewards, template, seed=source.seed, **settings
        )
        env.name = source.name
        return env


def _rank_and_processes(accelerator: Accelerator | None) -> tuple[int, int]:
    if accelerator is None:
        return 0, 1
    try:
        return accelerator.process_index, accelerator.num_processes
    except AttributeError as exc:
        raise TypeError(
            f"accelerator must be an accelerate.Accelerator or None, got {accelerator!r}"
        ) from exc
