"""Attack a server and the readers of files with random and malicious input, and measure what it does to them.

    python -m bench.fuzz --seconds 600 --output-json bench/results/cpu/fuzz.json

A server of the model `tiny` on the CPU gets requests made up from its own OpenAPI description (schemathesis). It also
gets bodies that are slow to check, random bytes, clients that stall, and good requests among them. In another process,
changed archives of capture caches, safetensors files, configs and tokenizers are read. Meanwhile `/health` is asked
every 20 ms; each answer must come within `--max-stall-ms`. No answer may be 5xx, and only the project's own errors may
be raised. The server's resident memory may grow by `--max-growth-mib` from the second fifth of the time to the last.
At the end the server must answer as before. The exit code is 1 where one of these does not hold.
"""

import json
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import httpx
import psutil

from bench.record import Tool, write_report
from bench.server_overhead import server
from bullet_graph.captures.archive import export_entry, import_archive
from bullet_graph.captures.manifest import Manifest, entry_id, list_files
from bullet_graph.captures.store import FILES_NAME, CaptureStore
from bullet_graph.cli.result_file import check_result_file
from bullet_graph.errors import BulletGraphError
from bullet_graph.models.presets import PRESETS, load_model_config
from bullet_graph.models.tokenizer import Tokenizer

SERVER = ("--model", "tiny", "--device", "cpu", "--max-num-seqs", "8", "--max-model-len", "256")
LIMITS = ("--max-queue-len", "64", "--request-timeout", "20", "--no-warmup")
GOOD = {"prompt": [5, 17, 300, 8], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
PATHS = ("/v1/completions", "/v1/chat/completions")
HEALTH_EVERY_S = 0.02


@dataclass
class Findings:
    """What the attacks have seen; each thread adds to counters of its own name."""

    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def answered(self, attack: str, status: int | str) -> None:
        self.statuses[f"{attack} {status}"] += 1
        if isinstance(status, int) and status >= 500:
            self.problems.append(f"{attack} was answered with {status}")


@dataclass
class Watched:
    """What was seen of the server from outside, in order of time."""

    health_ms: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


Attack = Callable[[str, random.Random, Findings], None]


def heavy_body(rng: random.Random) -> tuple[str, bytes]:
    """A body that is costly to refuse: many wrong items, unknown fields, long numbers, deep nesting, long texts."""
    many = rng.choice([100, 3000, 20_000])
    bodies: list[Any] = [
        {"prompt": [-1] * many},
        {"prompt": [0.5] * many},
        {"prompt": [["x"]] * many},
        {f"field{index}": 1 for index in range(many)},
        {"prompt": "x", "stop": ["a" * 9] * many},
        {"prompt": "x" * rng.choice([1000, 10**6])},
        {"prompt": "x", "stop": ["ab" * 400 + "b"] * 4, "max_tokens": 50},
        {"messages": [{"role": "nobody", "content": "x"}] * many},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * many}]},
        {"prompt": "x", "n": 128, "max_tokens": 2},
    ]
    texts = [
        b'{"prompt": [' + b",".join([b"9" * 4000] * 50) + b"]}",
        # As large as a body may be.
        b'{"prompt": [' + b"1," * 500_000 + b"1]}",
        b'{"prompt": [' + b"[1]," * 250_000 + b"[1]]}",
        b'{"a":' * many,
        b"[" * many,
        b'{"prompt": "\\ud800' * 3,
    ]
    body = rng.choice([*map(json.dumps, bodies), *texts])
    return rng.choice(PATHS), body if isinstance(body, bytes) else body.encode()


def attack_bodies(url: str, rng: random.Random, findings: Findings) -> None:
    path, body = heavy_body(rng)
    headers = {"Content-Type": "application/json"}
    findings.answered("body", httpx.post(url + path, content=body, headers=headers, timeout=60).status_code)


def attack_socket(url: str, rng: random.Random, findings: Findings) -> None:
    """Random or changed bytes; whatever comes back is no 5xx."""
    good = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    good += b"Content-Length: 15\r\n\r\n"
    kinds = (
        lambda: rng.randbytes(rng.randrange(1, 4000)),
        lambda: changed(good + b'{"prompt": "x"}', rng),
        lambda: b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * rng.choice([100, 200_000]) + b"\r\n\r\n",
        lambda: b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * rng.choice([10, 20_000]) + b"\r\n",
        lambda: good,
    )
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=1) as peer, suppress(OSError):
        peer.sendall(rng.choice(kinds)())
        if rng.random() < 0.5:
            peer.shutdown(socket.SHUT_WR)
        answer = peer.recv(4096)
        findings.answered("socket", int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0)


def attack_reader(url: str, rng: random.Random, findings: Findings) -> None:
    """Ask for streams and do not read them, or go away in the middle."""
    body = json.dumps(GOOD | {"stream": True, "max_tokens": 200, "n": rng.choice([1, 8])}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=1) as peer, suppress(OSError):
        peer.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(rng.choice([0.0, 0.2, 1.0]))
        findings.answered("reader", "left")


