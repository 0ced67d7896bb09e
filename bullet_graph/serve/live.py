"""What the live page draws: counters that it takes the differences of, and percentiles of late."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.serve.metrics import ServerMetrics

WINDOW_S = 60.0
"""Percentiles are over the requests that ended in so many last seconds."""


def live_figures(
    engine: AsyncEngine, metrics: ServerMetrics, *, model_name: str, num_waiting: int
) -> dict[str, Any]:
    """The figures of this moment, for JSON.

    Args:
        engine: tells its counters.
        metrics: tells the requests'.
        model_name: as it is served.
        num_waiting: sequences that wait for KV blocks.
    """
    stats = engine.stats
    now_s = time.monotonic()
    recent = [request for request in metrics.recent if now_s - request.time_s <= WINDOW_S]
    return {
        "model": model_name,
        "time_s": now_s,
        "num_sms": engine.engine.num_sms,
        "running": stats.num_running,
        "waiting": num_waiting,
        "kv_cache_usage": stats.kv_blocks_used / stats.kv_blocks_total,
        "lane_seconds": dict(stats.lane_seconds),
        "lane_sm_seconds": dict(stats.lane_sm_seconds),
        "policy_seconds": dict(stats.policy_seconds),
        "generation_tokens": metrics.generation_tokens,
        "window_s": WINDOW_S,
        "requests": len(recent),
        "ttft_ms": percentiles([request.ttft_ms for request in recent]),
        "tpot_ms": percentiles([request.tpot_ms for request in recent if request.tpot_ms is not None]),
        "slo_attainment": metrics.slo_attainment,
        "energy_joules": metrics.energy.joules,
        "failure": None if engine.failure is None else str(engine.failure),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 90th and 99th percentile, interpolated linearly; None of nothing."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {"p50": p50, "p90": p90, "p99": p99}
