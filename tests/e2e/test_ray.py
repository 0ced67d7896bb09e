"""On Ray, real and on this machine: batches with two workers of the tiny model, and Ray Serve with two replicas."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_runner import parsed, refused, run

ray = pytest.importorskip("ray", reason="needs the extra `ray`: pip install 'bullet-graph[ray]'")

ENGINE = {"device": "cpu", "kv_cache_bytes": 4 << 20, "max_model_len": 512, "cpu_threads": 1, "max_num_seqs": 32}
OPTIONS = (
    "--model",
    "tiny",
    *(word for name, value in ENGINE.items() for word in (f"--{name.replace('_', '-')}", str(value))),
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """Ray on this machine, for all tests of the file."""
    # More CPUs than there are: a batch takes two, Ray Serve three.
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


def mixed_rows(number: int) -> list[dict[str, Any]]:
    """Rows of all forms; those at 100, 200, … are wrong, each in its own way."""
    rows: list[dict[str, Any]] = []
    for i in range(number):
        body = {"max_tokens": 1 + i * 7 % 23, "temperature": 0, "ignore_eos": True}
        chat = {**body, "messages": [{"role": "user", "content": f"Say {i}."}]}
        rows.append(
            [
                {
                    "custom_id": f"completion-{i}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {**body, "prompt": f"{i}, "},
                },
                {"custom_id": f"chat-{i}", "method": "POST", "url": "/v1/chat/completions", "body": chat},
                {**body, "prompt": [1, 2, i % 256]},
                {"custom_id": f"plain-{i}", **chat},
            ][i % 4]
        )
    for at, wrong in (
        (100, {"prompt": "a", "max_tokens": -1}),
        (200, {"prompt": "a", "model": "gpt-4o"}),
        (300, {"prompt": "a", "stream": True}),
    ):
        rows[at] = wrong
    rows[400] |= {"url": "/v1/embeddings"}
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def outputs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "output.jsonl").read_text().splitlines()]


def workers() -> list[psutil.Process]:
    """The processes of a batch's actors."""
    found = psutil.Process().children(recursive=True)
    return [each for each in found if any("MapWorker" in word for word in each.cmdline())]


def kill_one_worker(folder: Path, killed: list[int]) -> None:
    """Kill a worker when a quarter of the rows are there."""
    while not killed:
        time.sleep(0.02)
        if sum(part.read_bytes().count(b"\n") for part in folder.glob("parts/*")) > 125 and (found := workers()):
            killed.append(found[0].pid)
            found[0].kill()


def test_a_worker_dies_and_each_row_is_there_once_and_a_restart_skips_what_is_written(tmp_path: Path) -> None:
    rows, folder, killed = mixed_rows(500), tmp_path / "out", list[int]()
    command = ("batch", "--input", write(tmp_path / "in.jsonl", rows), "--output", str(folder), *OPTIONS, "--json")
    killer = threading.Thread(target=kill_one_worker, args=(folder, killed))
    killer.start()
    report = parsed(run(*command, "--num-workers", "2"))
    killer.join()
    assert (report["rows"], report["skipped"], report["errors"]) == (500, 0, 4)

    found = outputs(folder)
    assert [row["custom_id"] for row in found] == [row.get("custom_id", f"row-{i}") for i, row in enumerate(rows, 1)]
    for i, (row, output) in enumerate(zip(rows, found, strict=True)):
        if i in (100, 200, 300, 400):
            assert output["response"]["body"] is None
            continue
        assert output["error"] is None, output
        body = row.get("body", row)
        assert output["response"]["body"]["usage"]["completion_tokens"] == body["max_tokens"]
    errors = [(found[at]["response"]["status_code"], found[at]["error"]["param"]) for at in (100, 200, 300, 400)]
    assert errors == [(400, "max_tokens"), (404, "model"), (400, "stream"), (400, "url")]

    # A run that was stopped leaves rows in part files, the last of them perhaps torn.
    lines = (folder / "output.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "output.jsonl").unlink()
    (folder / "parts" / "a.jsonl").write_bytes(b"".join(lines[:300]))
    (folder / "parts" / "b.jsonl").write_bytes(b"".join(lines[290:490]) + lines[490][:40])
    report = parsed(run(*command, "--num-workers", "1"))
    assert (report["rows"], report["skipped"], report["errors"]) == (500, 490, 4)
    again = outputs(folder)
    assert again[:490] == found[:490]
    texts = [[row["response"]["body"]["choices"] for row in each[490:]] for each in (again, found)]
    assert texts[0] == texts[1]

    # With all rows there, nothing starts.
    assert parsed(run(*command))["skipped"] == 500
    assert "differs in input" in refused(run(*command[:2], write(tmp_path / "other.jsonl", rows[:9]), *command[3:]))


def test_an_engine_that_cannot_start_ends_the_batch_with_its_message(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    message = refused(
        run(
            "batch",
            "--input",
            source,
            "--output",
            str(tmp_path / "out"),
            "--model",
            "nonesuch/model",
            "--device",
            "cpu",
        )
    )
    assert "nonesuch/model" in message
