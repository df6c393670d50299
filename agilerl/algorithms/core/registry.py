"""What mutation may change in an agent: hyperparameters with limits, networks, optimizers."""

from __future__ import annotations

import math
import random
from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from agilerl.checks import InstanceOf, require


@dataclass
class RLParameter:
    """Limits and step sizes of one hyperparameter under mutation."""

    min: float
    max: float
    shrink_factor: float = 0.8
    """A shrinking mutation multiplies by this."""
    grow_factor: float = 1.2
    """A growing mutation multiplies by this."""
    dtype: type = float
    """``int`` or ``float``."""
    scale: str = "linear"
    """``"linear"`` or ``"log"``: draw uniformly between the limits, or between their logarithms."""
    value: float | None = None
    """Where :meth:`mutate` keeps the value if it is given none."""

    def __post_init__(self) -> None:
        require(
            self.min <= self.max,
            f"RLParameter has min={self.min} and max={self.max}; min must be at most max",
        )
        require(
            0 < self.shrink_factor <= 1 <= self.grow_factor,
            f"RLParameter has shrink_factor={self.shrink_factor} and grow_factor="
            f"{self.grow_factor}; it must hold that 0 < shrink_factor <= 1 <= grow_factor",
        )
        require(
            self.scale in ("linear", "log"),
            f"RLParameter has scale={self.scale!r}; it must be 'linear' or 'log'",
        )
        require(
            self.scale == "linear" or self.min > 0,
            f"RLParameter has scale='log' and min={self.min}; min must be above 0",
        )
        require(
            self.dtype in (int, float),
            f"RLParameter has dtype={self.dtype!r}; it must be int or float",
            TypeError,
        )

    def sample(self, rng: random.Random | None = None) -> float:
        """Draw a value between the limits, see :attr:`scale`.

        Args:
            rng: None: Python's global generator.
        """
        source = rng or random
        if self.scale == "log":
            drawn = math.exp(source.uniform(math.log(self.min), math.log(self.max)))
            rounded = round(drawn) if self.dtype is int else drawn
            return self.dtype(min(max(rounded, self.min), self.max))
        if self.dtype is int:
            return source.randint(int(self.min), int(self.max))
        return source.uniform(self.min, self.max)

    def mutate(self, value: float | None = None, rng: random.Random | None = None) -> float:
        """Shrink or grow by one step, within the limits; an int moves by at least 1.

        At a limit it moves away from it. 0 has nowhere to go by a factor, and stays.

        Args:
            value: What to start from. None: the parameter's own ``value``, which becomes the
                result; where it has none yet, one is drawn between the limits.
            rng: None: Python's global generator.
        """
        if value is None:
            self.value = self.mutate(self.sample(rng) if self.value is None else self.value, rng)
            return self.value
        factors = [self.shrink_factor, self.grow_factor]
        factor = (rng or random).choice(factors)
        moved = self._moved(value, factor)
        if moved == value:
            factors.remove(factor)
            moved = self._moved(value, factors[0])
        return moved

    def _moved(self, value: float, factor: float) -> float:
        new = value * factor
        if self.dtype is int:
            new = min(int(new), int(value) - 1) if factor < 1 else max(round(new), int(value) + 1)
        return self.dtype(min(max(new, self.min), self.max))


def magnitude(value: float | tuple[float, float]) -> float:
    """The number of a hyperparameter that is sampled and mutated.

    Of a band ``(lo, hi)`` around 1, as ``clip_coef`` may be, it is the larger distance from 1; the
    upper one if ``lo`` is 0, which ratios cannot go below anyway.
    """
    if not isinstance(value, tuple | list):
        return value
    low, high = value
    return high - 1 if low == 0 and high > 1 else max(1 - low, high - 1)


def with_magnitude(value: Any, number: float) -> Any:
    """The hyperparameter with another :func:`magnitude`.

    A band keeps its proportions, as far as its lower bound is not below 0; one of 0 stays 0.
    """
    if not isinstance(value, tuple | list):
        return number
    factor = number / magnitude((value[0], value[1]))
    low, high = (1 + (bound - 1) * factor for bound in value)
    return (0.0 if value[0] == 0 else max(low, 0.0), high)


def next_multiple(value: float, step: int, parameter: RLParameter, old: float | None = None) -> int:
    """A multiple of ``step`` beside a value, within the parameter's limits if they hold one.

    Args:
        value: Where to look.
        step: Such as the number of processes.
        parameter: The limits.
        old: What ``value`` was grown or shrunk from: the multiple lies on the far side of it, so
            that something changes. None: the nearest one.
    """
    if old is None:
        count = round(value / step)
    else:
        count = math.ceil(value / step) if value > old else int(value // step)
    least, most = math.ceil(parameter.min / step), int(parameter.max // step)
    return step * max(1, min(max(count, least), most))


class HyperparameterConfig:
    """The hyperparameters that evolution may change, by attribute name.

    Reads like a dict of :class:`RLParameter`, and by attribute::

        search = HyperparameterConfig(lr=RLParameter(1e-6, 1e-3), beta=RLParameter(0, 1))
        search["lr"] is search.lr
    """

    def __init__(self, **parameters: RLParameter) -> None:
        for name, parameter in parameters.items():
            InstanceOf(RLParameter, "an RLParameter", optional=False)(
                f"{name} in hp_config", parameter
            )
        self.config: dict[str, RLParameter] = dict(parameters)

    def names(self) -> list[str]:
        """Attribute names in the order given."""
        return list(self.config)

    def items(self) -> ItemsView[str, RLParameter]:
        """Pairs of attribute name and parameter."""
        return self.config.items()

    def __getitem__(self, name: str) -> RLParameter:
        return self.config[name]

    def __getattr__(self, name: str) -> RLParameter:
        # ``config`` is missing while a copy of this is made.
        if name != "config" and name in self.config:
            return self.config[name]
        raise AttributeError(f"{type(self).__name__} has no hyperparameter {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.config)

    def __len__(self) -> int:
        return len(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HyperparameterConfig) and self.config == other.config

    __hash__ = None  # type: ignore[assignment] # it can be changed

    def __repr__(self) -> str:
        parameters = ", ".join(f"{name}={parameter}" for name, parameter in self.items())
        return f"HyperparameterConfig({parameters})"

    def sample(self, rng: random.Random | None = None) -> tuple[str, RLParameter]:
        """Choose one of the hyperparameters at random.

        Args:
            rng: None: Python's global generator.
        """
        name = (rng or random).choice(self.names())
        return name, self.config[name]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """JSON-compatible form, for checkpoints."""
        return {name: {**asdict(p), "dtype": p.dtype.__name__} for name, p in self.config.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Mapping[str, Any]]) -> HyperparameterConfig:
        """Inverse of :meth:`to_dict`."""
        types = {"int": int, "float": float}
        return cls(
            **{n: RLParameter(**{**p, "dtype": types[p["dtype"]]}) for n, p in content.items()}
        )


@dataclass(frozen=True)
class NetworkGroup:
    """A network that is evaluated, and those that share its architecture."""

    eval_network: str
    """Attribute name."""
    shared_networks: tuple[str, ...] = ()
    policy: bool = False
    """Whether it is the one that acts."""


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer of an agent, by attribute names."""

    name: str
    networks: tuple[str, ...]
    lr: str
    """Attribute that holds the learning rate."""
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW
