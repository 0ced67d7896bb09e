"""``bullet-graph bench latency``, end to end on the CPU."""

import time

import pytest
from cli_runner import TINY, parsed, run
from click.testing import Result


def latency(*arguments: str) -> Result:
    return run("bench", "latency", *TINY, *arguments)


def test_latency_figures() -> None:
    start_s = time.perf_counter()
    result = latency(
        *("--batch-size", "3", "--input-len", "20", "--output-len", "6", "--num-iters", "4"),
        *("--num-iters-warmup", "1", "--json"),
    )
    wall_s = time.perf_counter() - start_s
    figures = parsed(result)
    latencies = figures["latencies"]
    assert len(latencies) == figures["num_iters"] == 4
    assert figures["avg_latency"] == pytest.approx(sum(latencies) / 4)
    assert list(figures["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert min(latencies) <= figures["percentiles"]["10"] <= figures["percentiles"]["99"] <= max(latencies)
    assert sum(latencies) < wall_s
    # A prefill and five decode steps an iteration.
    assert figures["num_steps"] == 4 * 6
    mean_batch_ms = figures["prefill_ms"]["mean"] + 5 * figures["decode_step_ms"]["mean"]
    assert mean_batch_ms == pytest.approx(figures["avg_latency"] * 1e3, rel=0.2)
    # tiny in float32: four layers of 128×(128 + 2×64) + 128×128 + 3×128×384 + 2×128, a norm, a head of 512
    # rows and three embedding rows; then 3 sequences × (23 + 1) tokens × 2 × 4 layers × 64 channels.
    weights = 4 * (128 * 256 + 128 * 128 + 3 * 128 * 384 + 2 * 128) + 128 + 512 * 128 + 3 * 128
    assert figures["decode_step_bytes"] == 4 * (weights + 3 * 24 * 2 * 4 * 64)
    achieved = figures["decode_step_bytes"] / figures["decode_step_ms"]["p50"] / 1e6
    assert figures["achieved_gb_per_s"] == pytest.approx(achieved)
    assert figures["copy_gb_per_s"] > 0
    assert figures["share_of_copy_percent"] == pytest.approx(100 * achieved / figures["copy_gb_per_s"])
    assert figures["engine"]["max_num_seqs"] == 3
    assert figures["provenance"]["device_name"] == "cpu"


def test_latency_table_has_ms_beside_bandwidth() -> None:
    result = latency("--batch-size", "1", "--output-len", "3", "--num-iters", "1", "--num-iters-warmup", "0")
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if "decode step, median" in line)
    assert " ms · " in line
    assert " GB/s" in line


def test_latency_of_one_token_has_no_decode_step() -> None:
    one = ("--batch-size", "1", "--output-len", "1", "--num-iters", "1", "--num-iters-warmup", "0")
    figures = parsed(latency(*one, "--json"))
    assert figures["decode_step_ms"] is None
    assert figures["achieved_gb_per_s"] is None
    assert figures["prefill_ms"]["p50"] > 0
    assert latency(*one).exit_code == 0
