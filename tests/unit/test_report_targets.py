"""Verdicts about targets, and what is worse than a peer, from made-up files."""

import json
from pathlib import Path

import pytest
from result_files import (
    AUTO,
    CODE,
    CONV,
    LONGDOC,
    PROVENANCE,
    VLLM_512,
    VLLM_2048,
    at_load,
    decode,
    make_run,
    offline,
    searched,
    write_offline,
    write_sweep,
)

from bench.reporting.evidence import Evidence, read_evidence
from bench.reporting.targets import TARGETS, Verdict, judge
from bench.reporting.worse import Compared, compare_all


def verdict(folder: Path, name: str) -> Verdict:
    target = next(target for target in TARGETS if target.name.startswith(name))
    return judge(read_evidence(folder), [target])[0]


def value(folder: Path, name: str) -> float:
    figure = verdict(folder, name).figure
    assert figure is not None
    return figure.value


def worse(folder: Path) -> dict[tuple[str, str], Compared]:
    return {(one.load, one.figure): one for one in compare_all(read_evidence(folder)) if one.times_worse > 1}


def test_nothing_is_measured_where_nothing_is_there() -> None:
    verdicts = judge(Evidence(()))
    assert {one.word for one in verdicts} == {"not measured"}
    assert len(verdicts) == 20
    assert all(one.figure is None for one in verdicts)


def test_the_targets_are_the_projects() -> None:
    assert [(target.comparator, target.limit) for target in TARGETS[:12]] == [
        ("≤", 22.0),
        ("≤", 21.5),
        ("≥", 1.15),
        ("≥", 1.25),
        ("≥", 1.55),
        ("≥", 1.25),
        ("≤", 0.6),
        ("≤", 4.3),
        ("≤", 6.9),
        ("≤", 14.5),
        ("≥", 41_000),
        ("≤", 0.9),
    ]
    assert [target.limit for target in TARGETS[12:]] == [1.15, 1.25, 1.55, 1.25] * 2


def test_other_models_have_rows_of_their_own(tmp_path: Path) -> None:
    write_sweep(
        tmp_path / "peers.json",
        searched({AUTO: 30.0, VLLM_512: 20.0}, CODE, "ttft:500ms tpot:8ms"),
        model="qwen3-8b",
    )
    measured = [one.target.name for one in judge(read_evidence(tmp_path)) if one.figure]
    assert measured == ["goodput, code, interactive (ttft:500 tpot:8, 90 %), qwen3-8b"]


def test_files_of_another_gpu_are_no_evidence(tmp_path: Path) -> None:
    write_offline(
        tmp_path / "offline.json", decode(1, 4.0) | {"provenance": PROVENANCE | {"device_name": "cpu"}}
    )
    found = verdict(tmp_path, "decode step, batch 1,")
    assert found.word == "not measured"
    assert found.reasons == ("offline.json is of cpu, not NVIDIA H200",)


def test_durations_are_medians_of_the_quickest_setting(tmp_path: Path) -> None:
    write_offline(
        tmp_path / "offline.json",
        offline(CONV, 600, 21.0, "serial"),
        offline(CONV, 600, 25.0, "serial"),
        offline(CONV, 600, 22.0, "mixed:2048"),
        offline(CONV, 600, 1.0, "split", num_failed=3),
        offline(CONV, 599, 1.0),
        offline(CODE, 400, 21.6),
    )
    assert value(tmp_path, "conv, first 600") == 22.0
    assert verdict(tmp_path, "conv, first 600").word == "met"
    assert verdict(tmp_path, "code, first 400").word == "missed"


def test_the_order_of_prompts_is_part_of_a_setting(tmp_path: Path) -> None:
    ordered = {"engine": {"prompt_order": "longest-output"}}
    write_offline(
        tmp_path / "offline.json",
        offline(CONV, 600, 23.0, "auto") | {"engine": {"prompt_order": "arrival"}},
        offline(CONV, 600, 21.5, "auto") | ordered,
        offline(CONV, 600, 21.7, "auto") | ordered,
    )
    assert value(tmp_path, "conv, first 600") == pytest.approx(21.6)
    figure = verdict(tmp_path, "conv, first 600").figure
    assert figure is not None
    assert figure.detail.startswith("bullet_graph auto/longest-output, ")


def test_the_newest_file_counts_and_the_others_are_told(tmp_path: Path) -> None:
    write_offline(tmp_path / "offline.json", offline(CONV, 600, 21.0))
    runs = {AUTO: [make_run(1e4, all_at_once=True, duration=23.0)]}
    write_sweep(
        tmp_path / "peers_offline.json", at_load(runs), all_at_once=True, date="2026-02-01T00:00:00+00:00"
    )
    found = verdict(tmp_path, "conv, first 600")
    assert found.word == "missed"
    assert found.figure is not None
    assert found.figure.file == "peers_offline.json"
    assert [one.value for one in found.older] == [21.0]


