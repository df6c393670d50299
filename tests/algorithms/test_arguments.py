"""One row per constructor argument; a new algorithm brings the rows of its own arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from agent_helpers import TOKENIZER, prompts, small_model

from agilerl.algorithms import GRPO, GSPO
from agilerl.algorithms.core import LLMAlgorithm
from agilerl.algorithms.core.arguments import argument
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.checks import Number

TOKENS: dict[str, Any] = {
    "pad_token_id": TOKENIZER.pad_token_id,
    "pad_token": TOKENIZER.pad_token,
}


def test_the_rows_are_the_constructors_arguments_and_have_its_defaults() -> None:
    table = GRPO.argument_table()
    signature = inspect.signature(GRPO).parameters
    assert {name: row.default for name, row in table.items()} == {
        name: parameter.default for name, parameter in signature.items()
    }
    for name, row in table.items():
        if row.default is not inspect.Parameter.empty:
            row.check(name, row.default)


def test_what_evolution_may_mutate() -> None:
    mutable = {name for name, row in GSPO.argument_table().items() if row.mutable}
    assert mutable == {
        "lr", "beta", "clip_coef", "group_size", "batch_size", "micro_batch_size_per_gpu",
        "update_epochs", "temperature", "max_grad_norm", "adv_clip_range",
        "vllm_importance_sampling_cap", "entropy_coef", "weight_decay",
    }  # fmt: skip


def test_a_checkpoint_holds_all_but_what_belongs_to_the_process() -> None:
    agent = GSPO(**TOKENS, actor_network=small_model())
    signature = set(inspect.signature(GSPO).parameters)
    not_saved = signature - set(agent.saved_arguments())
    assert not_saved == {
        "actor_network",
        "accelerator",
        "device",
        "wrap",
        "clone",
        "use_vllm",
        "vllm_config",
        "quantization_config",  # recorded as what the base is
    }


class Margin(LLMAlgorithm):
    """An algorithm with few arguments, one of them its own."""

    margin: float = argument(Number(0, 1), 0.5, mutable=True)

    def __init__(
        self,
        pad_token_id: int,
        pad_token: str,
        actor_network: Any = None,
        hp_config: HyperparameterConfig | None = None,
        index: int = 0,
        lr: float = 1e-3,
        margin: float = 0.5,
        max_output_tokens: int = 4,
        lora_config: Any = None,
        accelerator: Any = None,
        device: str = "cpu",
        wrap: bool = True,
        clone: bool = False,
    ) -> None:
        super().__init__(locals())


def test_another_algorithm_takes_its_own_arguments_and_none_of_grpos() -> None:
    agent = Margin(**TOKENS, actor_network=small_model(), margin=0.25)
    assert (agent.algo, agent.margin, agent.lr, agent.temperature) == ("Margin", 0.25, 1e-3, 0.9)
    assert not hasattr(agent, "beta") and not hasattr(agent, "actor_network")
    (ids,), (mask,) = agent.get_action(prompts("hello"))
    assert ids.shape[0] == 1 and mask.sum() <= 4, "no groups"
    agent.margin = 0.75
    twin = agent.clone(index=2)
    assert (twin.margin, twin.index, type(twin)) == (0.75, 2, Margin)
    agents = Margin.population(
        3,
        **TOKENS,
        actor_network=small_model(),
        hp_config=HyperparameterConfig(margin=RLParameter(0.1, 0.2)),
    )
    assert len({a.margin for a in agents}) == 3 and all(0.1 <= a.margin <= 0.2 for a in agents)


def test_another_algorithm_is_saved_and_loaded(tmp_path: Any) -> None:
    agent = Margin(**TOKENS, actor_network=small_model(), margin=0.25)
    agent.save_checkpoint(tmp_path / "saved", lora_only=False)
    loaded = Margin.load(tmp_path / "saved")
    assert loaded.margin == 0.25
    for name, tensor in agent.policy.parameters().items():
        assert torch.equal(loaded.policy.parameters()[name], tensor)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"margin": 2.0}, ValueError, "margin is 2.0; it must be at least 0 and at most 1"),
        ({"margin": "1"}, TypeError, "margin is '1'; it must be a number"),
        ({"lr": 0.0}, ValueError, "lr is 0.0; it must be above 0"),
        ({"actor_network": None}, ValueError, "actor_network and model_name are both None"),
        (
            {"hp_config": HyperparameterConfig(beta=RLParameter(0, 1))},
            ValueError,
            "'beta'.*one of.*margin",
        ),
        (
            {"hp_config": HyperparameterConfig(margin=RLParameter(0, 2))},
            ValueError,
            "limit of margin in hp_config is 2.0.*at most 1",
        ),
    ],
)
def test_its_bad_arguments_are_refused(
    changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Margin(**(TOKENS | {"actor_network": small_model()} | changes))


def test_a_parameter_without_a_row_is_refused() -> None:
    class Undeclared(LLMAlgorithm):
        def __init__(self, pad_token_id: int, pad_token: str, gamma: float = 0.9) -> None:
            super().__init__(locals())

    with pytest.raises(TypeError, match="Undeclared takes gamma without declaring it"):
        Undeclared(**TOKENS)
