"""``bullet-graph bench online``, ``throughput`` and ``serve``: replays by an engine in this process or a server."""

import asyncio
import dataclasses
import gc
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from bullet_graph.cli import replay_options as shared
from bullet_graph.cli.engine_run import config_for, describe_run, load_requests, open_engine, watch_device
from bullet_graph.cli.options import engine_options, result_options
from bullet_graph.cli.result_file import Output, require_extra
from bullet_graph.cli.tables import COUNTERS, ReplayRun, counters, emit_replays, print_replays
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.engine import Engine
from bullet_graph.engine.replay import Replay, TimedRequest, event_loop_factory, replay, replay_async, timed_requests
from bullet_graph.errors import ConfigError, WorkloadError
from bullet_graph.models.presets import resolve_model
from bullet_graph.models.progress import progress_bar
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.perf.metrics import ReplayResult
from bullet_graph.perf.trace import WARMUP_PREFIX
from bullet_graph.runtime.resolve import resolve
from bullet_graph.slo import Slo
from bullet_graph.workloads import Arrivals, Workload, WorkloadRequest, load_workload

_WARMUP_OUTPUT_TOKENS = 64
_WARMUP_REQUESTS = 4
_WARMUP_GAP_S = 0.02
"""Between warm-up requests, so that some arrive while others decode: this runs other kernels than all at once."""

_ENGINE_FIELDS = (
    "policy", "policy_shares", *COUNTERS, "kv_blocks_peak", "kv_blocks_total", "device",
    "energy_joules", "joules_per_output_token", "joules_per_token", "load_format", "dtype", "engine", "provenance",
    "partitions", "start", "compiles", "cache_use",
)  # fmt: skip
"""Fields of ``bench online`` that are null against a server, unless it reports them."""


# ---- clients ----

Served = tuple[Replay, float | None, dict[str, Any]]
"""A replay, the energy that it took in joules (None: not measured), and fields that only the system knows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Client:
    """Sends requests to one system; ``backend`` and ``model_id`` are fields of results.

    ``replay`` serves requests, by the options of :func:`bullet_graph.engine.replay.replay`.
    """

    backend: str
    model_id: str
    vocab_size: int
    replay: Callable[..., Served]


def engine_client(engine: Engine, policy: Policy, slo: Slo) -> Client:
    """The client of an engine in this process with nothing under way, under one policy and with the planner's targets.

    The engine's loop is made anew for each replay, so that its counters and its prefix cache are the replay's alone.
    The planner keeps what it has learned of its predictions' errors.
    """

    def serve(requests: Sequence[TimedRequest], *, is_warmup: bool = False, **options: Any) -> Served:
        engine.set_policy(policy, slo)
        with watch_device(engine) as monitor:
            replayed = replay(engine, requests, id_prefix=WARMUP_PREFIX if is_warmup else "", **options)
        own = {"policy": str(policy), "device": dataclasses.asdict(monitor.report)}
        return replayed, monitor.report.energy_joules, counters(engine.stats()) | own

    return Client("bullet_graph", engine.config.model, engine.model_config.vocab_size, serve)


def server_client(server: Any, runner: asyncio.Runner, vocab_size: int) -> Client:
    """The client of a server with OpenAI's interface; a ``bullet-graph serve`` also reports its own counters."""

    async def serve(requests: Sequence[TimedRequest], **options: Any) -> Served:
        before: dict[str, Any] = await server.live()
        collect_garbage()
        replayed = await replay_async(server.generate, requests, **options)
        after: dict[str, Any] = await server.live()
        if not (before and after):
            return replayed, None, {}
        earlier = before["policy_seconds"]
        seconds = {policy: s - earlier.get(policy, 0.0) for policy, s in after["policy_seconds"].items()}
        joules = None if after["energy_joules"] is None else after["energy_joules"] - before["energy_joules"]
        own = {
            "policy_shares": {policy: s / sum(seconds.values()) for policy, s in seconds.items() if s},
            **{name: after[name] - before[name] for name in COUNTERS},
        }
        return replayed, joules, own

    def serve_all(requests: Sequence[TimedRequest], *, is_warmup: bool = False, **options: Any) -> Served:
        del is_warmup
        return runner.run(serve(requests, **options))

    return Client("openai", str(server.settings["model"]), vocab_size, serve_all)


