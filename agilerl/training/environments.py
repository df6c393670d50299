"""The environments of a run, as the user gives them: checked, and made to fit the agents."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agilerl.checks import missing_members, require
from agilerl.llm_envs.vector.environment_pool import checked_factory
from agilerl.training.protocols import DistributedEnv, SingleTurnEnv, TokenizingEnv

if TYPE_CHECKING:
    from agilerl.distributed import Ranks
    from agilerl.training.options import TrainingOptions
    from agilerl.training.protocols import Agent
    from agilerl.typing import MultiTurnEnv


def single_turn_environments(
    env: Any, env_fn: Callable[[], Any] | None, agents: Sequence[Agent], ranks: Ranks
) -> list[Any]:
    """One environment per agent: the shared ``env`` repeated, or one from each call of ``env_fn``.

    Raises:
        ValueError: If both or neither are given, if one was built without the accelerator, if an
            agent's ratio is per turn, if a prompt is too long for an agent, or if it would take an
            agent's padding for text.
        TypeError: If ``env_fn`` cannot be called or an environment lacks what the loop needs.
    """
    given = "neither was" if env is None else "both were"
    require(
        (env is None) != (env_fn is None),
        f"Exactly one of env and env_fn is needed, {given} given: env is shared by all agents, "
        "env_fn is called once per agent to make one each.",
    )
    if env_fn is None:
        name, environments = "env", [env] * len(agents)
    else:
        require(
            callable(env_fn),
            f"env_fn={env_fn!r} cannot be called: pass a function without arguments that returns "
            "an environment, or pass the environment itself as env.",
            TypeError,
        )
        name, environments = "env_fn()", [env_fn() for _ in agents]
    for agent, made in zip(agents, environments, strict=True):
        missing = missing_members(made, SingleTurnEnv)
        require(
            not missing,
            f"{name} is a {type(made).__name__}, which lacks {', '.join(missing)}: pass a "
            "ReasoningGym, or an environment with the same interface.",
            TypeError,
        )
        _check_processes(made, ranks)
        _check_ratio_level(agent)
        _check_prompts_fit(made, agent)
        _check_padding(made, agent)
    return environments


def check_evaluation_arguments(env: Any, options: TrainingOptions) -> None:
    """Refuse options of evaluations that an environment of the user's own does not know.

    Raises:
        TypeError: If its ``evaluate`` lacks the argument.
    """
    parameters = inspect.signature(env.evaluate).parameters.values()
    names = {each.name for each in parameters}
    anything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for name, argument in {"evaluation_rows": "rows", "evaluation_samples": "samples"}.items():
        require(
            vars(options)[name] is None or anything or argument in names,
            f"{name}={vars(options)[name]} was given, but evaluate of {type(env).__name__} has no "
            f"argument {argument}: add it, as ReasoningGym.evaluate has it, or leave {name} out.",
            TypeError,
        )


def _check_processes(env: Any, ranks: Ranks) -> None:
    """Refuse one that was built without the accelerator: all processes would train on the same."""
    if not missing_members(env, DistributedEnv):
        require(
            env.num_processes == ranks.world_size,
            f"{env.name} divides its rows among {env.num_processes} processes, but "
            f"{ranks.world_size} train together: pass the accelerator to the environment too.",
        )


def _check_ratio_level(agent: Any) -> None:
    """Refuse a ratio per turn, which ``learn`` would, after the first rollout."""
    # An agent of the user's own need not have these.
    level, loss = (
        getattr(agent, name, None) for name in ("importance_sampling_level", "loss_type")
    )
    require(
        level != "turn" or loss == "gspo",
        f"agent {agent.index} has importance_sampling_level='turn', but finetune_llm_reasoning has "
        "no turns: use 'token' or 'trajectory', or finetune_llm_multiturn.",
    )


def _check_prompts_fit(env: SingleTurnEnv, agent: Agent) -> None:
    """Refuse a prompt that would end the run when it is drawn: it leaves no room for a token."""
    lengths, limit = env.prompt_lengths(), agent.sampling_config().max_model_len
    longest, too_long = max(lengths), sum(length >= limit for length in lengths)
    require(
        not too_long,
        f"Prompts of {env.name} have up to {longest} tokens, template included, but agent "
        f"{agent.index} has max_model_len={limit}, which has to hold the prompt and at least one "
        f"token of its completion: {too_long} of {len(lengths)} prompts are too long. Leave them "
        f"out with a smaller max_context_length of ReasoningGym (at most {limit - 1}), or raise "
        "max_model_len of the agents.",
    )


def _check_padding(env: Any, agent: Agent) -> None:
    """Refuse a padding that rewards would see as text; special tokens they do not see."""
    if missing_members(env, TokenizingEnv):
        return
    tokenizer, pad = env.tokenizer, agent.sampling_config().pad_token_id
    require(
        pad == tokenizer.pad_token_id or pad in tokenizer.all_special_ids,
        f"agent {agent.index} has pad_token_id={pad}, but the environment's tokenizer has "
        f"{tokenizer.pad_token_id}, so that rewards would see padding as text: pass "
        "pad_token_id=tokenizer.pad_token_id of the same tokenizer to the agent.",
    )


def fitting_factory(
    env_factory: Callable[..., MultiTurnEnv],
    env_config: Mapping[str, Any] | None,
    agents: Sequence[Agent],
    max_turns: int,
) -> tuple[Callable[[], MultiTurnEnv], Callable[[], str]]:
    """A function that makes multi-turn environments which fit the agents.

    Args:
        env_factory: Makes an environment.
        env_config: Its keyword arguments.
        agents: Who will play in them.
        max_turns: Of an episode; an environment that counts turns itself must have the same.

    Returns:
        The function; and one that makes the first of these environments, which the other then
        returns first, so that what is wrong with it shows before anything is written. Its result is
        the class of the environment inside the wrapper, for the run's name.

    Raises:
        TypeError: If ``env_factory`` or ``env_config`` is of the wrong kind.
        ValueError: From the functions, if an environment does not fit the agents' contexts, or has
            another ``max_turns``.
    """
    factory = checked_factory(env_factory, env_config)
    unused: list[MultiTurnEnv] = []

    def make_new() -> MultiTurnEnv:
        made = factory()
        try:
            fit_context(made, agents)
            _check_turns(made, max_turns)
        except ValueError:
            close = getattr(made, "close", None)  # It may be anything.
            if callable(close):
                close()
            raise
        return made

    def make() -> MultiTurnEnv:
        try:
            return unused.pop()
        except IndexError:  # checking first would race with other threads
            return make_new()

    def make_first() -> str:
        unused.append(make_new())
        return type(getattr(unused[0], "env", unused[0])).__name__

    return make, make_first


def _check_turns(env: Any, max_turns: int) -> None:
    own = getattr(env, "max_turns", max_turns)
    require(
        own == max_turns,
        f"max_turns={max_turns} was given to finetune_llm_multiturn, but env_factory made an "
        f"environment with max_turns={own}: give both the same.",
    )


def fit_context(env: Any, agents: Sequence[Agent]) -> None:
    """Give a multi-turn environment the agents' lengths where it has none; check those it has.

    Raises:
        ValueError: If its rows could get longer than an agent's context, or an agent's
            completions longer than its rows.
    """
    if not hasattr(env, "max_model_len"):
        return
    configs = [agent.sampling_config() for agent in agents]
    limit = min(config.max_model_len for config in configs)
    completions = [config.max_new_tokens for config in configs if config.max_new_tokens is not None]
    reserved = getattr(env, "max_output_tokens", None)
    if env.max_model_len is None:
        env.max_model_len = limit
    if reserved is None and len(completions) == len(configs):
        env.max_output_tokens = reserved = max(completions)
    own, room = env.max_model_len, reserved or 1
    require(
        own <= limit,
        f"env_factory made an environment with max_model_len={own}, but an agent has "
        f"max_model_len={limit}: give both the same, or leave the environment's at None.",
    )
    for config in configs:
        most = config.max_new_tokens
        require(
            config.max_model_len <= own or (most is not None and most <= room),
            f"env_factory made an environment with max_model_len={own} that keeps {room} tokens "
            f"free for a completion, but an agent with max_model_len={config.max_model_len} may "
            f"generate {f'up to {most}' if most else 'that many'} tokens (max_output_tokens): give "
            "all the same max_model_len, or the environment the agents' largest max_output_tokens.",
        )
