"""Durations of the phases of an engine's start; phases may overlap."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

PhaseName = Literal[
    "process",
    "imports",
    "device",
    "tokenizer",
    "profile",
    "capture cache",
    "partitions",
    "allocation",
    "weights",
    "kernels",
    "decode graphs",
    "piecewise graphs",
    "self-check",
    "first token",
]
"""process: Python itself, which only ``bench startup`` can see;
imports: of the package, and of the GPU's libraries when they are needed first;
device: finding it, its performance table and its memory;
capture cache: its entry found and checked, its kernels copied; partitions: calibrated and verified;
allocation: of weights and KV cache; weights: downloaded if need be, then filled in a thread of their own;
kernels: compiled, or loaded from a cache; decode graphs, piecewise graphs: captured;
self-check: logits of captured steps compared with the uncompiled model's, where a cache was used;
first token: from the first request to its first token, after the start."""


@dataclass(frozen=True, slots=True)
class StartPhase:
    """An interval of a phase, which may have several; seconds after :attr:`StartReport.began_s`."""

    name: PhaseName
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StartReport:
    """An engine's start. Imports come before the engine, and belong to the process's first engine.

    Attributes:
        began_s: call of the engine's constructor, by ``time.perf_counter``, which all processes on Linux share.
        ready_s: seconds from then until requests could be added; None during the start.
        phases: by their ends.
    """

    began_s: float
    ready_s: float | None
    phases: tuple[StartPhase, ...]

    @property
    def seconds(self) -> dict[PhaseName, float]:
        """Total of each phase, in the order in which phases began."""
        totals: dict[PhaseName, float] = {}
        for phase in sorted(self.phases, key=lambda phase: phase.start_s):
            totals[phase.name] = totals.get(phase.name, 0.0) + phase.end_s - phase.start_s
        return totals


class StartClock:
    """Records the phases of a start as they end, from any thread."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._ready_s: float | None = None
        self._phases: list[StartPhase] = []
        self._first_request_s: float | None = None
        self._has_first_token = False

    def add(self, name: PhaseName, start_s: float, end_s: float) -> None:
        """Record a phase, by two times of ``time.perf_counter``."""
        self._phases.append(StartPhase(name, start_s - self._began_s, end_s - self._began_s))

    @contextmanager
    def phase(self, name: PhaseName) -> Iterator[None]:
        """Record the block as a phase, unless it fails."""
        start_s = time.perf_counter()
        yield
        self.add(name, start_s, time.perf_counter())

    def ready(self) -> None:
        """Mark that requests can be added from now on."""
        self._ready_s = time.perf_counter() - self._began_s

    def first_request(self, time_s: float) -> None:
        """Record a request's arrival, by ``time.perf_counter``; only the first counts."""
        if self._first_request_s is None:
            self._first_request_s = time_s

    def first_token(self, time_s: float) -> None:
        """End the phase that the first request began; only the first token counts."""
        if not self._has_first_token and self._first_request_s is not None:
            self.add("first token", self._first_request_s, time_s)
        self._has_first_token = True

    def report(self) -> StartReport:
        """The phases so far."""
        return StartReport(self._began_s, self._ready_s, tuple(sorted(self._phases, key=lambda p: p.end_s)))
