"""Runs ``bullet-graph bench serve``: a workload's requests come to a server at their times."""

import asyncio
import dataclasses
import gc
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from bullet_graph.cli.bench.online import WARMUP_GAP_S, WARMUP_OUTPUT_TOKENS
from bullet_graph.cli.serving.table import figure, print_serving
from bullet_graph.engine.replay import Replay, event_loop_factory, replay_async, timed_requests
from bullet_graph.errors import ConfigError, WorkloadError
from bullet_graph.models.presets import resolve_model
from bullet_graph.models.progress import progress_bar
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.perf.replay_metrics import ReplayResult, summarize_replay
from bullet_graph.serve.client import OpenAiServer
from bullet_graph.slo import Slo
from bullet_graph.workloads import Arrivals, Workload, load_workload

_ENGINE_ONLY = (
    "policy", "policy_shares", "num_steps", "num_preemptions", "kv_blocks_peak", "kv_blocks_total", "device",
    "joules_per_output_token", "joules_per_token", "load_format", "dtype", "engine", "provenance", "partitions",
)  # fmt: skip
"""Fields of ``bench online`` that a client does not know, unless the server tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRun:
    """What one replay against a server brought.

    Attributes:
        result: latencies, rates and goodput, as the client saw them.
        trace: name of the workload.
        slo: targets of every request.
        seed: of arrivals and prompts.
        server: what the server told of itself.
        told: what it told of the run, by the names of ``bench online``.
    """

    result: ReplayResult
    trace: str
    slo: Slo
    seed: int
    server: Mapping[str, Any]
    told: Mapping[str, Any]

    def fields(self, *, detailed: bool = False) -> dict[str, Any]:
        """The figures for a JSON file, with the fields of ``bench online``; ``detailed`` adds those of each request."""
        unknown: dict[str, Any] = dict.fromkeys(_ENGINE_ONLY)
        return (
            self.result.fields(detailed=detailed)
            | unknown
            | {"model": self.server["model"], "trace": self.trace, "slo": str(self.slo), "seed": self.seed}
            | dict(self.told)
            | {"server": dict(self.server)}
        )


def run_against_server(
    base_url: str,
    trace: str,
    num_prompts: int | None,
    arrivals: Arrivals,
    *,
    model: str | None,
    api_key: str | None,
    slo: Slo,
    num_warmups: int,
    quiet: bool,
) -> ServerRun:
    """Serve a workload as it arrives.

    Args:
        base_url: of the server, with or without ``/v1``.
        trace: see :func:`bullet_graph.workloads.load_workload`.
        num_prompts: first so many requests, or None for all.
        arrivals: when they come.
        model: the served model's folder or preset, or None.
        api_key: that the server asks for, or None.
        slo: targets of every request.
        num_warmups: requests before the measured run.
        quiet: show no progress.

    Raises:
        ConfigError: there is no such server, or the vocabulary is not known.
        WorkloadError: the trace cannot be read, or no request completed.
    """
    shape, folder = (None, None) if model is None else resolve_model(model)
    tokenizer = None if folder is None else Tokenizer.from_folder(folder)
    workload = load_workload(
        trace,
        num_requests=num_prompts,
        seed=arrivals.seed,
        tokenize=None if tokenizer is None else tokenizer.encode,
    )
    times = arrivals.times(workload)

    async def run() -> ServerRun:
        server = await OpenAiServer.connect(_url(base_url), api_key=api_key)
        try:
            vocab_size = server.settings["vocab_size"] if shape is None else shape.vocab_size
            if not isinstance(vocab_size, int):
                raise ConfigError(
                    f"random prompts need the model's vocabulary, which {base_url} does not tell: give --model, the "
                    "served model's folder or preset"
                )
            await _warm_up(server, workload, num_warmups, vocab_size=vocab_size, slo=slo, seed=arrivals.seed)
            requests = timed_requests(workload, times, vocab_size=vocab_size, slo=slo, seed=arrivals.seed)
            # Looking through all objects would stop the client, and tokens that come meanwhile would seem late.
            gc.collect()
            gc.freeze()
            before = await server.own_counters()
            started = datetime.now()
            show = not quiet and sys.stderr.isatty()
            with progress_bar(show, total=len(requests), unit="req", leave=False) as advance:
                replayed = await replay_async(
                    server, requests, max_concurrency=arrivals.max_concurrency, on_done=lambda _: advance(1)
                )
            after = await server.own_counters()
        finally:
            await server.close()
        result = _summarize(replayed, arrivals, str(server.settings["model"]), started, workload)
        return ServerRun(
            result=result,
            trace=workload.name,
            slo=slo,
            seed=arrivals.seed,
            server=server.settings,
            told=_told(before, after, result),
        )

    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        return runner.run(run())


async def _warm_up(
    server: OpenAiServer, workload: Workload, num_warmups: int, *, vocab_size: int, slo: Slo, seed: int
) -> None:
    if num_warmups == 0:
        return
    first = itertools.islice(itertools.cycle(workload.requests), num_warmups)
    short = tuple(
        dataclasses.replace(r, output_tokens=min(r.output_tokens, WARMUP_OUTPUT_TOKENS)) for r in first
    )
    times = [WARMUP_GAP_S * index for index in range(num_warmups)]
    requests = timed_requests(
        Workload(workload.name, short), times, vocab_size=vocab_size, slo=slo, seed=seed + 1
    )
    _require_some(await replay_async(server, requests), workload)


def _summarize(
    replayed: Replay, arrivals: Arrivals, model: str, started: datetime, workload: Workload
) -> ReplayResult:
    _require_some(replayed, workload)
    return summarize_replay(
        replayed.served,
        duration_s=replayed.duration_s,
        started=started,
        backend="openai",
        model_id=model,
        request_rate=arrivals.request_rate,
        burstiness=None if arrivals.request_rate is None else arrivals.burstiness,
        max_concurrency=arrivals.max_concurrency,
    )


def _require_some(replayed: Replay, workload: Workload) -> None:
    errors = [request.error for request in replayed.served if request.error is not None]
    if len(errors) == len(replayed.served):
        raise WorkloadError(
            f"none of the {len(errors)} requests of {workload.name} could be served; the first: {errors[0]}"
        )


def _told(before: Mapping[str, float], after: Mapping[str, float], result: ReplayResult) -> dict[str, Any]:
    """What a ``bullet-graph serve`` counted meanwhile; nothing of another server."""
    if not after:
        return {}
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    policies = {
        name.partition("=")[2]: s for name, s in grown.items() if name.startswith("policy_seconds_total ")
    }
    total_s = sum(policies.values())
    told: dict[str, Any] = {
        "policy_shares": {policy: seconds / total_s for policy, seconds in policies.items() if seconds},
        "num_steps": int(grown["num_steps_total"]),
        "num_preemptions": int(grown["num_preemptions_total"]),
    }
    if "energy_joules_total" in grown:
        joules = grown["energy_joules_total"]
        told["joules_per_output_token"] = joules / result.total_output_tokens
        told["joules_per_token"] = joules / (result.total_output_tokens + result.total_input_tokens)
    return told


def _url(base_url: str) -> str:
    """Up to ``/v1``.

    Raises:
        ConfigError: it is no URL of a server.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--base-url must be such as http://127.0.0.1:8000, got {base_url!r}")
    url = base_url.rstrip("/")
    return url if parts.path.rstrip("/") else f"{url}/v1"


def print_server_run(run: ServerRun) -> None:
    """Show the figures on stdout."""
    rows: dict[str, list[str]] = {}
    for policy, share in run.told.get("policy_shares", {}).items():
        rows[f"device time in {policy}, %"] = [f"{100 * share:.1f}"]
    rows["J an output token"] = [figure(run.told.get("joules_per_output_token"), 3)]
    title = f"{run.server['model']} at {run.server['url']}: {run.trace}, {run.slo}"
    print_serving(title, {"server": run.result}, rows)
