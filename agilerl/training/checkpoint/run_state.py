"""What ``run_state.json`` holds: its schema, values that JSON gives back, the random streams."""

# No postponed annotations here: TypedDict would not see NotRequired.
import base64
import io
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import torch
from annotated_types import Predicate
from pydantic import Field
from typing_extensions import TypedDict  # pydantic's condition before Python 3.12

from agilerl.training.logs.files import replace_file

FORMAT = 2
_PLAIN = (str, int, float, type(None), dict, list, tuple)


class MemberState(TypedDict):
    """A member of the population; what else is noted of it is there to be read."""

    index: int
    algo: str
    steps: int
    steps_of_run: int
    epochs_of_run: int
    flat_iterations: int
    lineage: list[dict[str, int]]
    environment: int  # position in RunState's list


class RunState(TypedDict):
    """``run_state.json``: all that a run is resumed from but its agents' own checkpoints."""

    format: Literal[2]  # FORMAT
    run: Annotated[str, Predicate(lambda run: Path(run).name == run)]
    environment: str
    iteration: int
    in_iteration: bool
    wall_seconds: float
    fitness: float | None
    best: dict[str, Any] | None
    generations: list[dict[str, Any]]
    agents: list[MemberState]
    environments: list[dict[str, Any]]
    earlier_passes: NotRequired[list[dict[str, int]]]  # only where rows were appended after a pass
    unevaluated_rows: list[dict[str, float]] | None
    log: dict[str, Any]
    callbacks: NotRequired[list[dict[str, Any]]]  # not in checkpoints from before there were any
    ended_by: NotRequired[dict[str, str]]  # the callback that ended the run, and what it said
    random: Annotated[list[str], Field(min_length=1)]  # by rank


def check_plain(content: Any, name: str, kinds: tuple[type, ...] = _PLAIN) -> None:
    """Check that JSON gives ``content`` back as it is; tuples may come back as lists.

    Raises:
        TypeError: Naming, as ``name`` and the path in it, the first value that JSON does not know.
    """
    if not isinstance(content, kinds):
        raise TypeError(
            f"{name} is {content!r} of type {type(content).__name__}, and a resumed run would get "
            "it back from JSON as something else or not at all: have state_dict() give text, "
            "numbers, bools, None, and lists and dicts (with text as keys) of these: int(x) for an "
            "integer of NumPy, x.tolist() for an array."
        )
    if isinstance(content, dict):
        for key, value in content.items():
            check_plain(key, f"A key of {name}", (str,))
            check_plain(value, f"{name}.{key}")
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            check_plain(value, f"{name}[{number}]")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file, whole or not at all; values that JSON does not know become their text."""
    text = json.dumps(content, indent=2, default=str, ensure_ascii=False)
    replace_file(path, lambda file: file.write(text + "\n"))


def random_streams() -> str:
    """The state of the global streams of Python, NumPy and torch (CUDA too), as text."""
    of_numpy = np.random.get_state(legacy=False)
    streams = {
        "python": random.getstate(),
        "numpy": json.loads(json.dumps(of_numpy, default=np.ndarray.tolist)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }
    torch.save(streams, buffer := io.BytesIO())
    return base64.b64encode(buffer.getvalue()).decode()


def set_random_streams(saved: str) -> None:
    """Set the global streams to what :func:`random_streams` gave, CUDA's device by device."""
    streams = torch.load(io.BytesIO(base64.b64decode(saved)), weights_only=True)
    random.setstate(streams["python"])
    np.random.set_state(streams["numpy"])
    torch.set_rng_state(streams["torch"])
    for device, state in zip(range(torch.cuda.device_count()), streams["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)
