"""What ``run_state.json`` holds: its schema, values that JSON gives back, the random streams."""

# No postponed annotations here: TypedDict would not see NotRequired.
import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch

logger = logging.getLogger(__name__)


class MemberState(TypedDict):
    """A member of the population; what else is noted of it is there to be read."""

    index: int
    algo: str
    steps: int
    steps_of_run: int
    epochs_of_run: int
    flat_iterations: int
    lineage: NotRequired[list[dict[str, int]]]
    environment: int  # position in RunState's list


class RunState(TypedDict):
    """``run_state.json``: all that a run is resumed from but its agents' own checkpoints."""

    run: str
    environment: str
    iteration: int
    in_iteration: bool
    wall_seconds: float
    fitness: float | None
    best: dict[str, Any] | None
    elite: dict[str, Any] | None
    agents: list[MemberState]
    environments: list[dict[str, Any]]
    unevaluated_rows: list[dict[str, float]] | None
    log: dict[str, Any]
    random: dict[str, Any]
    random_of_other_ranks: NotRequired[list[dict[str, Any]]]


def check_plain(content: Any, name: str) -> None:
    """Check that JSON gives ``content`` back as it is; tuples may come back as lists.

    Raises:
        TypeError: Naming, as ``name`` and the path in it, the first value that JSON does not know.
    """
    if isinstance(content, dict):
        for key, value in content.items():
            if not isinstance(key, str):
                raise TypeError(_refusal(f"A key of {name}", key))
            check_plain(value, f"{name}.{key}")
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            check_plain(value, f"{name}[{number}]")
    elif content is not None and not isinstance(content, str | int | float):
        raise TypeError(_refusal(name, content))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file, whole or not at all; values that JSON does not know become their text."""
    text = json.dumps(content, indent=2, default=str, ensure_ascii=False)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    partial.replace(path)


def _refusal(name: str, value: Any) -> str:
    return (
        f"{name} is {value!r} of type {type(value).__name__}, and a resumed run would get it back "
        "from JSON as something else or not at all: have state_dict() give text, numbers, bools, "
        "None, and lists and dicts (with text as keys) of these: int(x) for an integer of NumPy, "
        "x.tolist() for an array."
    )


def random_streams() -> dict[str, Any]:
    """The state of the global streams of Python, NumPy and torch (CUDA too), JSON-compatible."""
    version, words, gauss = random.getstate()
    streams: dict[str, Any] = _encode(
        {
            "python": {"version": version, "words": np.array(words, "<u4"), "gauss": gauss},
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
    )
    return streams


def set_random_streams(saved: Mapping[str, Any]) -> None:
    """Set the global streams to what :func:`random_streams` gave, CUDA's for as many devices."""
    streams = _decode(saved)
    python, cuda = streams["python"], streams["cuda"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(streams["numpy"])
    torch.set_rng_state(torch.from_numpy(streams["torch"]))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cuda and len(cuda) == devices:
        torch.cuda.set_rng_state_all([torch.from_numpy(state) for state in cuda])
    elif cuda:
        message = "The checkpoint has random streams of %d CUDA devices, not %d: they start afresh"
        logger.warning(message, len(cuda), devices)


def _encode(value: Any) -> Any:
    """Tensors and arrays, also within dicts and lists, as their bytes in hexadecimal digits."""
    if isinstance(value, torch.Tensor):
        value = value.cpu().numpy()
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "hex": value.tobytes().hex()}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _decode(value: Any) -> Any:
    """Inverse of :func:`_encode`; tensors come back as arrays."""
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"dtype", "hex"}:
        return np.frombuffer(bytes.fromhex(value["hex"]), dtype=value["dtype"]).copy()
    return {key: _decode(item) for key, item in value.items()}
