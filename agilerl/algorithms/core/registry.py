"""What of an agent may be mutated, and how: hyperparameters with limits, networks, optimizers."""

from __future__ import annotations

import random
from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass
class RLParameter:
    """Limits and steps of one hyperparameter under mutation."""

    min: float
    max: float
    shrink_factor: float = 0.8
    """A shrinking mutation multiplies by this."""
    grow_factor: float = 1.2
    """A growing mutation multiplies by this."""
    dtype: type = float
    value: float | None = None
    """Current value, if the parameter keeps one itself."""

    def __post_init__(self) -> None:
        if not self.min <= self.max:
            raise ValueError(f"RLParameter needs min <= max, got min={self.min}, max={self.max}")
        if not 0 < self.shrink_factor <= 1 <= self.grow_factor:
            raise ValueError(
                "RLParameter needs 0 < shrink_factor <= 1 <= grow_factor, got "
                f"shrink_factor={self.shrink_factor}, grow_factor={self.grow_factor}"
            )
        if self.dtype not in (int, float):
            raise TypeError(f"RLParameter dtype is {self.dtype!r}; it must be int or float")

    def sample(self, rng: random.Random) -> float:
        """A value drawn uniformly between the limits."""
        if self.dtype is int:
            return rng.randint(int(self.min), int(self.max))
        return rng.uniform(self.min, self.max)

    def mutate(self, value: float, rng: random.Random) -> float:
        """Shrink or grow ``value`` by one step, within the limits; an int moves by at least 1."""
        factor = rng.choice((self.shrink_factor, self.grow_factor))
        new = value * factor
        if self.dtype is int:
            new = min(int(new), int(value) - 1) if factor < 1 else max(round(new), int(value) + 1)
        return self.dtype(min(max(new, self.min), self.max))


class HyperparameterConfig:
    """The hyperparameters that evolution may change, by attribute name.

    Example:
        ``HyperparameterConfig(lr=RLParameter(min=1e-6, max=1e-3), beta=RLParameter(min=0, max=1))``
    """

    def __init__(self, **parameters: RLParameter) -> None:
        for name, parameter in parameters.items():
            if not isinstance(parameter, RLParameter):
                raise TypeError(
                    f"hp_config parameter {name!r} is {parameter!r}; pass an RLParameter"
                )
        self.config: dict[str, RLParameter] = dict(parameters)

    def names(self) -> list[str]:
        """Attribute names in the order given."""
        return list(self.config)

    def items(self) -> ItemsView[str, RLParameter]:
        """Pairs of attribute name and limits."""
        return self.config.items()

    def __getitem__(self, name: str) -> RLParameter:
        return self.config[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.config)

    def __len__(self) -> int:
        return len(self.config)

    def sample(self, rng: random.Random) -> tuple[str, RLParameter]:
        """One of the hyperparameters at random."""
        name = rng.choice(self.names())
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
