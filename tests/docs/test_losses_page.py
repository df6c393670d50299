"""The page's agents learn, and it has every objective and option."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from agilerl.algorithms import GRPO
from agilerl.checks import OneOf
from agilerl.llm.advantages import group_relative
from agilerl.llm.losses import LOSS_TABLE

PAGE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
OF_THE_LOSS = (
    "adv_norm",
    "loss_reduction",
    "importance_sampling_level",
    "importance_anchor",
    "importance_correction",
    "advantage_baseline",
)


def learn(agent: GRPO, tokenizer: Any) -> dict[str, float]:
    prompts = [dict(tokenizer(text, return_tensors="pt")) for text in ("2+2?", "spell cat")]
    result = agent.get_action(prompts)
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.2], [0.0, 3.0, 1.0, 1.0]])
    experiences = (result.completion_ids, result.action_masks, rewards)
    return agent.learn(experiences, sampling_logps=result.sampling_logps)


def test_every_agent_learns() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    agents = 0
    for block in BLOCKS:
        for statement in ast.parse(block).body:
            code = compile(ast.Module([statement], []), "losses.md", "exec")
            exec(code, names)
            if "agent" not in names:
                continue
            agent = names.pop("agent")
            metrics = learn(agent, names["tokenizer"])
            assert metrics["grad_norm"] > 0, block
            assert all(math.isfinite(metrics[n]) for n in ("mean_loss", "entropy")), block
            agent.clean_up()
            agents += 1
    assert agents == PAGE.count("agent = ")


@pytest.mark.parametrize("name", OF_THE_LOSS)
def test_every_value_of_an_option_is_on_the_page(name: str) -> None:
    rule = GRPO.argument_table()[name].rule
    assert isinstance(rule, OneOf)
    for value in rule.allowed:
        assert value in (None, "old") or f'"{value}"' in PAGE, value


OTHERS_OF_THE_LOSS = (
    "adv_clip_range",
    "adv_filter_eps",
    "advantage_granularity",
    "beta",
    "clip_coef",
    "dual_clip",
    "entropy_coef",
    "filter_zero_adv",
    "importance_floor",
    "top_entropy_quantile",
    "use_kl_advantage_shaping",
    "vllm_importance_sampling_cap",
    "vllm_importance_sampling_correction",
    "whiten_advantages",
)


def test_every_argument_of_the_objective_is_on_the_page() -> None:
    table = GRPO.argument_table()
    for name in (*OF_THE_LOSS, *OTHERS_OF_THE_LOSS):
        assert name in table and f"`{name}" in PAGE, name
    assert all(f"`{loss_type.upper()}`" in PAGE for loss_type in LOSS_TABLE)


def test_the_figures_are_so() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.01])
    made = group_relative(rewards, 4, "mean_std", baseline="leave_one_out")
    assert round(made[0].item(), -1) == 170
    assert round(math.exp(0.01 * 1000), -3) == 22_000
