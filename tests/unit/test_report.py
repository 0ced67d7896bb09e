"""The report of the measurements, on made-up files and on those of the repository."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result

from bench import report as report_module
from bench import simulator_error, splitting
from bench.evidence import Source, read_results
from bench.report import BENCH, main
from bullet_graph.errors import ConfigError
from bullet_graph.perf.performance import Prediction, SplitPrediction

AUTO, VLLM_512, VLLM_2048 = "bullet_graph auto", "vllm 0.24.0 chunk 512", "vllm 0.24.0 chunk 2048"
PROVENANCE = {"date_utc": "2026-01-02T03:04:05+00:00", "device_name": "NVIDIA H200", "device_uuid": "card"}
SLO = "ttft:500ms tpot:15ms"


def run_at(rate: float, share: float, **changes: Any) -> dict[str, Any]:
    latencies = {f"{label}_{name}_ms": 10.0 for name in ("ttft", "tpot", "itl") for label in ("median", "p90", "p99")}
    told = {"request_rate": rate, "slo_attainment": share, "failed": 0, "all_at_once": rate == 1e4}
    return latencies | told | {"stable": share >= 0.9, "duration": 30.0, "joules_per_token": 0.02} | changes


def cell(system: str, *runs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    key = {"system": system, "workload": "azure:conv", "num_prompts": 600, "slo": SLO}
    return key | {"goodput": None, "finished": True, "runs": list(runs)} | changes


def write_comparison(path: Path, *cells: dict[str, Any], date: str = "", commit: str = "abc", **settings: Any) -> None:
    given = {"model": "llama-3.1-8b", "attainment": 0.9, "tolerance": 0.05, "rates": None} | settings
    provenance = PROVENANCE | ({"date_utc": date} if date else {})
    provenance |= {"git_commit": commit.removesuffix("-dirty"), "git_dirty": commit.endswith("-dirty")}
    path.write_text(json.dumps({"settings": given, "provenance": provenance, "continued": [], "cells": cells}))


def bare(part: str, rows: int, repeats: float, seconds: float) -> dict[str, Any]:
    return {"part": part, "name": report_module.BARE_WAY, "rows": rows, "repeats": repeats, "seconds": seconds}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (folder := tmp_path / "results").mkdir()
    write_comparison(
        folder / "peers_conv.json",
        cell(AUTO, run_at(20, 1.0, p99_ttft_ms=40.0), run_at(24, 0.92, p99_ttft_ms=900.0), run_at(48, 0.2)),
        cell(VLLM_512, run_at(20, 0.95), run_at(20.5, 0.5)),
        cell(VLLM_2048, run_at(20, 0.5), run_at(10, 0.95)),
    )
    mixed, peer = run_at(1e4, 1.0, duration=21.0, p90_itl_ms=15.0), run_at(1e4, 1.0, joules_per_token=0.025)
    runs = {AUTO: run_at(1e4, 1.0, duration=22.0), "bullet_graph mixed": mixed, VLLM_512: peer}
    cells = [cell(system, run, slo="no targets") for system, run in runs.items()]
    write_comparison(folder / "peers_offline.json", *cells, all_at_once=True)
    step = {"decode_step_ms": {"p50": 4.0}, "batch_size": 1, "input_len": 968, "output_len": 64}
    copy = {"decode_step_bytes": 15e9, "copy_gb_per_s": 5000.0, "share_of_copy_percent": 75.0}
    entry = {"command": "bullet-graph bench latency", "model": "llama-3.1-8b", "provenance": PROVENANCE}
    offline = [entry | step | copy, entry | step | copy | {"batch_size": 64, "decode_step_ms": {"p50": 7.0}}]
    (folder / "offline.json").write_text(json.dumps(offline))
    rows = [
        bare("azure:conv=600", 512, 1478.0, 23.0),
        bare("azure:conv=600", 2048, 0.0, 20.0),
        bare("decode=64x1000", 64, 1.0, 0.0066),
        {"part": "azure:conv=600", "name": "another way", "repeats": 1e4, "seconds": 1.0},
    ]
    (folder / "bare.json").write_text(json.dumps({"rows": rows, "provenance": PROVENANCE}))
    (folder / "startup.json").write_text(json.dumps(entry | {"avg_cached_startup_time": 6.47}))
    (folder / "notes.json").write_text('{"what": "something else"}')
    return folder


def text_of(folder: Path) -> str:
    return report_module.make_report(read_results(folder), "results", "report", folder / "simulated")


def report(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_figures_ratios_and_limits(results: Path, tmp_path: Path) -> None:
    bounds = {"goodput_90": 20.0, "goodput_90_below": 24.0, "goodput_99": None, "goodput_99_below": 1.25}
    (tmp_path / "simulated").mkdir()
    simulation = {"trace": "synthetic:conv", "slo": SLO, "policies": {"mixed": bounds, "auto": bounds}}
    (tmp_path / "simulated" / "ablation_conv.json").write_text(json.dumps(simulation))
    assert report("--results", results, "--output", tmp_path / "REPORT.md").exit_code == 0
    text = (tmp_path / "REPORT.md").read_text(encoding="utf-8")
    # 15 GB at 5 TB/s; kernels alone where they were measured on the card.
    assert "| decode step, batch 1, context 1,000 | 4.00 ms | limit: 3.00 ms, at a copy's rate | 1.333× |" in text
    assert "| 7.00 ms | limit: 6.60 ms, kernels alone | 1.061× | - |" in text
    # The longest of the 600 outputs has 739 tokens: half of the forwards have 512 rows, half 2,048.
    cells = "21.00 s, 20.0 mJ/token | 30.00 s, 25.0 mJ/token | 0.70×, 0.80×, 0.977× of the limit"
    assert f"| conv, 600 at once, mixed | {cells} | ITL p90 1.50× | `peers_offline` |" in text
    cells = "≥ 24/s, 900 ms | 20/s, 10 ms | ≥ 1.20× | 20/s (100 and 95 %): TTFT p99 4.00×"
    assert f"| goodput_90, conv, 500/15 ms | {cells} | `peers_conv` |" in text
    assert "| start, from a capture cache | 6.5 s |" in text
    assert "| conv, 500/15 | ≥ 20 / < 1.25 | ≥ 20 / < 1.25 |" in text
    assert text.endswith("`bare`, `notes`, `peers_conv`, `peers_offline`\n")
    pictures = sorted(path.name for path in (tmp_path / "report").iterdir())
    assert pictures == ["goodput.svg", "on_time.svg", "splitting.svg"]
    assert all(f"](report/{name})" in text for name in pictures)
    # Goodput, which is open above for this engine, and the tail there.
    chart = (tmp_path / "report" / "goodput.svg").read_text(encoding="utf-8")
    assert all(f"> {label}<" in chart for label in ("≥ 24/s", "20/s", "900", "10"))


def test_which_runs_are_compared(results: Path, tmp_path: Path) -> None:
    """Those of one card and clean commit, at whatever rates, beside each peer; the newest that tell a ratio."""
    write_comparison(results / "own_faster.json", cell(AUTO, run_at(25, 0.91)), date="2026-01-03")
    bursty = cell(AUTO, run_at(5, 1.0)), cell(VLLM_512, run_at(4, 0.5))
    write_comparison(results / "apart.json", *bursty, burstiness=0.25)
    for commit, own in (("another", run_at(26, 1.0)), ("abc-dirty", run_at(27, 1.0))):
        write_comparison(results / f"{commit}.json", cell(AUTO, own), commit=commit)
    open_ended = [cell(one, run_at(20, 1.0), run_at(22, 1.0, sustained=False)) for one in (AUTO, VLLM_512)]
    write_comparison(results / "newer.json", *open_ended, date="2026-02-03", commit="newer")
    write_comparison(results / "open.json", *open_ended, model="open")
    one_run = cell(AUTO, run_at(30, 1.0, p90_itl_ms=30.0)), cell(VLLM_512, run_at(30, 0.5))
    write_comparison(results / "one_run.json", *one_run, date="2026-02-02", commit="older", max_runs=1)
    write_comparison(results / "lone.json", *one_run, model="lone", max_runs=1)
    write_comparison(results / "other.json", cell("sglang 0.5.17 chunk 512", run_at(18, 0.95), run_at(18.5, 0.8)))
    assert report("--results", results, "--output", tmp_path / "REPORT.md").exit_code == 0
    text = (tmp_path / "REPORT.md").read_text(encoding="utf-8")
    assert "SGLang | ≥ 25/s, 10 ms | 18/s, 10 ms | ≥ 1.39× | - | `peers_conv`, `own_faster`, `other` |" in text
    sides, worse = "≥ 25/s, 10 ms | 20/s, 10 ms", "30/s (100 and 50 %): ITL p90 3.00×"
    assert f"| {sides} | ≥ 1.25× | {worse} (`one_run`) | `peers_conv`, `own_faster` |" in text
    assert f"lone, conv, 500/15 ms | ≥ 30/s, 10 ms | < 30/s | > 1.00× | {worse} | `lone` |" in text
    assert "conv, burstiness 0.25, 500/15 ms | ≥ 5/s, 10 ms | < 4/s | > 1.25× | - | `apart` |" in text
    assert "open, conv, 500/15 ms | ≥ 20/s, 10 ms | ≥ 20/s, 10 ms | - | - | `open` |" in text
    assert "by each load's better peer: goodput_90 1.25× (2 loads), " in text
    # The plot shows the same searches, and "<" where the peer served no rate.
    chart = (tmp_path / "report" / "goodput.svg").read_text(encoding="utf-8")
    assert [chart.count(f"> {one}/s<") for one in ("&lt; 4", "&lt; 30", "≥ 25", "≥ 20")] == [1, 1, 2, 2]


def test_a_measured_run_is_simulated_by_its_own_settings(tmp_path: Path) -> None:
    run = run_at(1.5, 0.9, sustained=True, burstiness=0.5, system_settings={"kv_cache_tokens": 160_000})
    own = cell(AUTO, run, run_at(3, 0.9, sustained=False), slo="ttft:500ms tpot:50ms", workload="synthetic:conv")
    peer = cell(VLLM_512, run_at(1.5, 0.8, sustained=True))
    settings = {"device_name": "NVIDIA H200", "model": "llama-3.1-8b", "max_model_len": 16384, "max_num_seqs": 7}
    write_comparison(tmp_path / "peers.json", own, peer, tensor_parallel_size=2, **settings)
    (source,) = read_results(tmp_path)
    ((found, run),) = simulator_error.measured_runs(source)
    assert (found["system"], run["request_rate"]) == ("bullet_graph auto", 1.5)
    arguments = simulator_error.command_of(source.fields["settings"], found, run)
    words = "h200 llama-3.1-8b synthetic:conv --first-rate 1.5 --burstiness 0.5 --max-num-seqs 7 16384 2"
    assert {*words.split(), "--kv-cache-bytes", str(160_016 * 65_536), "ttft:500ms tpot:50ms"} <= set(arguments)
    figures = simulator_error.simulated([*arguments, "--tensor-parallel-size", "1", "--smoke", "--num-prompts", "20"])
    assert list(figures) == ["auto", "mixed", "split"]
    assert {(run["request_rate"], run["backend"]) for run in figures.values()} == {(1.5, "bullet-graph simulate")}
    assert figures["auto"].keys() >= {*simulator_error.FIGURES, "policy_shares"}
    with pytest.raises(ConfigError, match=r"failed: .*no-such"):
        simulator_error.simulated([*arguments, "--gpu", "no-such"])
    write_comparison(tmp_path / "peers.json", own | {"workload": "absent.jsonl"}, peer, **settings)
    result = CliRunner().invoke(simulator_error.main, ["--results", str(tmp_path), "--output-json", "error.json"])
    assert (result.exit_code, "absent.jsonl: a measured run had this trace" in result.stderr) == (2, True)


def test_later_runs_at_a_goodput_that_failed_are_told(tmp_path: Path) -> None:
    cells = [cell(one, run_at(20, 0.95), run_at(30, 0.5)) for one in (AUTO, VLLM_512)]
    write_comparison(tmp_path / "search.json", *cells, date="2026-01-05")
    bad = cell(AUTO, run_at(20, 0.95, stable=False))
    write_comparison(tmp_path / "before.json", bad, date="2026-01-04", commit="before")
    runs = [run_at(*one) for one in ((20.05, 0.89), (20, 0.95), (22, 0.5), (18, 0.5), (18, 0.95), (25, 0.95))]
    for name, own, settings in (
        ("later", cell(AUTO, *bad["runs"], *runs, run_at(20, 0.1, sustained=False)), {}),
        ("targets", bad | {"slo": "ttft:1ms tpot:1ms"}, {}),
        ("bursts", bad, {"burstiness": 0.25}),
        ("table", bad, {"perf_table": "table.json"}),
        ("model", bad, {"model": "tiny"}),
        ("at_once", bad, {"all_at_once": True}),
    ):
        write_comparison(tmp_path / f"{name}.json", own, date="2026-01-06", commit=name, **settings)
    assert "ms; later 3/5 failed | 20/s" in text_of(tmp_path)


def test_rates_of_split_over_mixed() -> None:
    model = Mock(num_sms=132, decode_sms=(32, 64))
    model.decode.return_value = Prediction(5.0, measured=True)
    model.mixed.side_effect = lambda rows, *_: Prediction(5.0 + rows / 100, measured=rows < 200)
    model.wave_chunk_tokens.side_effect = lambda most, _: most
    model.split.side_effect = lambda sms, *_: SplitPrediction(10 - sms / 16, 2048 * 10 / 132, measured=True)
    found = {target: (ratio, known) for target, ratio, known in splitting.ratios(model, 500, 8)}
    # 1.1: 48 rows in 5.48 ms, and no split; 1.25: 64 SMs beside 112 rows in 6.12 ms; 2: 32 beside 496 in 9.96 ms.
    assert found[1.1] == (0.0, True)
    rate_on = {sms: (2048 * (132 - sms) // 132) / (2048 * 10 / 132) for sms in (32, 64)}
    assert found[1.25] == (pytest.approx(rate_on[64] / (112 / 6.12)), True)
    assert found[2.0] == (pytest.approx(rate_on[32] / (496 / 9.96)), False)


def test_a_shared_goodput_that_is_open_above_bounds_the_ratio_of_a_divided_fleet() -> None:
    shared = {"machines": 10, "gb_per_s": None, "goodput_90": 50.0, "goodput_90_below": None}
    divided = shared | {"gb_per_s": 25.0, "goodput_90": 40.0, "goodput_90_below": 40.0, "prefill_machines": 2}
    fields = {"trace": "synthetic:chat", "slo": SLO, "arrival_seconds": 120.0, "systems": [shared, divided]}
    assert "≥ 50/s | 25: **≤ 0.80×** (2) |" in "".join(report_module.fleet_rows([Source("fleet_chat.json", fields)]))


def test_check_tells_what_differs_and_writes_nothing(results: Path, tmp_path: Path) -> None:
    output = tmp_path / "REPORT.md"
    arguments = ("--results", results, "--output", output)
    assert report(*arguments, "--check").exit_code == 1
    assert not output.exists()
    assert [report(*arguments, *more).exit_code for more in ((), ("--check",))] == [0, 0]
    (results / "notes.json").unlink()
    result = report(*arguments, "--check")
    assert (result.exit_code, "is not what the files say" in result.stderr) == (1, True)


def test_the_report_of_the_repository_is_up_to_date() -> None:
    result = report("--check")
    assert result.exit_code == 0, result.output
    texts = "".join(path.read_text() for path in (BENCH / "results").rglob("*.json"))
    assert not re.search(r"/root|[\"= ]/(home|tmp|work)/", texts)


def test_the_highest_bound_of_a_peers_settings_counts(tmp_path: Path) -> None:
    peers = cell(VLLM_512, run_at(20, 0.95), run_at(30, 0.5)), cell(VLLM_2048, run_at(10, 0.95), run_at(12, 0.5))
    write_comparison(tmp_path / "peers.json", cell(AUTO, run_at(24, 0.95)), *peers)
    # 512 may serve anything below 30/s.
    assert "| 20/s (< 30), 10 ms | 0.80 to ≥ 1.20× |" in text_of(tmp_path)


def test_the_tightest_bound_counts_and_a_goodput_in_a_wide_gap_is_a_bound(tmp_path: Path) -> None:
    for day, peer in enumerate((20, 16, 25), 1):
        cells = cell(AUTO, run_at(25, 0.95)), cell(VLLM_512, run_at(peer, 0.5))
        write_comparison(tmp_path / f"day_{day}.json", *cells, date=f"2026-01-0{day}", commit=str(day))
    assert "| ≥ 25/s, 10 ms | < 16/s | > 1.56× | - | `day_2` |" in text_of(tmp_path)
    gaps = {AUTO: (40, 80), VLLM_512: (10, 20)}
    wide = [cell(name, run_at(low, 0.95), run_at(high, 0.85, stable=True)) for name, (low, high) in gaps.items()]
    write_comparison(tmp_path / "wide.json", *wide)
    assert "| ≥ 40/s, 10 ms | 15/s (< 20), 10 ms at 10/s | 2.00 to ≥ 2.67× |" in text_of(tmp_path)


def test_a_search_of_other_sizes_replaces_the_one_before(tmp_path: Path) -> None:
    for day, requests in ((3, 600), (4, 700)):
        cells = [cell(one, run_at(20, 0.95), run_at(30, 0.5)) | {"num_prompts": requests} for one in (AUTO, VLLM_512)]
        write_comparison(tmp_path / f"day_{day}.json", *cells, date=f"2026-01-0{day}", commit=str(day))
    assert text_of(tmp_path).count("| goodput_90, conv, 500/15 ms |") == 1
