"""``bench/server_overhead.py``, both ways on the tiny model."""

import json
from pathlib import Path

from click.testing import CliRunner

from bench.server_overhead import COMPARED, compare, main


def test_it_measures_both_and_compares(tmp_path: Path) -> None:
    path = tmp_path / "overhead.json"
    engine = "--device cpu --max-num-seqs 8 --max-model-len 512 --kv-cache-bytes 4MiB"
    load = ("--trace", "synthetic:conv", "--num-prompts", "3", "--request-rate", "inf")
    options = ("--model", "tiny", "--engine-options", engine, "--repeats", "1", "--limit-percent", "1e9")
    result = CliRunner().invoke(main, [*load, *options, "--output-json", str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    (run,) = found["runs"]
    assert run["engine"]["total_input_tokens"] == run["server"]["total_input_tokens"] > 0
    assert run["server"]["completed"] == run["engine"]["completed"] > 0
    assert found["comparison"].keys() >= set(COMPARED)


def test_the_medians_of_the_repeats_are_compared() -> None:
    names = ("p90_ttft_ms", "p90_tpot_ms", "median_itl_ms", "p99_itl_ms", "output_throughput")
    none = dict.fromkeys(names)

    def run(engine: float, server: float) -> dict[str, dict[str, object]]:
        return {
            "engine": none | {"median_ttft_ms": engine, "median_tpot_ms": 8.0},
            "server": none | {"median_ttft_ms": server, "median_tpot_ms": 8.0},
        }

    comparison = compare([run(10, 11), run(20, 21), run(90, 500)])
    assert comparison["median_ttft_ms"] == {"engine": 20, "server": 21, "percent": 100 * (21 / 20 - 1)}
    assert comparison["median_tpot_ms"]["percent"] == 0
    assert comparison["p99_itl_ms"] == {"engine": None, "server": None, "percent": None}
