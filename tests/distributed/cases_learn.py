"""What the two ranks run. Every case is called on each of them and returns what it found.

The tests compare with a single process, or between ranks; see ``run_cases.py`` for the loop.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import DistributedType
from agents_and_batches import (
    AGAINST_SAMPLER,
    COSINE,
    CREDIT,
    DECAY,
    LEFT,
    MASKED,
    OPTIONS,
    PROMPTS_OF_RANK,
    TOKENIZER,
    UNEVEN,
    UNEVEN_QUANTILE,
    data,
    make_agent,
    moments,
    weights,
)
from datasets import Dataset

from agilerl.algorithms import GRPO
from agilerl.distributed import ranks_of
from agilerl.llm.batch import make_batch
from agilerl.llm.engine.accelerator_config import zero_section
from agilerl.llm.engine.build import build_engine
from agilerl.llm.engine.local import LocalEngine
from agilerl.llm.losses import policy_objective
from agilerl.llm.step_results import SkippedSteps
from agilerl.llm.update import run_update
from agilerl.llm_envs import ReasoningGym
from agilerl.testing import tiny_model

Case = Callable[[Any], dict[str, Any]]
LEARN_CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    LEARN_CASES[function.__name__] = function
    return function


def mine(accelerator: Any, seed: int = 0, stretch: int = 1) -> Any:
    return data(seed, stretch).of(PROMPTS_OF_RANK[accelerator.process_index])


def found(agent: GRPO, metrics: Any) -> dict[str, Any]:
    result = {
        "weights": weights(agent),
        "metrics": metrics,
        "moments": moments(agent),
        "engine": type(agent.engine).__name__,
    }
    agent.clean_up()
    return result


def one_step(accelerator: Any, **changes: Any) -> dict[str, Any]:
    agent = make_agent(accelerator, **changes)
    return found(agent, mine(accelerator).learned_by(agent))


@case
def one_step_grpo(accelerator: Any) -> dict[str, Any]:
    return one_step(accelerator)


@case
def one_step_cispo(accelerator: Any) -> dict[str, Any]:
    return one_step(accelerator, loss_type="cispo", clip_coef=(0.0, 5.0))


@case
def one_step_constant(accelerator: Any) -> dict[str, Any]:
    return one_step(accelerator, loss_reduction="constant")


@case
def whitened_turns(accelerator: Any) -> dict[str, Any]:
    agent = make_agent(accelerator, **CREDIT)
    return found(agent, mine(accelerator).learned_by(agent, per_turn=True))


@case
def nothing_to_learn_on_rank_0(accelerator: Any) -> dict[str, Any]:
    agent = make_agent(accelerator, beta=0.0)
    part = mine(accelerator)
    if accelerator.process_index == 0:
        part.rewards.zero_()
    return found(agent, part.learned_by(agent))


@case
def no_actions_on_rank_0(accelerator: Any) -> dict[str, Any]:
    agent = make_agent(accelerator)
    part = mine(accelerator)
    if accelerator.process_index == 0:
        part.masks[0].zero_()
    return found(agent, part.learned_by(agent))


@case
def nothing_to_learn_anywhere(accelerator: Any) -> dict[str, Any]:
    agent = make_agent(accelerator, beta=0.0)
    part = mine(accelerator)
    part.rewards.zero_()
    before = weights(agent)
    metrics = part.learned_by(agent)
    return {"weights": weights(agent), "before": before, "metrics": metrics}


@case
def some_left_out(accelerator: Any) -> dict[str, Any]:
    """Other ones on each rank; with turn credit and whitening; masked instead."""
    mask = LEFT[PROMPTS_OF_RANK[accelerator.process_index]]
    agent, credit = make_agent(accelerator), make_agent(accelerator, **CREDIT)
    part = mine(accelerator)
    part.rewards[~mask] = math.nan
    first = found(agent, part.learned_by(agent, sample_mask=mask))
    second = found(credit, part.learned_by(credit, per_turn=True, sample_mask=mask))
    masked, part = make_agent(accelerator, **MASKED), mine(accelerator)
    part.rewards[0] = 0.0
    third = found(masked, part.learned_by(masked, truncated=~mask))
    return {"plain": first, "credit": second, "masked": third}


@case
def all_left_out_on_rank_0(accelerator: Any) -> dict[str, Any]:
    """Then on both ranks, which is no step."""
    agent = make_agent(accelerator)
    part = mine(accelerator)
    mask = torch.full((len(part.ids), 4), accelerator.process_index == 1)
    result = found(agent, part.learned_by(agent, sample_mask=mask))
    idle = make_agent(accelerator)
    before = weights(idle)
    metrics = part.learned_by(idle, sample_mask=mask & False)
    return result | {"idle": torch.equal(before, weights(idle)), "idle_metrics": metrics}


@case
def options_of_the_loss(accelerator: Any) -> dict[str, Any]:
    """What is over the batch or mini-batch of all ranks; then ratios against the sampler."""
    part = mine(accelerator)
    agent = make_agent(accelerator, **OPTIONS)
    together = part.learned_by(agent, per_turn=True, sampling_logps=part.sampling_logps())
    first = found(agent, together)
    agent = make_agent(accelerator, **AGAINST_SAMPLER)
    against = part.learned_by(agent, sampling_logps=part.sampling_logps())
    second = found(agent, against)
    idle = make_agent(accelerator, **AGAINST_SAMPLER)
    logps = part.sampling_logps()
    refusal = ""
    try:
        missing = [None] * len(logps) if accelerator.process_index == 1 else logps
        part.learned_by(idle, sampling_logps=missing)
    except ValueError as error:
        refusal = str(error)
    return {"together": first, "against": second, "refusal": refusal}


@case
def mini_batches(accelerator: Any) -> dict[str, Any]:
    """Rank 1 has two mini-batches in each of two epochs, rank 0 one."""
    agent = make_agent(accelerator, batch_size=8, update_epochs=2, lr=1e-2)
    rng_state = agent.rng.get_state()
    return found(agent, mine(accelerator).learned_by(agent)) | {"rng_state": rng_state}


def counting_tokens(agent: GRPO) -> list[int]:
    """Tokens that forwards run from now on until each optimizer step, and after the last."""
    counts, step = [0], agent.engine.step

    def count(_: Any, given: tuple[torch.Tensor], __: Any) -> None:
        counts[-1] += given[0].numel()

    def counted_step(max_grad_norm: float) -> float:
        counts.append(0)
        return step(max_grad_norm)

    agent.policy.base.model.get_input_embeddings().register_forward_hook(count)
    agent.engine.step = counted_step  # type: ignore[method-assign]
    return counts


def uneven(accelerator: Any, *, balanced: bool, **settings: Any) -> dict[str, Any]:
    """Rank 1 has more rows than rank 0, and episodes of several."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:  # which needs float32
        settings["actor_network"] = tiny_model(hidden_size=32, layers=1, dtype=torch.float64)
    agent = make_agent(accelerator, use_sequence_packing=balanced, **settings)
    part, extra = mine(accelerator, stretch=4), {}
    if accelerator.process_index == 1:
        part.rewards[0] = 0.0
        part, extra["trajectory_ids"] = part.with_longer_episodes(mine(accelerator, 1, 4))
    counts = counting_tokens(agent)
    metrics = part.learned_by(agent, sampling_logps=part.sampling_logps(), **extra)
    return found(agent, metrics) | {"tokens": torch.tensor(counts)}


