"""A long steady load with clients that leave: do memory and speed stay as they were?

    python -m bench.soak --minutes 30 --output-json bench/results/cpu/soak.json

Users ask again once the last answer has ended; prompts hold what a user has said so far. A third of the answers are not
streamed, a sixth are left in the middle; targets, salts and lengths differ. Each sixth of the time has the same lengths
again: of others, a GPU makes up to 7 % more or fewer tokens per second. Memory, a GPU's too, and speed of the second
sixth are compared with those of the last. The exit code is 1 where they changed by more than the limits, where a
request failed, or where something runs, waits or holds KV blocks afterwards.
"""

import json
import math
import random
import shlex
import statistics
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import httpx
import psutil
import torch

from bench.record import Tool, write_report
from bench.server_overhead import server
from bullet_graph.cli.options import parsed_by
from bullet_graph.cli.result_file import check_result_file
from bullet_graph.errors import ConfigError
from bullet_graph.perf.energy import open_probe

SERVER_OPTIONS = "--model tiny --device cpu --kv-cache-bytes 8MiB --max-model-len 1024"
TARGETS: tuple[dict[str, float] | None, ...] = (None, {"tpot_ms": 50.0}, {"ttft_ms": 500.0, "tpot_ms": 15.0})
TURNS, TOKEN_IDS, SAMPLES, PARTS = 8, range(3, 500), 120, 6
MEMORY = {"rss_bytes": "resident memory", "device_bytes": "the GPU's memory"}


def ask(client: httpx.Client, body: dict[str, Any], rng: random.Random) -> str:
    """Ask for one answer; returns how it ended."""
    stream, leaves = rng.random() < 2 / 3, rng.random() < 1 / 4
    with client.stream("POST", "/v1/completions", json=body | {"stream": stream, "ignore_eos": True}) as answer:
        for index, line in enumerate(answer.iter_lines()):
            if answer.status_code != httpx.codes.OK or line.startswith('data: {"error"'):
                return f"status {answer.status_code}: {line[:200]}"
            if stream and leaves and index > 4:
                return "left"
    return "streamed" if stream else "whole"