def attack_good(url: str, rng: random.Random, findings: Findings) -> None:
    del rng
    answer = httpx.post(f"{url}/v1/completions", json=GOOD, timeout=60)
    findings.answered("good", answer.status_code)


def attack_schema(url: str, rng: random.Random, findings: Findings) -> None:
    """Requests of an operation of the server's own description, good or bad."""
    # They belong to the tools of development.
    import schemathesis  # noqa: PLC0415
    from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: PLC0415
    from hypothesis.errors import Unsatisfiable  # noqa: PLC0415

    operations = list(schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations())

    @seed(rng.getrandbits(32))
    @settings(
        # Without the search for a simpler example: it would ask the same for minutes.
        phases=[Phase.generate],
        max_examples=10,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=rng.choice(operations).ok().as_strategy(generation_mode=rng.choice(list(schemathesis.GenerationMode))))
    def ask(case: schemathesis.Case) -> None:
        findings.answered("schema", case.call(timeout=60).status_code)

    with suppress(Unsatisfiable):
        ask()


ATTACKS: Mapping[str, Attack] = {
    "bodies": attack_bodies,
    "socket": attack_socket,
    "reader": attack_reader,
    "good": attack_good,
    "schema": attack_schema,
}


def attack_until(name: str, url: str, end_s: float, seed: int, findings: Findings) -> None:
    rng = random.Random(f"{name} {seed}")
    while time.monotonic() < end_s:
        try:
            ATTACKS[name](url, rng, findings)
        except (httpx.TransportError, OSError) as error:
            # A connection that the server cuts is an answer, too.
            findings.answered(name, type(error).__name__)
        except Exception as error:
            findings.problems.append(f"{name}: {type(error).__name__}: {error!s:.300}")


def attack_all(url: str, seconds: float, seed: int, results: "multiprocessing.Queue[Findings]") -> None:
    """Every attack at once, until the time is over."""
    os.nice(10)  # real attackers do not share the server's cores
    findings, end_s = Findings(), time.monotonic() + seconds
    threads = [threading.Thread(target=attack_until, args=(name, url, end_s, seed, findings)) for name in ATTACKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(findings)


def watch(url: str, pid: int, seconds: float, results: "multiprocessing.Queue[Watched]") -> None:
    """Ask for the server's health and memory. It is a process of its own, so that attacks do not delay its clock."""
    process, seen = psutil.Process(pid), Watched()
    end_s = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() < end_s:
            start_s = time.monotonic()
            status = client.get("/health").status_code
            seen.health_ms.append(1e3 * (time.monotonic() - start_s))
            if status != 200:
                seen.problems.append(f"/health answered {status}")
            seen.rss_bytes.append(process.memory_info().rss)
            time.sleep(HEALTH_EVERY_S)
    results.put(seen)


# ---- files ----


def changed(data: bytes, rng: random.Random) -> bytes:
    """The bytes with some replaced, removed, doubled or put in."""
    result = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(result) + 1)
        length = rng.choice([1, 1, 4, 64])
        kind = rng.randrange(4)
        if kind == 0:
            result[at : at + length] = rng.randbytes(len(result[at : at + length]))
        elif kind == 1:
            del result[at : at + length]
        elif kind == 2:
            result[at:at] = result[at : at + length] * rng.choice([1, 100])
        else:
            result[at:at] = rng.choice([b"\0", b"9" * length, b'"', b"[" * length, b"../", b"{}", b"-", b"e9"])
    return bytes(result)


def sample_model(folder: Path) -> None:
    """A small model folder: config, tokenizer and weights."""
    import tokenizers  # noqa: PLC0415 - only this process needs torch and what comes with it

    from bench.peers.model_folder import write_model_folder, write_weights  # noqa: PLC0415

    sizes = dict[str, Any](hidden_size=8, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=4)
    config = replace(PRESETS["tiny"], **sizes, vocab_size=32, max_position_embeddings=64, eos_token_ids=(1,))
    write_weights(write_model_folder(folder, config), config, seed=0, device="cpu")
    vocabulary = {chr(97 + index): index for index in range(26)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "eos_token": "a"})
    )


def sample_archive(folder: Path) -> Path:
    store = CaptureStore(folder / "exported")
    fingerprint, plan = {"device": "cpu"}, {"model": "tiny"}
    with store.building(entry_id(fingerprint, plan), tell=click.echo) as staged:
        (staged / FILES_NAME / "layers").mkdir()
        (staged / FILES_NAME / "layers" / "a.pt2").write_bytes(b"package" * 1000)
        (staged / FILES_NAME / "perf_table.json").write_bytes(b"{}")
        files = list_files(staged / FILES_NAME)
        manifest = Manifest(
            fingerprint=fingerprint,
            plan=plan,
            files=files,
            self_check=None,
            created_utc="2026-11-22T12:00:00+00:00",
            build_seconds=1.0,
            provenance={},
        )
        entry = store.place(manifest, staged)
    export_entry(entry, folder / "entry.tgz")
    return folder / "entry.tgz"


