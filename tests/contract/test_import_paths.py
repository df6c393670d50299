"""The public names are where the contract says; rows are added as their parts are built."""

from __future__ import annotations

import importlib

import pytest

import agilerl

PATHS = {
    "agilerl": [
        "GRPO", "GSPO", "CISPO", "ReasoningGym", "TokenObservationWrapper", "SyncMultiTurnVecEnv",
        "finetune_llm_reasoning", "finetune_llm_multiturn",
    ],
    "agilerl.algorithms": ["GRPO", "GSPO", "CISPO"],
    "agilerl.algorithms.grpo": ["GRPO"],
    "agilerl.algorithms.gspo": ["GSPO"],
    "agilerl.algorithms.cispo": ["CISPO"],
    "agilerl.algorithms.core": ["EvolvableAlgorithm", "LLMAlgorithm"],
    "agilerl.algorithms.core.registry": [
        "HyperparameterConfig", "RLParameter", "NetworkGroup", "OptimizerConfig",
    ],
    "agilerl.llm_envs": ["ReasoningGym", "TokenObservationWrapper", "SyncMultiTurnVecEnv"],
    "agilerl.rewards": [
        "CodeExecutionReward", "RewardModel", "batched_reward", "boxed_answer", "exact_match",
        "extract_boxed", "format_matches", "soft_overlong_penalty",
    ],
    "agilerl.training.train_llm": ["finetune_llm_reasoning", "finetune_llm_multiturn"],
    "agilerl.utils": ["MemoryEstimate", "MemorySettings", "estimate_memory"],
    "agilerl.utils.utils": ["save_llm_checkpoint", "create_population"],
    "agilerl.utils.algo_utils": ["CosineLRScheduleConfig"],
    "agilerl.typing": ["ActionResult", "ReasoningPrompts", "ExperiencesType", "MultiTurnEnv"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in PATHS.items() for name in names]
)
def test_import_path(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None


def test_the_package_lists_its_lazy_names() -> None:
    assert set(PATHS["agilerl"]) <= set(dir(agilerl))
    with pytest.raises(AttributeError, match="no attribute 'PPO'"):
        _ = agilerl.PPO
