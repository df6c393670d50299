"""Hyperparameters with limits: drawn, mutated, and read in the ways that registries are."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter


def search() -> HyperparameterConfig:
    return HyperparameterConfig(
        lr=RLParameter(1e-6, 1e-3), group_size=RLParameter(2, 16, dtype=int)
    )


def test_a_mutation_is_one_step_within_the_limits() -> None:
    rng = random.Random(0)
    assert {RLParameter(0.1, 10.0).mutate(1.0, rng) for _ in range(20)} == {0.8, 1.2}
    assert {RLParameter(0.9, 1.1).mutate(1.0, rng) for _ in range(20)} == {0.9, 1.1}
    count = RLParameter(2, 16, dtype=int)
    assert {count.mutate(3, rng) for _ in range(20)} == {2, 4}, "an int moves by at least 1"
    assert {count.mutate(2, rng) for _ in range(20)} == {3}, "it moves away from a limit"
    assert RLParameter(2, 2, dtype=int).mutate(2, rng) == 2
    assert all(type(count.mutate(8, rng)) is int for _ in range(5))
    assert count.value is None, "a value that was given is the caller's"


def test_a_mutation_without_a_value_changes_the_parameters_own() -> None:
    parameter = RLParameter(0.1, 10.0, value=1.0)
    first = parameter.mutate()
    assert first in (0.8, 1.2) and parameter.value == first
    assert parameter.mutate(rng=random.Random(1)) == parameter.value != first
    unset = RLParameter(2, 16, dtype=int)
    assert 2 <= unset.mutate() <= 16 and type(unset.value) is int


def test_without_a_generator_it_is_pythons() -> None:
    results = []
    for _ in range(2):
        random.seed(3)
        results.append((search().sample(), search().lr.sample(), search().lr.mutate(1e-4)))
    assert results[0] == results[1]


def test_draws_are_between_the_limits() -> None:
    rng = random.Random(0)
    values = [search().group_size.sample(rng) for _ in range(200)]
    assert set(values) == set(range(2, 17))
    assert {search().sample(rng)[0] for _ in range(20)} == {"lr", "group_size"}


def test_a_config_reads_like_a_dict_and_by_attribute() -> None:
    config = search()
    assert dict(config.items()) == {"lr": config.lr, "group_size": config.group_size}
    assert list(config) == config.names() == ["lr", "group_size"] and len(config) == 2
    assert config["lr"] is config.lr
    assert "lr=RLParameter(min=1e-06" in repr(config)
    with pytest.raises(AttributeError, match="no hyperparameter 'beta'"):
        _ = config.beta


def test_configs_of_the_same_parameters_are_equal() -> None:
    config = search()
    assert config == search() == copy.deepcopy(config) == copy.copy(config)
    assert HyperparameterConfig.from_dict(config.to_dict()) == config
    assert config != HyperparameterConfig(lr=config.lr) and config != {"lr": config.lr}
    config.lr.mutate()
    assert config != search()


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"min": 2, "max": 1}, ValueError, "min=2 and max=1"),
        ({"min": 0, "max": 1, "shrink_factor": 1.5}, ValueError, "shrink_factor=1.5"),
        ({"min": 0, "max": 1, "grow_factor": 0.5}, ValueError, "grow_factor=0.5"),
        ({"min": 0, "max": 1, "dtype": str}, TypeError, "dtype=.*str.*int or float"),
    ],
)
def test_bad_limits(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        RLParameter(**arguments)


def test_a_config_takes_parameters_only() -> None:
    with pytest.raises(TypeError, match=r"lr in hp_config is 0\.1; it must be an RLParameter"):
        HyperparameterConfig(lr=0.1)  # type: ignore[arg-type]