@case
def uneven_ranks(accelerator: Any) -> dict[str, Any]:
    """Rows stay, and are dealt anew; then a row that moves has a loss that is not finite."""
    result: dict[str, Any] = {
        name: [uneven(accelerator, balanced=b, **settings) for b in (False, True)]
        for name, settings in (
            ("all", UNEVEN),
            ("advantages", UNEVEN | {"beta": 0.0, "loss_reduction": "prompt"}),
            ("quantile", UNEVEN_QUANTILE),
        )
    }
    agent = make_agent(accelerator, beta=0.0, use_sequence_packing=True)
    part, counts = mine(accelerator), counting_tokens(agent)
    values = part.rewards.sum(-1).flatten() - 1.0
    if accelerator.process_index == 1:
        values[5] = math.inf
    skipped = SkippedSteps()
    try:
        for _ in range(3):
            update_with(agent, values, part, skipped)
    except RuntimeError as error:
        result["error"] = str(error)
    return result | {"tokens": sum(counts)}


@case
def ten_steps(accelerator: Any) -> dict[str, Any]:
    """With a schedule, and with lr and clipping mutated on the way."""
    agent = make_agent(accelerator, cosine_lr_schedule_config=COSINE)
    history = []
    for step in range(10):
        mutate(agent, step)
        metrics = mine(accelerator, step).learned_by(agent)
        history.append((metrics["grad_norm"], agent.optimizer.param_groups[0]["lr"]))
    return found(agent, metrics) | {"history": history}


