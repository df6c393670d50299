"""The public training functions; what they do is in ``loop.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from agilerl.checks import COUNT
from agilerl.llm_envs.dataset import TrainingBatchSampler
from agilerl.llm_envs.failures import OnFailure
from agilerl.llm_envs.vector.vector_env import SyncMultiTurnVecEnv
from agilerl.training.callbacks import Callback
from agilerl.training.collectors.dynamic_sampling import ZeroVariance
from agilerl.training.collectors.multiturn_collector import MultiTurnCollector
from agilerl.training.collectors.reasoning_collector import ReasoningCollector
from agilerl.training.environments import (
    check_evaluation_arguments,
    fitting_factory,
    single_turn_environments,
)
from agilerl.training.options import TrainingOptions, documents_options, options_among
from agilerl.training.population import Population, check_agents
from agilerl.training.protocols import Agent, SingleTurnEnv
from agilerl.training.rank_consistency import per_process, training_ranks
from agilerl.training.run import run_training
from agilerl.training.trackers.protocol import Tracker, require_trackers
from agilerl.typing import MultiTurnEnv

AgentT = TypeVar("AgentT", bound=Agent)


@documents_options
def finetune_llm_reasoning(  # noqa: PLR0913, PLR0917, D417  the contract's arguments
    pop: list[AgentT],
    env: SingleTurnEnv | None = None,
    env_fn: Callable[[], SingleTurnEnv] | None = None,
    init_hp: Mapping[str, Any] | None = None,
    save_elite: bool | None = None,
    elite_path: str | Path | None = None,
    wb: bool = False,
    tensorboard: bool = False,
    tensorboard_log_dir: str | Path | None = None,
    evo_steps: int | None = None,
    checkpoint_steps: int | None = None,
    checkpoint_path: str | Path | None = None,
    tournament: Any = None,
    mutation: Any = None,
    wandb_api_key: str | None = None,
    wandb_kwargs: Mapping[str, Any] | None = None,
    evaluation_interval: int = 10,
    max_reward: float | None = None,
    verbose: bool = True,
    accelerator: Any = None,
    max_steps: int | None = None,
    num_epochs: int | None = None,
    resume_from: str | Path | None = None,
    *,
    keep_checkpoints: int = 2,
    max_wall_seconds: float | None = None,
    exit_code_on_sigterm: int = 143,
    evaluation_rows: int | None = None,
    evaluation_samples: int | None = None,
    callbacks: Sequence[Callback] | None = None,
    zero_variance: ZeroVariance = "keep",
    max_resamples: int = 3,
    allow_appended_rows: bool = False,
    completions_interval: int | None = None,
    completions_shown: int = 4,
    trackers: Sequence[Tracker] | None = None,
) -> list[AgentT]:
    """Finetune a population on single-turn tasks.

    One iteration is one batch of prompts and one ``learn`` per agent. All agents are evaluated on
    the test split, or on ``evaluation_rows`` of each test set, before training, every
    ``evaluation_interval`` iterations and at the end; without a test split never, and nothing can
    be chosen by fitness.
    The run ends with the iteration in which an agent has consumed ``max_steps`` prompts, all
    agents of an environment ``num_epochs`` times its training prompts, or ``max_wall_seconds`` have
    passed, whichever comes first; without any of the three, after one pass over the data. Ctrl-C
    ends it after the current iteration, with a checkpoint, and a second Ctrl-C at once; SIGTERM
    does as the first Ctrl-C and then ends the program, with ``exit_code_on_sigterm``.

    The run directory is ``checkpoint_path``, or ``runs/<ALGO>-<environment>-<date>-<time>``. It
    holds ``metrics.csv``, ``completions.jsonl`` and ``config.json``; what an earlier run left there
    is moved aside, not overwritten. Two runs cannot have the same one at the same time.

    Args:
        pop: Agents, with different ``index``. Their ``fitness`` and ``steps`` grow by one entry per
            evaluation, ``steps`` by the prompts consumed up to then, in earlier calls too;
            ``scores`` by the mean reward of each iteration.
        env: The environment, such as ``ReasoningGym``, shared by all agents.
        env_fn: Instead of ``env``: called once per agent to make an environment each.
        accelerator: The one that the agents were given, see
            :func:`agilerl.utils.llm_utils.create_llm_accelerator`; None stands for it.
        The options of both functions: those of :class:`TrainingOptions`.

    Returns:
        ``pop``, trained.

    Raises:
        ValueError: For bad values and combinations, naming the argument and the remedy; for a
            prompt, of either split, that is too long for the context of an agent; for a checkpoint
            that is damaged, or of other agents or data; for processes with different options.
        FileNotFoundError: If ``resume_from`` holds no complete checkpoint.
        TypeError: For values of the wrong type; for an environment whose ``state_dict()`` is not
            plain JSON.
        NotImplementedError: For arguments that are not supported yet.
        RuntimeError: If another run that has not ended, in any process, uses this directory.
        ImportError: If TensorBoard or W&B is asked for and not installed.
        SystemExit: With ``exit_code_on_sigterm``, after SIGTERM to any of the processes, when all
            is saved.
    """
    check_agents(pop)
    ranks = training_ranks(accelerator, pop)
    options = TrainingOptions(**options_among(locals()))
    if options.tournament is not None:
        options.tournament.check_size(len(pop))
    require_trackers(tensorboard=tensorboard, wb=wb)
    envs = single_turn_environments(env, env_fn, pop, ranks)
    # Agents that share an environment share its collector: the pending batch is one for all.
    distinct_envs = {id(made): made for made in envs}
    collector_of = {
        key: ReasoningCollector(made, options.sampling, ranks)
        for key, made in distinct_envs.items()
    }
    collectors = [collector_of[id(made)] for made in envs]
    population = Population(pop, collectors)
    options.check_evaluation(population.evaluates)
    check_evaluation_arguments(envs[0], options)
    run_training(population, options, envs[0].name, ranks)
    return pop


@documents_options
def finetune_llm_multiturn(  # noqa: PLR0913, PLR0917, D417  the contract's arguments
    pop: list[AgentT],
    max_turns: int,
    env_factory: Callable[..., MultiTurnEnv],
    env_config: Mapping[str, Any] | None = None,
    init_hp: Mapping[str, Any] | None = None,
    max_steps: int | None = 32768,
    save_elite: bool | None = None,
    elite_path: str | Path | None = None,
    wb: bool = False,
    tensorboard: bool = False,
    tensorboard_log_dir: str | Path | None = None,
    evo_steps: int | None = None,
    checkpoint_steps: int | None = None,
    checkpoint_path: str | Path | None = None,
    tournament: Any = None,
    mutation: Any = None,
    wandb_api_key: str | None = None,
    wandb_kwargs: Mapping[str, Any] | None = None,
    evaluation_interval: int = 50,
    max_reward: float | None = None,
    verbose: bool = True,
    accelerator: Any = None,
    num_epochs: int | None = None,
    resume_from: str | Path | None = None,
    max_wall_seconds: float | None = None,
    *,
    keep_checkpoints: int = 2,
    exit_code_on_sigterm: int = 143,
    evaluation_samples: int | None = None,
    callbacks: Sequence[Callback] | None = None,
    completions_interval: int | None = None,
    completions_shown: int = 4,
    trackers: Sequence[Tracker] | None = None,
    zero_variance: ZeroVariance = "keep",
    max_resamples: int = 3,
    allow_appended_rows: bool = False,
    groups_per_iteration: int = 8,
    train_seeds: int = 1024,
    evaluation_episodes: int = 64,
    seed: int = 42,
    max_workers: int = 16,
    reset_workers: int = 1,
    step_timeout: float = 60.0,
    on_failure: OnFailure = "drop",
    max_failure_share: float = 0.5,
    failure_retries: int = 0,
) -> list[AgentT]:
    """Finetune a population on episodes of several turns.

    One iteration plays ``groups_per_iteration`` training seeds, ``group_size`` episodes each, all
    of them side by side, and calls ``learn`` once per agent: with rewards per turn, turn ids, and
    the credit assignment and ratio that the agent is set to. The fitness is the mean return of
    ``evaluation_episodes`` greedy episodes, on seeds that are the same for all agents and never
    trained on. Run directory, stopping, elites and evaluation times are as in
    :func:`finetune_llm_reasoning`; so is the reference policy, which moves after every pass over
    the training seeds.

    Args:
        pop: Agents, with different ``index``; ``steps`` counts turns.
        max_turns: Turns that an episode may have; longer ones are cut off.
        env_factory: Called once per environment to make it, ``groups_per_iteration`` ×
            ``group_size`` of them for each agent of ``pop``, such as a
            ``TokenObservationWrapper``. Where its ``max_model_len`` or ``max_output_tokens`` is
            None, it gets the agents'.
        env_config: Keyword arguments of ``env_factory``.
        accelerator: The one that the agents were given, see
            :func:`agilerl.utils.llm_utils.create_llm_accelerator`; None stands for it.
        groups_per_iteration: Training seeds played per iteration, over all processes.
        train_seeds: The training seeds are ``0 .. train_seeds - 1``.
        evaluation_episodes: Episodes of an evaluation.
        seed: Determines the order of the training seeds.
        max_workers: Environment steps at the same time, at most.
        reset_workers: Resets at the same time. Many environments seed and draw from the global
            ``random``, and two at once would mix; raise it for slow ones that do not.
        step_timeout: Seconds that one step (or reset) of an environment may take.
        on_failure: What becomes of an episode whose environment raised or ran out of time, which is
            counted in ``failed_completions``: ``"drop"`` leaves it out of learning, fitness and all
            figures; a number is the reward of its last turn; ``"raise"`` ends the run.
        max_failure_share: Largest share of an iteration's episodes, or of an
            evaluation's, of all processes, that may fail; above it the run ends with an error.
        failure_retries: How often an episode that fails before its first prompt is tried again,
            with a new environment. A step cannot be.
        The options of both functions: those of :class:`TrainingOptions`.

    Returns:
        ``pop``, trained.

    Raises:
        ValueError: For bad values and combinations, naming the argument and the remedy; for an
            environment that does not fit the agents' contexts; for a checkpoint that is damaged or
            another run's; for processes with different options.
        FileNotFoundError: If ``resume_from`` holds no complete checkpoint.
        TypeError: For an argument of the wrong type, or an environment of the wrong kind.
        NotImplementedError: For arguments that are not supported yet.
        EnvironmentFailure: If more episodes failed than may.
        RuntimeError: If another run that has not ended, in any process, uses this directory.
        ImportError: If TensorBoard or W&B is asked for and not installed.
        SystemExit: With ``exit_code_on_sigterm``, after SIGTERM to any of the processes, when all
            is saved.
    """
    check_agents(pop)
    ranks = training_ranks(accelerator, pop)
    options = TrainingOptions(**options_among(locals()))
    if options.tournament is not None:
        options.tournament.check_size(len(pop))
    require_trackers(tensorboard=tensorboard, wb=wb)
    COUNT("max_turns", max_turns)
    COUNT("groups_per_iteration", groups_per_iteration)
    COUNT("train_seeds", train_seeds)
    groups = per_process("groups_per_iteration", groups_per_iteration, ranks)
    make_env, make_first = fitting_factory(env_factory, env_config, pop, max_turns)
    # One per agent, so that their episodes can be played at the same time.
    envs = [
        SyncMultiTurnVecEnv(
            make_env,
            batch_size=groups,
            group_size=agent.group_size,
            max_turns=max_turns,
            max_workers=max_workers,
            reset_workers=reset_workers,
            step_timeout=step_timeout,
            on_failure=on_failure,
            max_failure_share=max_failure_share,
            failure_retries=failure_retries,
            evaluation_episodes=evaluation_episodes,
            process_index=ranks.rank,
            num_processes=ranks.world_size,
        )
        for agent in pop
    ]
    with ExitStack() as closing:
        for env in envs:
            closing.callback(env.close)
        name = make_first()
        envs[0].make_environments([0])  # That one, which has to be closed in any case.
        # Every agent plays the same seeds in the same order.
        collectors = [
            MultiTurnCollector(
                env,
                TrainingBatchSampler(train_seeds, groups, seed, ranks.rank, ranks.world_size),
                options.sampling,
                ranks,
            )
            for env in envs
        ]
        population = Population(pop, collectors)
        run_training(population, options, name, ranks)
    return pop