def read_model(folder: Path) -> None:
    from bullet_graph.models.checkpoint import open_checkpoint  # noqa: PLC0415

    config = load_model_config(folder)
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is not None:
        tokenizer.encode("abc")
        tokenizer.apply_chat_template([{"role": "user", "content": "abc"}])
    with open_checkpoint(folder, config):
        pass


def fuzz_files(seconds: float, seed: int, results: "multiprocessing.Queue[tuple[dict[str, int], list[str]]]") -> None:
    """Read changed files until the time is over."""
    os.nice(10)  # as the attackers
    rng, counts, problems = random.Random(seed), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        root, model = Path(name), Path(name) / "model"
        model.mkdir()
        sample_model(model)
        read_model(model)
        end_s = time.monotonic() + seconds
        archive = sample_archive(root)
        whole = {path.name: path.read_bytes() for path in (*model.iterdir(), archive)}
        store = CaptureStore(root / "imported")
        outside = {path for path in root.rglob("*") if store.root not in path.parents}
        while time.monotonic() < end_s:
            target = rng.choice(sorted(whole))
            path = archive if target == archive.name else model / target
            path.write_bytes(changed(whole[target], rng))
            try:
                if path == archive:
                    import_archive(store, archive, tell=click.echo)
                else:
                    read_model(model)
                counts[f"{target} read"] += 1
            except BulletGraphError:
                counts[f"{target} refused"] += 1
            except BaseException as error:
                problems.append(f"{target}: {type(error).__name__}: {error!s:.300}")
            path.write_bytes(whole[target])
        left = {path for path in root.rglob("*") if store.root not in path.parents} - outside - {store.root}
        problems += [f"written outside of the store: {path.relative_to(root)}" for path in sorted(left)]
    results.put((dict(counts), problems))


# ---- the run ----


def fuzz(seconds: float, seed: int, max_stall_ms: float, max_growth_mib: float) -> dict[str, Any]:
    """Run all attacks at once; returns the result's fields, with what does not hold in ``problems``."""
    context = multiprocessing.get_context("spawn")
    files_queue, watch_queue, attack_queue = (context.Queue() for _ in range(3))
    files = context.Process(target=fuzz_files, args=(seconds, seed, files_queue))
    with server(*SERVER, *LIMITS) as url:
        before = httpx.post(f"{url}/v1/completions", json=GOOD, timeout=60).json()["choices"]
        process = next(child for child in psutil.Process().children() if "serve" in child.cmdline())
        watcher = context.Process(target=watch, args=(url, process.pid, seconds, watch_queue))
        workers = (watcher, files, context.Process(target=attack_all, args=(url, seconds, seed, attack_queue)))
        for worker in workers:
            worker.start()
        findings = attack_queue.get(timeout=seconds + 120)
        counts, problems = files_queue.get(timeout=120)
        seen = watch_queue.get(timeout=120)
        for worker in workers:
            worker.join()
        after = httpx.post(f"{url}/v1/completions", json=GOOD, timeout=60).json()["choices"]
    findings.problems += problems + seen.problems
    if before != after:
        findings.problems.append(f"the server answered {before} before and {after} after")
    ordered = sorted(seen.health_ms)
    if (stall_ms := ordered[-1]) > max_stall_ms:
        findings.problems.append(f"/health took {stall_ms:.0f} ms; at most {max_stall_ms:g} ms are allowed")
    # Medians, since large bodies come and go.
    part = max(1, len(seen.rss_bytes) // 5)
    parts = seen.rss_bytes[part : 2 * part] or seen.rss_bytes, seen.rss_bytes[-part:]
    settled, last = map(statistics.median, parts)
    growth_mib = (last - settled) / 2**20
    if growth_mib > max_growth_mib:
        findings.problems.append(f"resident memory grew by {growth_mib:.0f} MiB of {max_growth_mib:g} allowed")
    return {
        "seconds": seconds,
        "seed": seed,
        "health_asked": len(ordered),
        "max_health_ms": stall_ms,
        "p99_health_ms": ordered[int(0.99 * (len(ordered) - 1))],
        "rss_start_bytes": settled,
        "rss_end_bytes": last,
        "rss_max_bytes": max(seen.rss_bytes),
        "answers": dict(sorted(findings.statuses.items())),
        "files": dict(sorted(counts.items())),
        "problems": findings.problems,
    }


@click.command(cls=Tool)
@click.option("--seconds", default=600.0, help="How long it attacks.")
@click.option("--seed", default=0, help="Of the input.")
@click.option("--max-stall-ms", default=200.0, help="Longest answer of `/health`.")
@click.option("--max-growth-mib", default=64.0, help="Most growth of the server's memory.")
@click.option("--output-json", type=click.Path(path_type=Path), help="Where the result goes.")
def main(seconds: float, seed: int, max_stall_ms: float, max_growth_mib: float, output_json: Path | None) -> None:
    check_result_file(output_json, overwrite=True)
    result = fuzz(seconds, seed, max_stall_ms, max_growth_mib)
    for name, value in result.items():
        click.echo(f"{name}: {value}")
    if output_json is not None:
        write_report(output_json, result, device="cpu")
    raise SystemExit(int(bool(result["problems"])))


if __name__ == "__main__":
    main()
