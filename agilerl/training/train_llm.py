"""The public training functions; what they do is in ``loop.py``."""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

import agilerl
from agilerl.training import arguments
from agilerl.training.arguments import LoopOptions
from agilerl.training.collectors import ReasoningCollector
from agilerl.training.elite import check_elite_outside
from agilerl.training.loop import TrainingLoop
from agilerl.training.protocols import Agent, Collector, SingleTurnEnv
from agilerl.training.run_directory import RunDirectory, run_name
from agilerl.training.run_logging import RunLog
from agilerl.training.trackers import require_trackers

logger = logging.getLogger(__name__)

AgentT = TypeVar("AgentT", bound=Agent)


def finetune_llm_reasoning(  # noqa: PLR0913, PLR0917  the contract's arguments
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
) -> list[AgentT]:
    """Finetune a population on single-turn tasks.

    One iteration is one batch of prompts and one ``learn`` per agent. All agents are evaluated on
    the whole test split before training, every ``evaluation_interval`` iterations and at the end.
    The run ends with the iteration in which an agent has consumed ``max_steps`` prompts or an
    environment has completed ``num_epochs`` passes in this call, whichever comes first. Ctrl-C or
    SIGTERM ends it after the running iteration, with a checkpoint; a second Ctrl-C at once.

    The run directory is ``checkpoint_path``, or ``runs/<ALGO>-<environment>-<date>-<time>``. It
    holds ``metrics.csv``, ``completions.jsonl`` and ``config.json``; what an earlier run left there
    is moved aside, not overwritten. Two runs cannot have the same one at the same time.

    Args:
        pop: Agents, with different ``index``. Their ``fitness`` grows by one entry per evaluation,
            ``steps`` by the prompts consumed up to then, ``scores`` by the mean reward of each
            iteration.
        env: The environment, such as ``ReasoningGym``, shared by all agents.
        env_fn: Instead of ``env``: called once per agent to make an environment each.
        init_hp: Facts to note in ``config.json`` and the W&B configuration; they set nothing.
        save_elite: Save the best agent whenever an evaluation brings a new best fitness.
        elite_path: Directory of that checkpoint. An earlier run's elite there is moved to
            ``<elite_path>.earlier_1`` (2, 3, ...) when this run's first one is saved; the
            evaluation before training saves none where an earlier one is.
        wb: Log to Weights & Biases.
        tensorboard: Log to TensorBoard.
        tensorboard_log_dir: Parent of this run's event folder; None: in the run directory.
        evo_steps: Not supported yet.
        checkpoint_steps: Write ``<checkpoint_path>/iteration_<number>`` every so many iterations.
        checkpoint_path: The run directory.
        tournament: Not supported yet.
        mutation: Not supported yet.
        wandb_api_key: W&B key; kept in memory only.
        wandb_kwargs: Further arguments of ``wandb.init``.
        evaluation_interval: Iterations from one evaluation to the next.
        max_reward: Completions with at least this reward count as accurate, 1.0 when None.
        verbose: Show a progress bar and the run directory.
        accelerator: Not supported yet.
        max_steps: Prompts to consume per agent; the last batch is not cut.
        num_epochs: Passes over the training data.
        resume_from: Not supported yet.

    Returns:
        ``pop``, trained.

    Raises:
        ValueError: For bad values and combinations, naming the argument and the remedy; for a
            prompt, of either split, that is too long for the context of an agent.
        TypeError: For values of the wrong type.
        NotImplementedError: For arguments that are not supported yet.
        RuntimeError: If a run that is still going on, in whatever process, has this directory.
        ImportError: If TensorBoard or W&B is asked for and not installed.
    """
    arguments.check_population(pop)
    arguments.check_selection(tournament, mutation, evo_steps)
    arguments.refuse_unsupported(accelerator=accelerator, resume_from=resume_from)
    options = LoopOptions(
        max_steps=max_steps,
        num_epochs=num_epochs,
        evaluation_interval=evaluation_interval,
        checkpoint_steps=checkpoint_steps,
        checkpoint_path=checkpoint_path,
        save_elite=save_elite,
        elite_path=elite_path,
        max_reward=max_reward,
        init_hp=init_hp,
        verbose=verbose,
        tensorboard=tensorboard,
        tensorboard_log_dir=tensorboard_log_dir,
        wb=wb,
        wandb_kwargs=wandb_kwargs,
        wandb_api_key=wandb_api_key,
    )
    require_trackers(tensorboard=tensorboard, wb=wb)
    envs = arguments.check_environments(env, env_fn, len(pop))
    arguments.check_prompts_fit(pop, envs)
    # Agents that share an environment share its collector: the pending batch is one for all.
    distinct_envs = {id(made): made for made in envs}
    collector_of = {key: ReasoningCollector(made) for key, made in distinct_envs.items()}
    collectors = [collector_of[id(made)] for made in envs]
    total = _total_prompts(options, len(envs[0]), agents_per_env=len(envs) // len(distinct_envs))
    _run(pop, collectors, options, env_name=envs[0].name, total=total)
    return pop


def _run(
    agents: Sequence[Agent],
    collectors: Sequence[Collector],
    options: LoopOptions,
    env_name: str,
    total: int | None,
) -> None:
    """Open the run directory and its logs, run the loop, close the logs."""
    name = run_name(agents, env_name)
    check_elite_outside(options.elite_path, Path(options.checkpoint_path or Path("runs") / name))
    with RunDirectory(name, options.checkpoint_path) as directory:
        config = _config(agents, options, name, env_name)
        directory.write_config(config)
        log = RunLog(directory.path, name, options, config, total)
        failed = True
        try:
            logger.info("Run directory: %s", directory.path)
            if options.verbose:
                log.say(f"Run directory: {directory.path}")
            TrainingLoop(agents, collectors, options, directory, log).run()
            failed = False
        finally:
            log.close(failed)


def _total_prompts(options: LoopOptions, rows: int, agents_per_env: int) -> int:
    """Prompts per agent that the run will consume, up to the last batch, for the progress bar."""
    bounds = []
    if options.max_steps is not None:
        bounds.append(options.max_steps)
    if options.num_epochs is not None:
        bounds.append(-(-options.num_epochs * rows // agents_per_env))
    return min(bounds)


def _config(
    agents: Sequence[Agent], options: LoopOptions, name: str, env_name: str
) -> dict[str, Any]:
    """Facts about the run for ``config.json`` and W&B; no secrets."""
    # wandb_kwargs may carry a key in its settings, so neither it nor the key itself is noted.
    noted = [
        field.name
        for field in dataclasses.fields(options)
        if field.name not in ("init_hp", "wandb_kwargs", "wandb_api_key")
    ]
    config = {
        "run": name,
        "environment": env_name,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "population": [{"index": agent.index, "algo": agent.algo} for agent in agents],
        "arguments": {field: getattr(options, field) for field in noted},
        "init_hp": {str(key): value for key, value in (options.init_hp or {}).items()},
        "versions": {
            "agilerl": agilerl.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }
    # Plain JSON from here on: init_hp may hold any object.
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return plain