def collect_garbage() -> None:
    """Collect now, and keep the collector off all objects so far: its pauses would make tokens look late."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _energy_fields(joules: float | None, result: ReplayResult) -> dict[str, float | None]:
    """Energy of the whole GPU board, in total and per token; None without a GPU or NVML."""
    tokens = {
        "joules_per_output_token": result.total_output_tokens,
        "joules_per_token": result.total_input_tokens + result.total_output_tokens,
    }
    per_token = {name: None if joules is None else joules / count for name, count in tokens.items()}
    return {"energy_joules": joules, **per_token}


# ---- one replay ----


def measure(
    client: Client,
    workload: Workload,
    arrivals: Arrivals,
    *,
    slo: Slo,
    prompt_seed: int | None = None,
    label: str | None = None,
) -> ReplayRun:
    """Replay a workload, each request to its recorded length; a ``label`` gets a progress bar on a terminal.

    Random prompts have the arrivals' seed unless there is a ``prompt_seed``. Raises ConfigError for arrivals out of
    range or a policy that the engine cannot serve, WorkloadError if no request completes, EngineDeadError if the system
    fails.
    """
    requests = timed_requests(
        workload,
        arrivals.times(workload),
        vocab_size=client.vocab_size,
        slo=slo,
        seed=arrivals.seed if prompt_seed is None else prompt_seed,
    )
    started = datetime.now()
    show = label is not None and sys.stderr.isatty()
    with progress_bar(show, total=len(requests), unit="req", desc=label, leave=False) as advance:
        replayed, joules, own = client.replay(
            requests, max_concurrency=arrivals.max_concurrency, on_done=lambda _: advance(1)
        )
    _require_some_served(replayed, workload)
    result = replayed.result(arrivals, started=started, backend=client.backend, model_id=client.model_id)
    shareable = workload.without(set(replayed.unsent)).shareable_prompt_tokens
    fields = {"slo": str(slo), "shareable_prompt_tokens": shareable}
    return ReplayRun(result, {**fields, **own, **_energy_fields(joules, result)})


def warm_up(client: Client, workload: Workload, num_warmups: int, *, slo: Slo, seed: int) -> None:
    """Serve a few short requests, so that the next replay, of this workload and seed, compiles no kernels.

    They have the prompt lengths of its first requests (repeated if it has fewer), but other random prompts, which
    share nothing.
    """
    if not num_warmups:
        return
    first = itertools.islice(itertools.cycle(workload.requests), num_warmups)
    short = tuple(WorkloadRequest(r.prompt_tokens, min(r.output_tokens, _WARMUP_OUTPUT_TOKENS), None) for r in first)
    requests = timed_requests(
        Workload(workload.name, short),
        [_WARMUP_GAP_S * index for index in range(num_warmups)],
        vocab_size=client.vocab_size,
        slo=slo,
        seed=seed + 1,
    )
    warmed, *_ = client.replay(requests, is_warmup=True)
    if client.backend == "openai":  # one that refuses everything is found out early
        _require_some_served(warmed, workload)


def _require_some_served(replayed: Replay, workload: Workload) -> None:
    errors = [request.error for request in replayed.served if request.error is not None]
    if len(errors) == len(replayed.served):
        raise WorkloadError(
            f"none of the {len(errors)} requests of {workload.name} could be served; the first: {errors[0]}"
        )


# ---- commands ----


def _serve_here(
    policies: Sequence[Policy],
    output: Output,
    *,
    config: EngineConfig,
    slo: Slo,
    trace: str,
    num_prompts: int | None,
    arrivals: Arrivals,
    num_warmups: int,
    trace_decisions: Path | None,
) -> tuple[str, dict[str, ReplayRun], dict[str, Any]]:
    """Serve a trace under each policy with an engine in this process: a title, the runs, and the fields they share."""
    # Errors in the settings, the trace and its arrivals show before the weights are loaded.
    config = config_for(config, policies, slo)
    runtime = resolve(config)
    workload = load_requests(runtime, trace, num_prompts, seed=config.seed)
    arrivals.times(workload)
    workload.require_fit(runtime.max_model_len)
    runs: dict[str, ReplayRun] = {}
    with open_engine(config, quiet=output.as_json, trace_decisions=trace_decisions) as engine:
        for policy in policies:
            # A policy that this engine cannot serve is refused before the first run.
            engine.set_policy(policy, slo)
        for policy in policies:
            client = engine_client(engine, policy, slo)
            warm_up(client, workload, num_warmups, slo=slo, seed=arrivals.seed)
            label = None if output.as_json else str(policy)
            runs[str(policy)] = measure(client, workload, arrivals, slo=slo, label=label)
        common = describe_run(config, runtime, engine)
        common |= {"trace": workload.name, "partitions": engine.partition_backend}
    del common["policy"]  # each run has its own
    device = common["provenance"]["device_name"]
    return f"{config.model}, {common['dtype']}, on {device}: {workload.name}, {slo}", runs, common


@click.command(cls=shared.GoodputCommand)
@shared.replay_options(default_policy="mixed")
@shared.num_warmups_option(8)
@engine_options(max_num_seqs=1024, without=("policy", "slo"))
@result_options
def online(policies: tuple[Policy, ...], save_detailed: bool, output: Output, **settings: Any) -> None:
    """Serve a trace's requests as they arrive and measure latencies and goodput.

    The requests go to an engine in this process, without HTTP, and sample greedily until their recorded output
    lengths. Latency targets are the planner's as well. With one policy the JSON is flat, as that of vLLM's serving
    benchmark. With several, served in turn by one engine, the field "results" holds one such object for each. A request
    that is longer than the model's limit fails alone and is counted.

    \b
    Examples:
      bullet-graph bench online --model tiny --trace synthetic:conv --num-prompts 20 --request-rate 20
      bullet-graph bench online --model llama-3.1-8b --trace azure:conv --num-prompts 600 \\
          --request-rate 20 --goodput ttft:500 tpot:15 --policy mixed:2048 --policy auto --output-json conv.json
      bullet-graph bench online --model llama-3.1-8b --trace azure:code --request-rate trace \\
          --time-scale 0.5 --max-concurrency 128 --policy auto --trace-decisions decisions.jsonl
    """
    if settings["trace_decisions"] is not None and len(policies) > 1:
        raise ConfigError("--trace-decisions writes one run: give one --policy")
    title, runs, common = _serve_here(policies, output, **settings)
    emit_replays(title, runs, common, output, detailed=save_detailed)


@click.command()
@engine_options(max_num_seqs=1024)
@shared.trace_option
@shared.num_prompts_option
@click.option(
    "--warmup/--no-warmup", default=True, help="Serve a few small requests first, so the measurement compiles nothing."
)
@result_options
def throughput(config: EngineConfig, warmup: bool, output: Output, **settings: Any) -> None:
    """Serve a whole trace at once and measure tokens per second.

    Every request is there from the start and samples greedily until its recorded output length. A request that is
    longer than the model's limit fails alone and is counted.

    \b
    Examples:
      bullet-graph bench throughput --model tiny --trace synthetic:conv --num-prompts 20
      bullet-graph bench throughput --model llama-3.1-8b --trace azure:code --num-prompts 400 \\
          --policy mixed:4096 --output-json code.json
      bullet-graph bench throughput --model llama-3.1-8b --trace azure:conv --num-prompts 600 \\
          --policy auto --trace-decisions decisions.jsonl
    """
    settings |= {"config": config, "slo": config.slo, "num_warmups": _WARMUP_REQUESTS if warmup else 0}
    at_once = Arrivals(request_rate=math.inf, seed=config.seed)
    title, runs, common = _serve_here((config.policy,), output, arrivals=at_once, **settings)
    (run,) = runs.values()
    output.emit({**throughput_fields(run.result), **common, **run.usage}, lambda: print_replays(title, runs))


def throughput_fields(result: ReplayResult) -> dict[str, Any]:
    """The figures with the names of vLLM's throughput benchmark.

    Counts, totals and rates are of completed requests; ``tokens_per_second`` counts prompt and output tokens.
    """
    summaries = {"ttft_ms": result.ttft, "tpot_ms": result.tpot, "itl_ms": result.itl, "e2e_ms": result.e2el}
    return {
        "elapsed_time": result.duration,
        "num_requests": result.completed,
        "total_num_tokens": result.total_input_tokens + result.total_output_tokens,
        "requests_per_second": result.request_throughput,
        "tokens_per_second": result.total_token_throughput,
        "total_input_tokens": result.total_input_tokens,
        "total_output_tokens": result.total_output_tokens,
        "output_tokens_per_second": result.output_throughput,
        "num_failed": result.failed,
        "failures": [{"index": index, "reason": reason} for index, reason in enumerate(result.errors) if reason],
        **{name: None if s is None else dataclasses.asdict(s) for name, s in summaries.items()},
    }


@click.command(cls=shared.GoodputCommand)
@shared.replay_options(default_policy=None)
@click.option("--base-url", required=True, metavar="URL", help="Of the server, with or without /v1.")
@click.option(
    "--model",
    help="The served model's folder or preset: for the vocabulary of random prompts, where the server does not report "
    "it, and the tokenizer of a trace with texts.",
)
@click.option("--api-key", help="The key that the server requires.")
@shared.num_warmups_option(8)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of arrivals, prompts and synthetic workloads.")
@result_options
def serve(
    base_url: str,
    model: str | None,
    api_key: str | None,
    trace: str,
    num_prompts: int | None,
    arrivals: Arrivals,
    slo: Slo,
    num_warmups: int,
    save_detailed: bool,
    seed: int,
    output: Output,
) -> None:
    """Send a trace's requests to an OpenAI-compatible server as they arrive and measure latencies and goodput.

    Workloads, arrivals and result fields are those of `bench online`; a field that only an engine in the same process
    knows is null. Times are those that the client sees. Prompts are token ids, and outputs have their recorded lengths:
    the server must know `ignore_eos`, as vLLM and SGLang do. A `bullet-graph serve` receives the latency targets of
    --goodput with each request. Random prompts are new ones in each run.

    \b
    Examples:
      bullet-graph bench serve --base-url http://127.0.0.1:8000 --trace azure:conv --num-prompts 600 \\
          --request-rate 20 --goodput ttft:500 tpot:15 --output-json server.json
      bullet-graph bench serve --base-url http://10.0.0.7:8000/v1 --api-key KEY --model ./Qwen3-8B \\
          --trace conversations.json --request-rate 8 --max-concurrency 64
    """
    require_extra("bench serve", "aiohttp")
    # aiohttp is an extra.
    from bullet_graph.serve.client import OpenAiServer  # noqa: PLC0415

    url = _api_url(base_url)
    found = None if model is None else resolve_model(model)
    tokenizer = None if found is None or found.folder is None else Tokenizer.from_folder(found.folder)
    tokenize = None if tokenizer is None else tokenizer.encode
    workload = load_workload(trace, num_requests=num_prompts, seed=seed, tokenize=tokenize)
    arrivals.times(workload)
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        server = runner.run(OpenAiServer.connect(url, api_key=api_key))
        try:
            vocab_size = server.settings["vocab_size"] if found is None else found.config.vocab_size
            if not isinstance(vocab_size, int):
                raise ConfigError(
                    f"random prompts need the model's vocabulary, which {base_url} does not report: give --model, the "
                    "served model's folder or preset"
                )
            client = server_client(server, runner, vocab_size)
            # New ones each time: the server may hold those of an earlier command in its prefix cache.
            prompt_seed, label = time.time_ns() % 2**31, None if output.as_json else "server"
            warm_up(client, workload, num_warmups, slo=slo, seed=prompt_seed)
            run = measure(client, workload, arrivals, slo=slo, prompt_seed=prompt_seed, label=label)
        finally:
            runner.run(server.close())
    told = run.fields()
    common: dict[str, Any] = {name: None for name in _ENGINE_FIELDS if name not in told} | {"prompt_seed": prompt_seed}
    common |= {"model": client.model_id, "trace": workload.name, "seed": seed, "server": dict(server.settings)}
    title = f"{client.model_id} at {url}: {workload.name}, {slo}"
    emit_replays(title, {"server": run}, common, output, detailed=save_detailed)


def _api_url(base_url: str) -> str:
    """The URL up to ``/v1``."""
    match = re.fullmatch(r"(?i)https?://[^/?#]+(?P<path>[^?#]*).*", base_url)
    if match is None:
        raise ConfigError(f"--base-url must be such as http://127.0.0.1:8000, got {base_url!r}")
    url = base_url.rstrip("/")
    return url if match["path"].rstrip("/") else f"{url}/v1"