def mutate(agent: GRPO, step: int) -> None:
    if step == 4:
        agent.lr = 3e-3
    if step == 6:
        agent.max_grad_norm = 0.02


def update_with(
    agent: GRPO, values: torch.Tensor, part: Any, skipped: SkippedSteps
) -> dict[str, float]:
    """``learn`` with advantages of any value."""
    batch = make_batch(part.ids, part.masks)
    values = torch.where(batch.action_mask, values[:, None], 0.0)
    batch = replace(batch, advantages=values)
    configs = (policy_objective(agent.loss_config()), agent.forward_config(), agent.update_config())
    metrics = run_update(agent.policy, agent.engine, batch, *configs, agent.rng, skipped)
    return metrics.result()


@case
def non_finite(accelerator: Any) -> dict[str, Any]:
    """A bad loss on rank 1, a gradient too large for float32 on rank 0, a good step, three bad."""
    agent = make_agent(accelerator, beta=0.0, loss_type="cispo", clip_coef=(0.0, 5.0))
    agent.loss_reduction = "sum"
    part, rank = mine(accelerator), accelerator.process_index
    good = part.rewards.sum(-1).flatten() - 1.0
    bad_loss, bad_gradient = good.clone(), good.clone()
    if rank == 1:
        bad_loss[5] = math.inf
    if rank == 0:
        bad_gradient[:] = 1e38
    counter, before = SkippedSteps(), weights(agent)
    skipped = []
    for values in (bad_loss, bad_gradient):
        metrics = update_with(agent, values, part, counter)
        skipped.append((metrics["skipped_steps"], torch.equal(weights(agent), before)))
    metrics = update_with(agent, good, part, counter)
    result = {"skipped": skipped, "bad_steps": counter.in_a_row, "error": None}
    result |= {"weights": weights(agent), "metrics": metrics, "moments": moments(agent)}
    try:
        for _ in range(3):
            update_with(agent, bad_loss, part, counter)
    except RuntimeError as error:
        result["error"] = str(error)
    return result


@case
def state(accelerator: Any) -> dict[str, Any]:
    """Two steps, then a third of the agent wrapped anew, of clones, and of one given its state."""
    part = mine(accelerator)
    agent = make_agent(accelerator, cosine_lr_schedule_config=COSINE)
    for _ in range(2):
        part.learned_by(agent)
    saved, start = agent.engine.state_dict(), weights(agent)
    twin, unwrapped = agent.clone(), agent.clone(wrap=False)
    other = make_agent(accelerator, cosine_lr_schedule_config=COSINE)
    write(other, start)
    other.engine.load_state_dict(saved)

    plain = type(unwrapped.engine) is LocalEngine
    refusal = ""
    try:
        part.learned_by(unwrapped)
    except RuntimeError as error:
        refusal = str(error)
    unwrapped.wrap_models()
    agent.unwrap_models()
    values_kept = torch.equal(weights(agent), start)
    agent.wrap_models()
    agents = {"again": agent, "clone": twin, "unwrapped": unwrapped, "loaded": other}
    third = {}
    for name, each in agents.items():
        part.learned_by(each)
        third[name] = (weights(each), moments(each))
        each.clean_up()
    return {
        "saved": saved,
        "start": start,
        "third": third,
        "plain": plain,
        "refusal": refusal,
        "values_kept": values_kept,
    }


