"""What the device's memory can really deliver: the ceiling that a decode step is held against."""

import statistics
import time

import torch

_NUM_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
"""Far beyond any last-level cache, so that the copy is bound by memory."""

_NUM_WARMUPS = 2
_NUM_REPEATS = {"cuda": 20, "cpu": 5}


def measure_copy_gb_per_s(device: str, *, num_bytes: int | None = None) -> float:
    """Measure the bandwidth of a large copy within the device's memory.

    Args:
        device: ``cuda`` (timed with events) or ``cpu`` (timed on the host's clock).
        num_bytes: size of the source; as much again is allocated for the target. None takes 4 GiB on a GPU
            and 256 MiB on the CPU.

    Returns:
        Median of several copies, in 10⁹ bytes a second, counting bytes read plus bytes written.
    """
    size = _NUM_BYTES[device] if num_bytes is None else num_bytes
    # Random bytes: constant ones draw less power and may run faster than real data.
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    for _ in range(_NUM_WARMUPS):
        target.copy_(source)
    time_copy = _time_on_gpu_s if device == "cuda" else _time_on_cpu_s
    times_s = [time_copy(source, target) for _ in range(_NUM_REPEATS[device])]
    return 2 * size / statistics.median(times_s) / 1e9


def _time_on_gpu_s(source: torch.Tensor, target: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms / 1e3


def _time_on_cpu_s(source: torch.Tensor, target: torch.Tensor) -> float:
    start_s = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start_s
