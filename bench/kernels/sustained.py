"""Figures of work that goes on until the GPU is at its power cap: time, power, clock and energy."""

import itertools
import json
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bullet_graph.errors import DeviceError
from bullet_graph.perf.energy import NvmlProbe

MAX_ERROR = 1e-2
"""Relative, Frobenius, of an output against its reference."""

Run = Callable[[], object]


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Frobenius norm of the difference from a float32 reference, over the reference's."""
    return float((out.float() - reference).norm() / reference.norm())


def figures(
    ms: float, watts: float, mhz: float, *, rows: int, layers: int, flops: float
) -> dict[str, float | int]:
    """What a run of ``ms`` milliseconds comes to.

    Args:
        ms: time of a run.
        watts: the board's power.
        mhz: clock of the SMs.
        rows: tokens of a run.
        layers: whose work a run does, over all rows.
        flops: of a run.
    """
    return {
        "us_per_layer": round(1e3 * ms / layers, 1),
        "ns_per_token_layer": round(1e6 * ms / layers / rows, 2),
        "tflops": round(flops / ms / 1e9, 1),
        "watts": round(watts),
        "mhz": round(mhz),
        "mj_per_token_layer": round(watts * ms / layers / rows, 4),
    }


class Lab:
    """Measures runs and keeps their rows, until the time is spent.

    Args:
        seconds: a figure, of which the first third is not measured.
        budget_s: no new figure is begun after this.

    Raises:
        DeviceError: NVML, or the GPU in it, is not found.
    """

    def __init__(self, seconds: float, budget_s: float) -> None:
        self.seconds, self.end = seconds, time.perf_counter() + budget_s
        probe = NvmlProbe.open(str(torch.cuda.get_device_properties(0).uuid))
        if probe is None:
            raise DeviceError(
                "the energy counter needs NVML, which was not found for this GPU: install nvidia-ml-py and check "
                "`nvidia-smi`"
            )
        self.probe = probe
        self.rows: list[dict[str, Any]] = []

    def note(self, **row: Any) -> None:
        """Keep a row and print it."""
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def check(self, part: str, name: str, out: Tensor, run: Run, reference: Tensor) -> bool:
        """Run into a poisoned output and compare; notes what failed."""
        out.fill_(torch.nan)
        try:
            run()
            torch.cuda.synchronize()
        except Exception as error:  # one candidate that fails must not lose the others' figures
            self.note(part=part, name=name, failed=repr(error)[:300])
            return False
        error_size = relative_error(out, reference)
        if not error_size <= MAX_ERROR:
            self.note(part=part, name=name, failed=f"relative error {error_size:.3g}")
        return error_size <= MAX_ERROR

    def measure(
        self, part: str, name: str, rows: int, run: Run, flops: float, layers: int, seconds: float = 0.0
    ) -> float:
        """Sustained figures of a run of ``layers`` layers' work over ``rows`` rows; returns ms a run, inf if none."""
        if time.perf_counter() > self.end:
            self.note(part=part, name=name, rows=rows, skipped="out of time")
            return math.inf
        try:
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            ms, watts, mhz = self._sustain(graph.replay, seconds or self.seconds)
        except Exception as error:  # as above
            self.note(part=part, name=name, rows=rows, failed=repr(error)[:300])
            return math.inf
        self.note(
            part=part, name=name, rows=rows, **figures(ms, watts, mhz, rows=rows, layers=layers, flops=flops)
        )
        return ms

    def _sustain(self, replay: Run, seconds: float) -> tuple[float, float, float]:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        batch = max(1, round(0.03 / (time.perf_counter() - begin)))
        fences: list[torch.cuda.Event] = []
        samples: list[tuple[float, float, float]] = []
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for _ in range(batch):
                replay()
            fences.append(torch.cuda.Event(enable_timing=True))
            fences[-1].record()
            if len(fences) > 2:
                fences[-3].synchronize()
            clock = self.probe.sample().sm_clock_mhz or 0
            samples.append((time.perf_counter() - begin, self.probe.total_energy_mj() or 0, clock))
        torch.cuda.synchronize()
        first = next(i for i, s in enumerate(samples) if s[0] >= seconds / 3 or i == max(0, len(samples) - 4))
        ms = fences[first].elapsed_time(fences[-1]) / (batch * (len(fences) - 1 - first))
        times, energies, clocks = np.array(samples[first:]).T
        return ms, float(np.polyfit(times, energies, 1)[0]) / 1e3, float(clocks.mean())


def burst_ms(run: Run) -> float:
    """Time of a run by itself, of three; the GPU is too briefly at work for the power cap."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    run()
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print what was measured, a line each."""
    print(f"{'':8} {'rows':>5} {'ns/tok-layer':>12} {'TFLOP/s':>8} {'W':>4} {'MHz':>5} {'mJ/tok-layer':>12}")
    for r in rows:
        if "tflops" in r:
            print(
                f"{r['part']:8} {r['rows']:5} {r['ns_per_token_layer']:12.2f} {r['tflops']:8.1f} "
                f"{r['watts']:4} {r['mhz']:5} {r['mj_per_token_layer']:12.4f} {r['name']}"
            )
        else:
            print(*(f"{value}" if key in ("part", "name") else f"{key}={value}" for key, value in r.items()))
