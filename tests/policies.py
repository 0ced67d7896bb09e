"""Engines on the CPU whose planner predicts, and ways into the middle of their prefills."""

from pathlib import Path

import pytest
from engines import Model, before_launch, make_engine

from bullet_graph import Engine, Slo
from bullet_graph.runtime.step import Placement, Step

POLICIES = ("serial", "mixed", "mixed:16", "auto")
LENGTHS = (4, 1, 40, 90, 17, 33)
PROMPTS = [[(7 * i + 3 * j) % 300 for j in range(length)] for i, length in enumerate(LENGTHS)]
PROMPT = PROMPTS[2]
EASY = Slo(ttft_ms=1e6, tpot_ms=1e6)
IMPOSSIBLE = Slo(ttft_ms=1e-6, tpot_ms=1e-6)

Launches = list[tuple[Step, Placement]]

short_slices = pytest.mark.usefixtures("one_layer_at_a_time")


def make(model: Model | str | Path = "tiny", policy: str = "auto", **settings: object) -> Engine:
    folder = model.folder if isinstance(model, Model) else model
    return make_engine(folder, policy=policy, perf_table="roofline", **settings)


def step_into_a_prefill(engine: Engine, launches: Launches) -> None:
    """Step until a chunk has some of its layers behind it, and others before it."""
    while not (launches and launches[-1][1].last_layer is not None):
        engine.step()


def fail_launches(
    monkeypatch: pytest.MonkeyPatch, num_good: int, error: BaseException, lane: str | None = None
) -> None:
    """Let the executor refuse the launch, on a lane or on any, that follows so many good ones."""
    calls = iter(range(num_good))

    def fail(_: Step, placement: Placement) -> None:
        if lane in (None, placement.lane) and next(calls, None) is None:
            raise error

    before_launch(monkeypatch, fail)