def converse(url: str, start_s: float, part_s: float, longest: int, seed: int) -> "Counter[str]":
    """One user's requests, with prompts up to ``longest``, in each part of the time; returns how they ended."""
    tokens, ends = random.Random(seed), Counter[str]()
    with httpx.Client(base_url=url, timeout=120) as client:
        for part in range(PARTS):
            rng, prompt, salt = random.Random(seed), list[int](), None
            while time.monotonic() < start_s + (part + 1) * part_s:
                if rng.random() < 1 / TURNS:
                    prompt, salt = [], rng.choice([None, "tenant"])
                prompt += tokens.choices(TOKEN_IDS, k=rng.randint(longest // 100, longest // 33))
                body = {"prompt": prompt[-longest:], "max_tokens": rng.randint(longest // 200, longest // 16)}
                body |= {"slo": rng.choice(TARGETS), "cache_salt": salt, "temperature": rng.choice([0, 1])}
                ends[ask(client, body, rng)] += 1
    return ends


def soak(options: list[str], minutes: float, users: int, longest: int) -> dict[str, Any]:
    """Serve the users; returns what was seen, with samples over the time."""
    device = "cpu" if {"cpu", "--device=cpu"} & {*options} or not torch.cuda.is_available() else "cuda"
    samples, probe = list[dict[str, Any]](), open_probe(torch.device(device))
    # Processes: a single one reads about 5,000 streamed tokens/s. Forked ones share the libraries' memory.
    pool = ProcessPoolExecutor(users, get_context("fork"))
    with server(*options) as url, httpx.Client(base_url=url, timeout=60) as client, pool:
        process = next(child for child in psutil.Process().children() if "serve" in child.cmdline())
        start_s, seconds = time.monotonic(), 60 * minutes
        tasks = [pool.submit(converse, url, start_s, seconds / PARTS, longest, seed) for seed in range(users)]
        while time.monotonic() < start_s + seconds:
            family = (process, *process.children(recursive=True))
            live = client.get("/live").json()
            names = ("generation_tokens", "kv_cache_usage", "running", "prefix_cache_queries", "prefix_cache_hits")
            sample = {"second": time.monotonic() - start_s, "rss_bytes": sum(p.memory_info().rss for p in family)}
            sample |= {name: live[name] for name in names} | (probe.sample() if probe else {})
            if device == "cuda":
                free, total = torch.cuda.mem_get_info()
                sample["device_bytes"] = total - free
            samples.append(sample)
            time.sleep(seconds / SAMPLES)
        ends = sum((task.result() for task in tasks), Counter[str]())
        time.sleep(3.0)  # what was left in the middle may still end
        live = client.get("/live").json()
    after = {name: live[name] for name in ("running", "waiting", "kv_cache_usage")}
    return {"device": device, "ends": dict(ends), "after": after, "samples": samples}


def judge(seen: dict[str, Any], max_growth_mib: float, max_slowdown_percent: float) -> dict[str, Any]:
    """The figures of the second sixth of the time and the last, and what does not hold in ``problems``."""
    size = len(seen["samples"]) // PARTS
    parts = seen["samples"][size : 2 * size], seen["samples"][-size:]
    kinds = [name for name in MEMORY if name in parts[0][0]]
    memory = {name: [statistics.median(sample[name] for sample in part) for part in parts] for name in kinds}
    tokens, seconds = ([part[-1][name] - part[0][name] for part in parts] for name in ("generation_tokens", "second"))
    rates = [count / over for count, over in zip(tokens, seconds, strict=True)]
    slowdown = 100 * (1 - rates[1] / rates[0])
    problems = [f"{count} × {end}" for end, count in seen["ends"].items() if end not in ("streamed", "whole", "left")]
    problems += [f"afterwards {name} is {value}" for name, value in seen["after"].items() if value]
    for name, (before, after) in memory.items():
        if (growth := (after - before) / 2**20) > max_growth_mib:
            problems.append(f"{MEMORY[name]} grew by {growth:.1f} MiB of {max_growth_mib:g} allowed")
    if slowdown > max_slowdown_percent:
        problems.append(f"{slowdown:.1f} % fewer tokens/s; at most {max_slowdown_percent:g} % are allowed")
    return {**memory, "tokens_per_s": rates, "slowdown_percent": slowdown, "problems": problems}


@click.command(cls=Tool)
@click.option(
    "--server-options", "options", default=SERVER_OPTIONS, callback=parsed_by(shlex.split), help="Of `serve`."
)
@click.option("--users", default=8, help="Requests under way at a time.")
@click.option("--minutes", default=30.0, help="How long they ask.")
@click.option(
    "--prompt-tokens", "longest", type=click.IntRange(200), default=800, help="The most; an answer has up to a 16th."
)
@click.option("--max-growth-mib", default=16.0, help="Most growth of the server's memory.")
@click.option("--max-slowdown-percent", default=2.0, help="Most loss of tokens per second.")
@click.option("--output-json", type=click.Path(path_type=Path), help="Where the result goes.")
def main(
    output_json: Path | None, options: list[str], minutes: float, users: int, longest: int, **limits: float
) -> None:
    if not 0.05 <= minutes < math.inf:
        raise ConfigError(f"--minutes must be a number of at least 0.05, got {minutes}")
    check_result_file(output_json, overwrite=True)
    seen = soak(options, minutes, users, longest)
    judged = judge(seen, **limits)
    click.echo(json.dumps({**judged, "ends": seen["ends"], "after": seen["after"]}, indent=1))
    if output_json is not None:
        write_report(output_json, judged | seen, device=seen["device"])
    raise SystemExit(int(bool(judged["problems"])))


if __name__ == "__main__":
    main()
