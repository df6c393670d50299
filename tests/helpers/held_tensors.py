"""What tensors the process holds."""

from __future__ import annotations

import gc
import warnings

import torch


def tensors_held() -> tuple[int, int]:
    """How many storages tensors refer to in this process, and their bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated objects that are merely looked at
        # Not subclasses, such as the tensors without data that torch.compile leaves behind.
        kinds = (torch.Tensor, torch.nn.Parameter)
        found = [item for item in gc.get_objects() if type(item) in kinds]
    sizes = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in found}
    return len(sizes), sum(sizes.values())
