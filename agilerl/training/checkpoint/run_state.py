"""What ``run_state.json`` holds: its schema, values that JSON gives back, the random streams."""

# No postponed annotations here: TypedDict would not see NotRequired.
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
import torch

from agilerl.training.logs.files import replace_file

FORMAT = 1
_PLAIN = (str, int, float, type(None), dict, list, tuple)


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

    format: Annotated[int, FORMAT.__eq__, f"{FORMAT}, the format that this version reads"]
    run: Annotated[str, lambda run: Path(run).name == run, "the name of a folder"]
    environment: str
    iteration: int
    in_iteration: bool
    wall_seconds: float
    fitness: float | None
    best: dict[str, Any] | None
    agents: list[MemberState]
    environments: list[dict[str, Any]]
    unevaluated_rows: list[dict[str, float]] | None
    log: dict[str, Any]
    random: dict[str, Any]
    random_of_other_ranks: NotRequired[list[dict[str, Any]]]


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


def random_streams() -> dict[str, Any]:
    """The state of the global streams of Python, NumPy and torch (CUDA too), JSON-compatible."""
    version, words, gauss = random.getstate()
    streams = {
        "python": {"version": version, "words": np.array(words, "<u4"), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(streams, default=_bytes_in_hex))
    return plain


def set_random_streams(saved: Mapping[str, Any]) -> None:
    """Set the global streams to what :func:`random_streams` gave, CUDA's device by device."""
    streams = json.loads(json.dumps(saved), object_hook=_from_hex)
    python = streams["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(streams["numpy"])
    torch.set_rng_state(torch.from_numpy(streams["torch"]))
    for device, state in zip(range(torch.cuda.device_count()), streams["cuda"], strict=False):
        torch.cuda.set_rng_state(torch.from_numpy(state), device)


def _bytes_in_hex(value: Any) -> Any:
    """What JSON holds of a tensor, an array or a number of NumPy."""
    array = np.asarray(value)
    return {"dtype": array.dtype.str, "hex": array.tobytes().hex()} if array.ndim else array.item()


def _from_hex(entry: dict[str, Any]) -> Any:
    """The array of :func:`_bytes_in_hex`; other entries as they are."""
    if entry.keys() != {"dtype", "hex"}:
        return entry
    return np.frombuffer(bytes.fromhex(entry["hex"]), dtype=entry["dtype"]).copy()
