"""Measures what the device's memory delivers: the ceiling that a decode step is held against."""

import statistics
import time

import torch

_NUM_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
"""Far beyond any last-level cache, so that the copy is bound by memory."""

_NUM_WARMUPS = 2
_NUM_REPEATS = {"cuda": 20, "cpu": 5}


def measure_copy_gb_per_s(device: str) -> float:
    """Bandwidth of a large copy within the device's memory, in 10⁹ bytes read plus written per second (median).

    The source has 4 GiB on a GPU and 256 MiB on the CPU; the target takes as much again.
    """
    size = _NUM_BYTES[device]
    # Random bits: constant ones draw less power and may run faster than real data. As bytes they would take seconds.
    source = torch.empty(size // 8, dtype=torch.int64, device=device).random_()
    target = torch.zeros_like(source)
    for _ in range(_NUM_WARMUPS):
        target.copy_(source)
    time_copy = _time_on_gpu_s if device == "cuda" else _time_on_cpu_s
    return 2 * size / statistics.median([time_copy(source, target) for _ in range(_NUM_REPEATS[device])]) / 1e9


def _time_on_gpu_s(source: torch.Tensor, target: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _time_on_cpu_s(source: torch.Tensor, target: torch.Tensor) -> float:
    start_s = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start_s