def write(agent: GRPO, values: torch.Tensor) -> None:
    parameters = list(agent.policy.parameters().values())
    with torch.no_grad():
        for p, part in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.view_as(p))


@case
def state_of_one_process(accelerator: Any) -> dict[str, Any]:
    """What a single process saved after two steps is loaded by the ranks, which do the third."""
    alone = make_agent(cosine_lr_schedule_config=COSINE)
    for _ in range(2):
        data().learned_by(alone)
    agent = make_agent(accelerator, cosine_lr_schedule_config=COSINE)
    mine(accelerator).learned_by(agent)  # so that there are moments to be overwritten
    write(agent, weights(alone))
    agent.engine.load_state_dict(alone.engine.state_dict())
    mine(accelerator).learned_by(agent)
    refusal = ""
    try:
        agent.engine.load_state_dict(make_other_state())
    except ValueError as error:
        refusal = str(error)
    return found(agent, None) | {"refusal": refusal}


def make_other_state() -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.ones(3))
    engine = LocalEngine([parameter], 0.1)
    engine.backward(parameter.sum())
    engine.step(1.0)
    return engine.state_dict()


@case
def other_schedule(accelerator: Any) -> dict[str, Any]:
    """A state saved at another learning rate and without a schedule, loaded where there is one."""
    saving = make_agent(accelerator, lr=0.5)
    mine(accelerator).learned_by(saving)
    agent = make_agent(accelerator, cosine_lr_schedule_config=COSINE)
    before = agent.optimizer.param_groups[0]["lr"]
    agent.engine.load_state_dict(saving.engine.state_dict())
    saving.clean_up()
    rates = [before, agent.optimizer.param_groups[0]["lr"]]
    mine(accelerator).learned_by(agent)
    agent.clean_up()
    return {"rates": rates}


def parameters_of_two_groups() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.arange(n) / n + 0.5) for n in (3, 7, 4)]


def step_two_groups(engine: LocalEngine, number: int, ranks: Sequence[int]) -> None:
    """The second group has no gradient in steps 0, 1 and 3."""
    used = engine.parameters[: 1 if number in (0, 1, 3) else 3]
    for rank in ranks:
        engine.backward(torch.stack([((p - number) ** (2 + rank)).sum() for p in used]).sum())
    engine.step(10.0)


@case
def two_groups(accelerator: Any) -> dict[str, Any]:
    """Two parameter groups, stepped together and apart; in a new engine before every step."""
    parameters, saved, shards = parameters_of_two_groups(), None, []
    ranks = ranks_of(accelerator)
    for number in range(5):
        groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.02}]
        engine = build_engine(groups, 0.1, None, accelerator, DECAY)
        if saved is not None:
            engine.load_state_dict(saved)
        engine.loss_scale = 2.0 ** (10 + ranks.rank)  # undone before gradients are summed
        step_two_groups(engine, number, [ranks.rank])
        saved = engine.state_dict()
        if engine.sharded:
            shards.append(ranks.gather(engine.shard()))  # type: ignore[attr-defined]
        engine.close()
    return {"values": [p.detach() for p in parameters], "saved": saved, "shards": shards}


def refusal(accelerator: Any, optimizer: Any) -> str:
    try:
        make_agent(accelerator, optimizer=optimizer)
    except ValueError as error:
        return str(error)
    return ""


@case
def another_optimizer(accelerator: Any) -> dict[str, Any]:
    """What a function makes, or bitsandbytes, which ZeRO cannot partition."""
    if zero_section(accelerator).get("stage"):
        return {
            "refusals": [refusal(accelerator, each) for each in (torch.optim.SGD, "adamw_8bit")]
        }
    agent = make_agent(accelerator, optimizer=torch.optim.SGD)
    mine(accelerator).learned_by(agent)
    result = {"weights": weights(agent)}
    agent.clean_up()
    return result


@case
def fresh_optimizer(accelerator: Any) -> dict[str, Any]:
    """Starting afresh: the weights stay, and the next step is a first one."""
    agent = make_agent(accelerator)
    empty = agent.engine.state_dict()["optimizer"]["state"]
    start = weights(agent)
    mine(accelerator).learned_by(agent)
    write(agent, start)
    agent.reinit_optimizers()
    return found(agent, mine(accelerator).learned_by(agent)) | {"empty": empty}


