"""What tensors the process holds."""

from __future__ import annotations

import gc
import warnings

import torch


def tensors_held() -> tuple[int, int]:
    """How many storages tensors refer to in this process, and their bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated objects that are merely looked at
        found = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    sizes = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in found}
    return len(sizes), sum(sizes.values())
