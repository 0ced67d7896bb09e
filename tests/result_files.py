"""Made-up files of results, for the tests of the report."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bullet_graph.cli.bench.sweep_file import CellKey, Sweep, SweepCell

AUTO, MIXED = "bullet_graph auto", "bullet_graph mixed:2048"
VLLM_512, VLLM_2048 = "vllm 0.24.0 chunk 512", "vllm 0.24.0 chunk 2048"
CONV, CODE, LONGDOC = "azure:conv", "azure:code", "synthetic:longdoc"
SLO = "ttft:500ms tpot:15ms"
PROVENANCE = {
    "date_utc": "2026-01-02T03:04:05+00:00",
    "device_name": "NVIDIA H200",
    "git_commit": "abcdef0123456789",
}


def make_run(rate: float, *, all_at_once: bool = False, **changes: Any) -> dict[str, Any]:
    latencies = {
        f"{label}_{name}_ms": 10.0 for name in ("ttft", "tpot", "itl") for label in ("median", "p90", "p99")
    }
    figures = {"duration": 30.0, "failed": 0, "request_throughput": 5.0, "output_throughput": 900.0}
    power = {"power_w": {"mean": 650.4}, "sm_clock_mhz": {"mean": 1700.2}}
    told = {"request_rate": rate, "slo_attainment": 0.91, "all_at_once": all_at_once}
    settings = {"engine_args": {"model": "/some/where/llama", "max_num_seqs": 1024}}
    return (
        latencies
        | figures
        | told
        | {"device": power, "joules_per_token": 0.02, "system_settings": settings}
        | changes
    )


def search(
    system: str,
    goodput: float | None,
    attainments: Mapping[float, float],
    workload: str = CONV,
    slo: str = SLO,
    **changes: Any,
) -> SweepCell:
    """A search that is over, with the share of the requests that met all targets at each rate."""
    runs = tuple(make_run(rate, slo_attainment=share, **changes) for rate, share in attainments.items())
    return SweepCell(CellKey(system, workload, 600, slo), goodput, True, runs)


def searched(
    goodputs: Mapping[str, float | None], workload: str = CONV, slo: str = SLO, **changes: Any
) -> list[SweepCell]:
    """Searches that are closed: a rate 1 % above each goodput was too fast."""
    return [
        search(
            system,
            goodput,
            {1.0: 0.5} if goodput is None else {goodput: 0.91, 1.01 * goodput: 0.5},
            workload,
            slo,
            **changes,
        )
        for system, goodput in goodputs.items()
    ]


def at_load(
    runs: Mapping[str, list[dict[str, Any]]], workload: str = CONV, slo: str = "no targets"
) -> list[SweepCell]:
    return [
        SweepCell(CellKey(system, workload, 600, slo), None, True, tuple(of)) for system, of in runs.items()
    ]


def write_sweep(
    path: Path, cells: list[SweepCell], *, finished: bool = True, date: str = "", **settings: Any
) -> None:
    given: dict[str, Any] = {"model": "llama-3.1-8b", "attainment": 0.9, "tolerance": 0.05}
    given |= {"rates": None, "all_at_once": False} | settings
    provenance = PROVENANCE | ({"date_utc": date} if date else {})
    sweep = Sweep(settings=given, provenance=provenance, finished=finished, cells=tuple(cells))
    path.write_text(json.dumps(sweep.fields()))


def write_offline(path: Path, *entries: dict[str, Any]) -> None:
    common = {"command": "bullet-graph bench", "model": "llama-3.1-8b", "provenance": PROVENANCE}
    path.write_text(json.dumps([common | entry for entry in entries]))


def decode(batch_size: int, p50: float, **changes: Any) -> dict[str, Any]:
    lengths = {"batch_size": batch_size, "input_len": 968, "output_len": 64}
    return lengths | {"decode_step_ms": {"p50": p50}} | changes


def offline(
    trace: str, num_requests: int, seconds: float, policy: str = "serial", num_failed: int = 0
) -> dict[str, Any]:
    return {
        "trace": trace,
        "num_requests": num_requests,
        "elapsed_time": seconds,
        "policy": policy,
        "num_failed": num_failed,
    }