@case
def agreement(accelerator: Any) -> dict[str, Any]:
    """Ranks start from rank 0's weights, sample differently, and report the same fitness."""
    agent = make_agent(accelerator)
    with torch.no_grad():
        next(iter(agent.policy.parameters().values())).add_(accelerator.process_index)
    agent.reinit_optimizers()  # any engine made anew
    prompt = dict(TOKENIZER("abc", return_tensors="pt"))
    sampled = agent.get_action([prompt]).completion_ids[0]
    rows = Dataset.from_list([{"question": q, "answer": q} for q in "abcdefg"])
    template = [{"role": "user", "content": "{question}"}]
    environment = (TOKENIZER, lambda completion, answer, question: float(ord(question)), template)
    env = ReasoningGym(rows, rows, *environment, accelerator=accelerator)
    scores = agent.test(env)
    one_row = ReasoningGym(rows, rows.select([3]), *environment, accelerator=accelerator)
    of_one_row = agent.test(one_row)
    indivisible = ""
    try:
        make_agent(accelerator, batch_size=15)
    except ValueError as error:
        indivisible = str(error)
    agent.batch_size = 7
    try:
        mine(accelerator).learned_by(agent)
    except ValueError as error:
        indivisible += str(error)
    return {
        "weights": weights(agent),
        "sampled": sampled,
        "scores": scores,
        "of_one_row": of_one_row,
        "fitness": agent.fitness,
        "indivisible": indivisible,
    }


@case
def other_base(accelerator: Any) -> dict[str, Any]:
    """A base model that was initialised otherwise on rank 1."""
    try:
        make_agent(accelerator, actor_network=tiny_model(seed=accelerator.process_index))
    except ValueError as error:
        return {"error": str(error)}
    return {}


class _Unsendable(Exception):
    """Cannot be made from its message alone, as unpickling does."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)


@case
def errors(accelerator: Any) -> dict[str, Any]:
    """What fails on one rank fails on all; the ranks stay in step."""
    ranks = ranks_of(accelerator)

    def fail_on_rank_1(error: Exception) -> str:
        if ranks.rank == 1:
            raise error
        return "done"

    raised: list[str] = []
    for error in (OSError("disk full"), _Unsendable("odd", 3)):
        try:
            ranks.on_all_ranks(lambda error=error: fail_on_rank_1(error))  # type: ignore[misc]
        except (OSError, RuntimeError, _Unsendable) as caught:
            raised.append(repr(caught))
    first = ranks.on_rank_zero(lambda: fail_on_rank_1(OSError("not run")))
    return {"raised": raised, "first": first, "together": ranks.on_all_ranks(lambda: ranks.rank)}


@case
def in_lockstep(accelerator: Any) -> dict[str, Any]:
    """As engines that communicate in every forward will need it."""
    agent = make_agent(accelerator)
    agent.engine.lockstep = True
    counts = {"forwards": 0, "backwards": 0}
    backward = agent.engine.backward

    def counted(loss: torch.Tensor) -> None:
        counts["backwards"] += 1
        backward(loss)

    agent.engine.backward = counted  # type: ignore[method-assign]
    return found(agent, mine(accelerator).learned_by(agent)) | counts


@case
def deepspeed_settings(accelerator: Any) -> dict[str, Any]:
    """What an agent makes of a DeepSpeed configuration; the last case, as it changes that."""
    config = accelerator.deepspeed_plugin.deepspeed_config
    result: dict[str, Any] = {}
    config |= {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "optimizer": {}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agent = make_agent(accelerator, micro_batch_size_per_gpu=None)
        agent.clone()
    result["warnings"] = [str(w.message) for w in caught if "no effect" in str(w.message)]
    result["update"] = agent.update_config()
    config["zero_optimization"]["offload_param"] = {"device": "nvme"}
    try:
        make_agent(accelerator)
    except NotImplementedError as error:
        result["nvme"] = str(error)
    return result
