"""The cost of the HTTP server: the same requests, at the same rate, to an engine in one process and to the server.

    python -m bench.server_overhead --model llama-3.1-8b --trace azure:conv --num-prompts 600 --request-rate 16 \\
        --policy mixed --output-json bench/results/h200/server_overhead.json

`bullet-graph bench online` and `bullet-graph serve` with `bullet-graph bench serve` alternate `--repeats` times, each
in a process of its own. Medians of TTFT and TPOT over the repeats are compared; the exit code is 1 if the server's are
more than `--limit-percent` above.
"""

import json
import math
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.record import Tool
from bullet_graph.cli.options import parsed_by
from bullet_graph.cli.result_file import check_result_file, to_json, write_result_file
from bullet_graph.errors import ConfigError, EngineDeadError

COMPARED = ("median_ttft_ms", "median_tpot_ms")
SHOWN = (*COMPARED, "p90_ttft_ms", "p90_tpot_ms", "median_itl_ms", "p99_itl_ms", "output_throughput")
_STOP_S = 120


def program(*arguments: str) -> list[str]:
    """A command line of the program for this interpreter."""
    return [sys.executable, "-m", "bullet_graph", *arguments]


def measure(*arguments: str) -> dict[str, Any]:
    """Run a command that prints JSON; ConfigError where it fails, after its own messages."""
    process = subprocess.run(program(*arguments, "--json"), check=False, stdout=subprocess.PIPE)
    if process.returncode:
        raise ConfigError(f"bullet-graph {shlex.join(arguments)} failed: see its messages above")
    return json.loads(process.stdout)


@contextmanager
def server(*options: str) -> Iterator[str]:
    """A running server; yields its URL. ConfigError where it does not start, EngineDeadError after a bad end."""
    process = subprocess.Popen(
        program("serve", "--port", "0", "--no-access-log", *options), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    last_lines = deque[str](maxlen=50)
    try:
        for line in process.stderr:
            click.echo(line, nl=False, err=True)
            if line.startswith("serving "):
                break
        else:
            raise ConfigError("the server did not start: see its messages above")
        url = line.split()[-1]
        # A pipe that nobody reads would fill up, and stop the server at its next message.
        threading.Thread(target=last_lines.extend, args=(process.stderr,), daemon=True).start()
        urllib.request.urlopen(f"{url}/health", timeout=60).close()
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        finally:
            process.kill()
    if process.returncode:
        click.echo("".join(last_lines), err=True)
        raise EngineDeadError(
            f"the server ended with exit code {process.returncode}, expected 0: see its messages above"
        )


def compare(runs: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float | None]]:
    """Each figure's median over the repeats, in process and by HTTP, and the excess of the latter in percent."""
    comparison: dict[str, dict[str, float | None]] = {}
    for name in SHOWN:
        engine, http = (
            statistics.median(values) if all(v is not None for v in values) else None
            for values in ([run[kind][name] for run in runs] for kind in ("engine", "server"))
        )
        percent = 100 * (http / engine - 1) if engine and http is not None else None
        comparison[name] = {"engine": engine, "server": http, "percent": percent}
    return comparison


@click.command(cls=Tool)
@click.option("--model", required=True, help="A folder, hub id or preset, as of `bullet-graph serve`.")
@click.option("--trace", default="azure:conv", help="As of `bullet-graph bench serve`.")
@click.option("--num-prompts", type=int, default=600, help="Only the first N requests of the trace.")
@click.option("--request-rate", type=float, default=16.0, help="Requests per second.")
@click.option("--policy", default="mixed", help="How prefill and decode share the device.")
@click.option("--slo", default="", show_default=False, help='Targets in ms, such as "ttft:500 tpot:15", of both.')
@click.option("--engine-options", default="--max-num-seqs 256", callback=parsed_by(shlex.split), help="Of both.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="Runs of each, in turn.")
@click.option("--limit-percent", type=float, default=5.0, help="By how much the server's medians may be higher.")
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
def main(
    model: str,
    trace: str,
    num_prompts: int,
    request_rate: float,
    policy: str,
    slo: str,
    engine_options: list[str],
    repeats: int,
    limit_percent: float,
    output_json: Path,
) -> None:
    check_result_file(output_json, overwrite=True)
    of_engine = ("--model", model, "--policy", policy, *engine_options)
    load = ("--trace", trace, "--num-prompts", str(num_prompts), "--request-rate", str(request_rate))
    targets = ("--goodput", *slo.split()) if slo else ()
    runs: list[dict[str, dict[str, Any]]] = []
    started = time.time()
    for repeat in range(repeats):
        click.echo(f"repeat {repeat + 1} of {repeats}: the engine in its own process", err=True)
        engine = measure("bench", "online", *of_engine, *load, *targets)
        click.echo(f"repeat {repeat + 1} of {repeats}: by HTTP", err=True)
        with server(*of_engine, *(("--slo", slo) if slo else ())) as url:
            runs.append({"engine": engine, "server": measure("bench", "serve", "--base-url", url, *load, *targets)})
        result = {"seconds": time.time() - started, "comparison": (comparison := compare(runs)), "runs": runs}
        # Written after each, so that a run that is cut short keeps what it has.
        write_result_file(output_json, to_json(result))
    table = Table(f"median of {repeats}", "in process", "by HTTP", "%")
    for name, values in comparison.items():
        table.add_row(name, *("–" if value is None else f"{value:,.2f}" for value in values.values()))
    Console().print(table)
    worst = max(comparison[name]["percent"] or -math.inf for name in COMPARED)
    if worst > limit_percent:
        raise click.ClickException(f"the server's medians are up to {worst:.1f} % above, more than {limit_percent:g} %")


if __name__ == "__main__":
    main()