@pytest.mark.parametrize(("peak", "is_told"), [(990, True), (989, False)])
def test_a_cache_that_was_full_is_told(tmp_path: Path, peak: int, is_told: bool) -> None:
    """Requests waited for blocks: another run, with more memory, is faster."""
    blocks = {"kv_blocks_peak": peak, "kv_blocks_total": 1000}
    run = make_run(1e4, all_at_once=True, system_counters=blocks)
    write_sweep(tmp_path / "peers_offline.json", at_load({AUTO: [run]}), all_at_once=True)
    found = verdict(tmp_path, "conv, first 600")
    assert found.figure is not None
    assert (", its KV cache of 1,000 blocks full" in found.figure.detail) == is_told


def test_decode_steps_and_prefill(tmp_path: Path) -> None:
    write_offline(
        tmp_path / "decode_steps.json",
        decode(1, 4.3),
        decode(64, 6.8),
        decode(64, 7.2),
        decode(256, 9.0, input_len=1000),
    )
    points = [
        {"decode_sms": None, "prefill_sms": 116, "prefill_tokens_per_s": 50_000},
        {"decode_sms": None, "prefill_sms": 132, "prefill_tokens_per_s": 40_999.9},
        {"decode_sms": 16, "prefill_sms": 132, "prefill_tokens_per_s": 60_000},
    ]
    scaling = {
        "model": "llama-3.1-8b",
        "backend": "smctrl: 8",
        "prompt": 2048,
        "seconds": 2.0,
        "points": points,
    }
    (tmp_path / "sm_scaling.json").write_text(json.dumps(scaling | {"provenance": PROVENANCE}))
    assert verdict(tmp_path, "decode step, batch 1,").word == "met"
    assert value(tmp_path, "decode step, batch 64") == pytest.approx(7.0)
    assert verdict(tmp_path, "decode step, batch 64").word == "missed"
    assert verdict(tmp_path, "decode step, batch 256").word == "not measured"
    assert verdict(tmp_path, "prefill").word == "missed"
    (tmp_path / "sm_scaling.json").write_text(
        json.dumps(scaling | {"provenance": PROVENANCE, "seconds": 0.7})
    )
    assert verdict(tmp_path, "prefill").reasons == ("sm_scaling.json: measured for 0.7 s, not 2 s",)


def test_itl_and_joules_are_compared_with_the_lowest_peer(tmp_path: Path) -> None:
    itl = {
        AUTO: [make_run(3.5, p99_itl_ms=v) for v in (20.0, 24.0, 90.0)],
        VLLM_512: [make_run(3.5, p99_itl_ms=40.0), make_run(3.0, p99_itl_ms=1.0)],
        VLLM_2048: [make_run(3.5, p99_itl_ms=80.0), make_run(3.5, p99_itl_ms=1.0, failed=1)],
    }
    write_sweep(tmp_path / "peers_longdoc.json", at_load(itl, LONGDOC), rates=[3.5])
    assert value(tmp_path, "p99 ITL") == pytest.approx(24 / 40)
    assert verdict(tmp_path, "p99 ITL").word == "met"
    joules = {
        AUTO: [make_run(1e4, all_at_once=True, joules_per_token=0.0185)],
        VLLM_512: [make_run(1e4, all_at_once=True, joules_per_token=0.03)],
        VLLM_2048: [make_run(1e4, all_at_once=True, joules_per_token=0.02)],
    }
    write_sweep(tmp_path / "peers_offline.json", at_load(joules), all_at_once=True)
    assert value(tmp_path, "joules a token") == pytest.approx(0.925)
    assert verdict(tmp_path, "joules a token").word == "missed"
    # All at once, this engine's best setting counts.
    joules[f"{AUTO}/longest-output"] = [make_run(1e4, all_at_once=True, joules_per_token=0.0178)]
    write_sweep(tmp_path / "peers_offline.json", at_load(joules), all_at_once=True)
    assert value(tmp_path, "joules a token") == pytest.approx(0.89)
    assert verdict(tmp_path, "joules a token").word == "met"


def test_what_is_worse_is_found(tmp_path: Path) -> None:
    runs = {
        AUTO: [make_run(8.0, p99_ttft_ms=300.0, median_tpot_ms=9.0, output_throughput=450.0)],
        VLLM_512: [make_run(8.0, p99_ttft_ms=400.0)],
        VLLM_2048: [make_run(8.0, p99_ttft_ms=200.0, median_tpot_ms=9.5)],
    }
    write_sweep(tmp_path / "peers_rates.json", at_load(runs), rates=[8.0])
    found = worse(tmp_path)
    assert set(found) == {("8/s", "TTFT, p99, ms"), ("8/s", "output tokens/s")}
    assert found["8/s", "TTFT, p99, ms"].times_worse == pytest.approx(1.5)
    assert found["8/s", "TTFT, p99, ms"].peer == VLLM_2048
    assert found["8/s", "output tokens/s"].times_worse == pytest.approx(2.0)


def test_a_lower_goodput_or_none_is_worse(tmp_path: Path) -> None:
    cells = [*searched({AUTO: 8.0, VLLM_512: 10.0}), *searched({AUTO: None, VLLM_512: 10.0}, CODE)]
    write_sweep(tmp_path / "peers.json", cells)
    found = [one for one in compare_all(read_evidence(tmp_path)) if one.figure.startswith("goodput")]
    assert [(one.own, one.best, one.times_worse) for one in found] == [
        (8.0, 10.0, 1.25),
        (None, 10.0, float("inf")),
    ]
