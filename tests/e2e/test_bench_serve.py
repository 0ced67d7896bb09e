"""``bullet-graph bench serve`` against ``bullet-graph serve``, and against a server that tells less."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runner import TINY, printed, refused, run, write_trace
from click.testing import Result
from peers_fakes import CompletionsServer, completions_server
from servers import Served, serving

LENGTHS = ((30, 5), (7, 12), (100, 1), (12, 8), (50, 3), (9, 6))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace"), *LENGTHS)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_model_len=512, api_key="k") as served:
        yield served


@pytest.fixture(scope="module")
def other() -> Iterator[CompletionsServer]:
    with completions_server() as server:
        yield server


def bench(url: str, trace: Path, *options: str) -> Result:
    return run("bench", "serve", "--base-url", url, "--trace", str(trace), "--num-warmups", "2", *options)


def test_it_has_the_fields_of_bench_online_and_the_same_requests(served: Served, trace: Path, tmp_path: Path) -> None:
    options = ("--request-rate", "100", "--goodput", "ttft:60000", "tpot:60000", "--seed", "3", "--json")
    path = tmp_path / "server.json"
    found = printed(bench(served.url, trace, *options, "--api-key", "k", "--output-json", str(path)))
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
    result = bench(served.url, trace, "--api-key", "k")
    assert result.exit_code == 0, result.output
    for text in (f"tiny at {served.url}/v1: trace.csv", "TTFT, median, ms", "device time in solo, %"):
        assert text in result.stdout


def test_any_server_with_the_interface_will_do(other: CompletionsServer, trace: Path) -> None:
    found = printed(bench(other.url, trace, "--model", "tiny", "--max-concurrency", "2", "--save-detailed", "--json"))
    assert (found["model"], found["completed"], found["max_concurrency"]) == ("tiny-served", 6, 2)
    assert found["policy_shares"] is found["num_steps"] is found["joules_per_token"] is None
    assert found["output_lens"] == [output for _, output in LENGTHS]
    # Targets are no field that other servers know, and its cache may hold the prompts of before.
    found, before = printed(bench(other.url, trace, "--model", "tiny", "--goodput", "ttft:60000", "--json")), found
    assert found["prompt_seed"] != before["prompt_seed"]
    assert found["slo_attainment"] == 1
    assert all("slo" not in body for body in other.bodies)


def test_a_request_that_is_too_long_fails_alone(served: Served, tmp_path: Path) -> None:
    longer = write_trace(tmp_path, *LENGTHS, (600, 3))
    found = printed(bench(served.url, longer, "--api-key", "k", "--json", "--save-detailed"))
    assert (found["completed"], found["failed"]) == (6, 1)
    assert "a prompt may have at most 511 tokens here, found 600" in found["errors"][-1]


def test_bad_input(served: Served, other: CompletionsServer, trace: Path, tmp_path: Path) -> None:
    assert "GET http://127.0.0.1:1/v1/models must list" in refused(bench("http://127.0.0.1:1", trace))
    assert "401" in refused(bench(served.url, trace))
    assert "--base-url must be such as" in refused(bench("localhost:8000", trace))
    assert "give --model" in refused(bench(other.url, trace))
    assert "unknown model 'nonesuch'" in refused(bench(other.url, trace, "--model", "nonesuch"))
    too_long = write_trace(tmp_path, (600, 2))
    message = refused(bench(served.url, too_long, "--api-key", "k", "--num-warmups", "0"))
    assert "none of the 1 requests" in message
    message = refused(bench(served.url, too_long, "--api-key", "k"))  # already by the warm-up
    assert "none of the 2 requests" in message
