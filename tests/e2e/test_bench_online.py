"""``bullet-graph bench online`` and ``bench serve``, end to end on the CPU; ``test_cli_refusals.py`` has bad input."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_runner import TINY, printed, refused, run, write_trace
from click.testing import Result
from peers_fakes import CompletionsServer, completions_server
from servers import Served

from bullet_graph import Engine
from bullet_graph.engine.output import RequestOutput

LENGTHS = ((30, 5), (7, 12), (100, 1), (12, 8), (50, 3), (9, 6))
TARGETS = ("--goodput", "ttft:60000", "tpot:60000")
SERVER = {"max_model_len": 512, "api_key": "k"}


def bench(*arguments: str, trace: Path | str) -> Result:
    return run("bench", "online", *TINY, "--num-warmups", "0", "--trace", str(trace), *arguments)


@pytest.mark.parametrize("policies", [("auto",), ("mixed",), ("auto", "mixed", "serial")])
def test_targets_without_a_table_get_a_fixed_chunk_and_one_warning(policies: tuple[str, ...], trace: Path) -> None:
    chosen = [word for policy in policies for word in ("--policy", policy)]
    result = bench("--goodput", "ttft:500", "tpot:15", *chosen, trace=trace)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("warning: there is no performance table, so forwards have at most 512 rows") == 1
    assert "choose --policy mixed:CHUNK, or pass --perf-table roofline" in result.stderr


def test_one_policy_has_the_flat_fields_of_vllms_serving_benchmark(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = ("--request-rate", "100", *TARGETS, "--seed", "3", "--output-json", str(output), "--json")
    flat = printed(bench(*arguments, "--policy", "serial:64", trace=trace))
    assert json.loads(output.read_text()) == flat
    latencies = {
        f"{label}_{name}_ms"
        for label in ("mean", "median", "std", "p90", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    }
    assert latencies < set(flat)
    expected = json.loads("""{
        "backend": "bullet_graph", "model_id": "tiny", "num_prompts": 6, "completed": 6, "failed": 0,
        "total_input_tokens": 208, "total_output_tokens": 35, "request_rate": 100, "burstiness": 1,
        "max_concurrency": null, "slo_attainment": 1, "policy": "serial:64", "slo": "ttft:60000ms tpot:60000ms",
        "trace": "trace.csv", "seed": 3, "load_format": "dummy", "dtype": "float32", "num_preemptions": 0,
        "joules_per_output_token": null, "joules_per_token": null, "energy_joules": null, "partitions": null
    }""")
    assert {name: flat[name] for name in expected} == expected
    duration = flat["duration"]
    # The last request comes at exactly 6 / 100 s.
    assert duration > 0.06
    assert flat["output_throughput"] * duration == pytest.approx(35)
    assert flat["total_token_throughput"] * duration == pytest.approx(243)
    assert flat["request_throughput"] * duration == pytest.approx(6)
    assert flat["request_goodput"] == pytest.approx(flat["request_throughput"])
    assert 0 < flat["median_ttft_ms"] <= flat["p99_ttft_ms"] <= flat["p99_e2el_ms"] <= duration * 1e3
    assert sum(flat["policy_shares"].values()) == pytest.approx(1)
    assert set(flat["policy_shares"]) <= {"serial", "solo"}
    assert 0 < flat["kv_blocks_peak"] <= flat["kv_blocks_total"]
    assert flat["num_steps"] >= 12
    assert flat["engine"]["max_model_len"] == 512
    assert flat["provenance"]["device_name"] == "cpu"
    assert flat["device"]["power_w"] is None
    assert "ttfts" not in flat


def test_several_policies_stand_side_by_side(trace: Path) -> None:
    policies = [word for name in ("mixed:16", "auto", "mixed:16") for word in ("--policy", name)]
    policies += ["--perf-table", "roofline"]
    both = printed(bench(*policies, "--json", trace=trace))
    assert [flat["policy"] for flat in both["results"]] == ["mixed:16", "auto"], "each policy once"
    assert [flat["total_output_tokens"] for flat in both["results"]] == [35, 35]
    mixed, auto = both["results"]
    assert set(mixed["policy_shares"]) <= {"mixed", "solo"}
    # 208 prompt tokens in forwards of 16; the counters are of this run alone.
    assert mixed["num_steps"] >= 13
    assert auto["num_steps"] < mixed["num_steps"]
    assert (both["model"], both["trace"]) == ("tiny", "trace.csv")
    assert not {"policy", "completed"} & set(both)
    shown = bench(*policies, *TARGETS, trace=trace)
    assert shown.exit_code == 0, shown.output
    for text in ("mixed:16", "auto", "TTFT, median, ms", "met all targets, %", "KV blocks, peak, %"):
        assert text in shown.stdout
    assert "Memory ledger" in shown.stderr


def test_concurrency_is_limited(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: list[int] = []
    step = Engine.step

    def count(engine: Engine, until_s: float | None = None) -> list[RequestOutput]:
        stats = engine.stats()
        under_way.append(stats.num_running + stats.num_waiting)
        return step(engine, until_s)

    monkeypatch.setattr(Engine, "step", count)
    flat = printed(bench("--max-concurrency", "2", "--json", trace=trace))
    assert (flat["request_rate"], flat["max_concurrency"], flat["completed"]) == ("inf", 2, 6)
    assert max(under_way) == 2
    under_way.clear()
    printed(bench("--json", trace=trace))
    assert max(under_way) == 6


def test_warm_up_is_in_no_figure(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    add_request = Engine.add_request

    def note(engine: Engine, request_id: str, *arguments: Any, **settings: Any) -> None:
        sent.append(request_id)
        add_request(engine, request_id, *arguments, **settings)

    monkeypatch.setattr(Engine, "add_request", note)
    flat = printed(bench("--num-warmups", "8", "--policy", "mixed", "--save-detailed", "--json", trace=trace))
    assert sent == [*(f"warmup-{i}" for i in range(8)), *map(str, range(6))]
    assert (flat["completed"], flat["total_output_tokens"]) == (6, 35)
    assert flat["output_lens"] == [output for _, output in LENGTHS]
    # Warm-up's arrivals take 0.14 s, and all the workload's tokens at most one forward each.
    assert flat["num_steps"] <= 6 + 35


def test_a_policy_that_the_engine_cannot_serve_is_refused_before_the_first_run(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "add_request", lambda *_, **__: pytest.fail("a request was sent"))
    policies = ("--policy", "mixed:16", "--policy", "split", "--perf-table", "roofline")
    assert "SM partitions need a GPU" in refused(bench(*policies, "--json", trace=trace))


# ---- ``bullet-graph bench serve`` against ``bullet-graph serve``, and against a server that tells less ----


@pytest.fixture(scope="module")
def other() -> Iterator[CompletionsServer]:
    with completions_server() as server:
        yield server


def against(url: str, trace: Path, *options: str) -> Result:
    return run("bench", "serve", "--base-url", url, "--trace", str(trace), "--num-warmups", "2", *options)


def test_it_has_the_fields_of_bench_online_and_the_same_requests(served: Served, trace: Path, tmp_path: Path) -> None:
    options = ("--request-rate", "100", "--goodput", "ttft:60000", "tpot:60000", "--seed", "3", "--json")
    path = tmp_path / "server.json"
    found = printed(against(served.url, trace, *options, "--api-key", "k", "--output-json", str(path)))
    assert json.loads(path.read_text()) == found
    arguments = ("--num-warmups", "2", "--trace", str(trace), "--policy", "serial", *options)
    online = printed(run("bench", "online", *TINY, *arguments))
    assert found.keys() == online.keys() | {"server", "prompt_seed"}
    same = ("num_prompts", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_rate")
    same += ("burstiness", "slo", "slo_attainment", "trace", "seed", "model", "model_id", "num_preemptions")
    assert {name: found[name] for name in same} == {name: online[name] for name in same}
    # What the server counted meanwhile: the warm-up, and its targets, are not in it.
    assert 12 < found["num_steps"] < served.metrics()["num_steps_total"]
    assert sum(found["policy_shares"].values()) == pytest.approx(1)
    assert found["server"]["owned_by"] == "bullet_graph"
    assert 0 < found["median_ttft_ms"] < found["median_e2el_ms"] + 1e-9
    assert served.metrics()["slo_requests_total"] == 8
    assert served.metrics()["generation_tokens_total"] == 35 + 17


def test_people_get_a_table(served: Served, trace: Path) -> None:
    result = against(served.url, trace, "--api-key", "k")
    assert result.exit_code == 0, result.output
    for text in (f"tiny at {served.url}/v1: trace.csv", "TTFT, median, ms", "device time in solo, %"):
        assert text in result.stdout


def test_any_server_with_the_interface_will_do(other: CompletionsServer, trace: Path) -> None:
    found = printed(against(other.url, trace, "--model", "tiny", "--max-concurrency", "2", "--save-detailed", "--json"))
    assert (found["model"], found["completed"], found["max_concurrency"]) == ("tiny-served", 6, 2)
    assert found["policy_shares"] is found["num_steps"] is found["joules_per_token"] is None
    assert found["output_lens"] == [output for _, output in LENGTHS]
    # Targets are no field that other servers know, and its cache may hold the prompts of before.
    found, before = printed(against(other.url, trace, "--model", "tiny", "--goodput", "ttft:60000", "--json")), found
    assert found["prompt_seed"] != before["prompt_seed"]
    assert found["slo_attainment"] == 1
    assert all("slo" not in body for body in other.bodies)


def test_a_request_that_is_too_long_fails_alone(served: Served, tmp_path: Path) -> None:
    longer = write_trace(tmp_path, *LENGTHS, (600, 3))
    found = printed(against(served.url, longer, "--api-key", "k", "--json", "--save-detailed"))
    assert (found["completed"], found["failed"]) == (6, 1)
    assert "a prompt may have at most 511 tokens here, found 600" in found["errors"][-1]


def test_servers_that_cannot_be_measured(served: Served, other: CompletionsServer, trace: Path, tmp_path: Path) -> None:
    assert "GET http://127.0.0.1:1/v1/models must list" in refused(against("http://127.0.0.1:1", trace))
    assert "401" in refused(against(served.url, trace))
    assert "--base-url must be such as" in refused(against("localhost:8000", trace))
    assert "correct the URL" in refused(against("http://[::1:8000", trace))
    assert "give --model" in refused(against(other.url, trace))
    assert "unknown model 'nonesuch'" in refused(against(other.url, trace, "--model", "nonesuch"))
    too_long = write_trace(tmp_path, (600, 2))
    message = refused(against(served.url, too_long, "--api-key", "k", "--num-warmups", "0"))
    assert "none of the 1 requests" in message
    assert "none of the 2 requests" in refused(against(served.url, too_long, "--api-key", "k"))  # by the warm-up
