"""Runs that generate with vLLM and are stopped go on as if they had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from resume_helpers import (
    RUNS,
    After,
    Hook,
    differences,
    everything,
    make_agents,
    nothing,
    reseed,
    seed_all,
)
from transformers import PreTrainedModel
from vllm_agents import CONFIG

from agilerl.algorithms import GRPO


@pytest.mark.parametrize("kind", RUNS)
def test_stopped_and_resumed(
    kind: str, base: PreTrainedModel, keeper: GRPO, tmp_path: Path
) -> None:
    """Bit for bit, as the engine is the same and gets the same requests in the same order."""

    def run(path: Path, hook: Hook = nothing, **options: Any) -> dict[str, Any]:
        pop = make_agents(
            actor_network=base, use_vllm=True, vllm_config=CONFIG, max_model_len=128, lr=1e-3
        )
        found = everything(path, RUNS[kind](path, hook=hook, pop=pop, **options))
        for agent in pop:
            agent.clean_up()
        return found

    seed_all()
    whole = run(tmp_path / "whole")
    seed_all()
    run(tmp_path / "run", After(3 if kind == "reasoning" else 11))
    reseed()
    resumed = run(tmp_path / "run", resume_from=tmp_path / "run")
    assert len(whole["rows"]) >= 6
    assert any(float(row["grad_norm"] or 0) > 0 for row in whole["rows"])
    assert not differences(whole, resumed)
    # Log-probs of every turn stand where the actions do.
    weights = [row["importance_weight_mean"] for row in whole["rows"]]
    assert [float(weight) for weight in weights if weight] == pytest.approx(
        [1.0] * sum(map(bool, weights)), abs=1e-3
    )
    assert any(weights)
