"""The global random streams, as JSON and back: torch (CUDA too, if there), NumPy, Python."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


def random_streams() -> dict[str, Any]:
    """Where the global streams stand, in JSON-compatible form."""
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": _encode(np.array(words, "<u4")), "gauss": gauss},
        "numpy": _encode(np.random.get_state(legacy=False)),
        "torch": _encode_tensor(torch.get_rng_state()),
        "cuda": (
            [_encode_tensor(state) for state in torch.cuda.get_rng_state_all()]
            if torch.cuda.is_available()
            else []
        ),
    }


def set_random_streams(saved: Mapping[str, Any]) -> None:
    """Put the global streams where :func:`random_streams` found them.

    Streams of CUDA devices are left alone, with a line in the log, if there is now another number
    of devices.
    """
    python = saved["python"]
    words = tuple(int(word) for word in _decode(python["words"]))
    random.setstate((python["version"], words, python["gauss"]))
    np.random.set_state(_decode(saved["numpy"]))
    torch.set_rng_state(_decode_tensor(saved["torch"]))
    cuda = [_decode_tensor(state) for state in saved["cuda"]]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(cuda) == devices:
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
    elif cuda:
        logger.warning(
            "The checkpoint has random streams of %d CUDA devices, there are %d now: those streams "
            "start afresh",
            len(cuda),
            devices,
        )


def _encode_tensor(state: torch.Tensor) -> dict[str, str]:
    encoded: dict[str, str] = _encode(state.cpu().numpy())
    return encoded


def _decode_tensor(saved: Mapping[str, str]) -> torch.Tensor:
    return torch.from_numpy(_decode(saved).copy())


def _encode(value: Any) -> Any:
    """Dicts with arrays in them; an array becomes its bytes in hexadecimal digits."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "hex": value.tobytes().hex()}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _decode(value: Any) -> Any:
    """Inverse of :func:`_encode`."""
    if not isinstance(value, dict):
        return value
    if set(value) == {"dtype", "hex"}:
        return np.frombuffer(bytes.fromhex(value["hex"]), dtype=value["dtype"])
    return {key: _decode(item) for key, item in value.items()}
