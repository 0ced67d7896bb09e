"""Compare two source trees of this project on one GPU, run by run in turn.

    python -m bench.two_trees --tree old=../before --tree new=. --output-json bench/results/h200/two_trees.json

Each tree gets a process with its own engine. The processes take turns, so both meet the same clocks of a power-capped
GPU. A figure of the second tree is divided by the same figure of the first.
"""

import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

Request = tuple[float, int, int]
"""Arrival in seconds, prompt tokens, output tokens."""

DECODE_PROMPT_TOKENS = 512
DECODE_TOKENS = 320


class Worker:
    """An engine of one tree in a process of its own."""

    def __init__(self, name: str, tree: Path, settings: dict[str, Any]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve()), "--worker"],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": f"{tree.resolve()}:{os.environ.get('PYTHONPATH', '')}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._write(settings)

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        """Run a task and return its figures."""
        self._write(task)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"the engine of the tree {self.name} ended: see its messages above")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()


def serve_tasks() -> None:
    """Run in a tree's own process: build its engine, then answer tasks from stdin on stdout."""
    answers, sys.stdout = sys.stdout, sys.stderr
    # Each tree brings its own package.
    from bullet_graph import Engine, Slo  # noqa: PLC0415
    from bullet_graph.perf.provenance import collect_provenance  # noqa: PLC0415

    settings = json.loads(sys.stdin.readline())
    slo = Slo(ttft_ms=500, tpot_ms=15)
    chosen = settings.pop("policy")
    start_s = time.perf_counter()
    engine = Engine(**settings, policy=chosen, load_format="dummy", slo=slo if chosen == "auto" else Slo())
    start = {
        "start_s": time.perf_counter() - start_s,
        "provenance": dataclasses.asdict(collect_provenance(engine.device_name)),
    }
    print(json.dumps(start), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        targets = Slo(**task["slo"])
        engine.set_policy(chosen, targets)
        figures = run(engine, task["requests"], targets, decode=task["kind"] == "decode")
        print(json.dumps(figures), file=answers, flush=True)
    engine.shutdown()


def run(engine: Any, requests: Sequence[Request], slo: Any, *, decode: bool) -> dict[str, Any]:
    """Serve requests at their times; the figures of one run."""
    from bullet_graph import SamplingParams  # noqa: PLC0415

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, engine.model_config.vocab_size, size=tokens).tolist() for _, tokens, _ in requests]
    outputs: dict[str, Any] = {}
    waiting = list(enumerate(requests))[::-1]
    start_s = engine.now()
    while waiting or engine.has_unfinished_requests():
        next_s = start_s + waiting[-1][1][0] if waiting else None
        if next_s is not None and next_s <= engine.now():
            index, (_, _, tokens) = waiting.pop()
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            engine.add_request(str(index), prompts[index], params, arrival_s=next_s, slo=slo)
        elif engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step(next_s) if output.finished}
        elif next_s is not None:
            engine.sleep_until(next_s)
    times = [outputs[str(index)].metrics for index in range(len(requests))]
    if decode:
        # Only while every sequence decodes.
        first, last = max(m.token_times_s[0] for m in times), min(m.token_times_s[-1] for m in times)
        steps = [t for t in times[0].token_times_s if first < t <= last]
        return {"step_ms": 1e3 * (steps[-1] - steps[0]) / (len(steps) - 1)}
    ttft = [m.ttft_ms for m in times]
    tpot = [m.tpot_ms for m in times if m.tpot_ms is not None]
    on_time = [not outputs[str(index)].missed_targets for index in range(len(requests))]
    return {
        "duration_s": max(m.token_times_s[-1] for m in times) - start_s,
        "on_time": sum(on_time) / len(on_time),
        **{f"ttft_p{q}_ms": float(np.percentile(ttft, q)) for q in (50, 90, 99)},
        **{f"tpot_p{q}_ms": float(np.percentile(tpot, q)) for q in (50, 90)},
    }


def make_tasks(batches: Sequence[int], at_once: Sequence[str], rates: Sequence[str], seed: int) -> dict[str, Any]:
    """The tasks by name: ``decode 64``, ``azure:conv=600``, ``azure:conv=600@20``."""
    from bullet_graph.workloads.load import load_workload  # noqa: PLC0415

    tasks: dict[str, Any] = {}
    for batch in batches:
        requests = [(0.0, DECODE_PROMPT_TOKENS, DECODE_TOKENS)] * batch
        tasks[f"decode {batch}"] = {"kind": "decode", "slo": {}, "requests": requests}
    for name in (*at_once, *rates):
        trace, _, number = name.partition("=")
        count, _, rate = number.partition("@")
        gaps = np.random.default_rng(seed).exponential(1 / float(rate), int(count)) if rate else np.zeros(int(count))
        lengths = [(r.prompt_tokens, r.output_tokens) for r in load_workload(trace, num_requests=int(count)).requests]
        arrivals = np.cumsum(gaps).tolist()
        tasks[name] = {
            "kind": "replay",
            "slo": {"ttft_ms": 500, "tpot_ms": 15} if rate else {},
            "requests": [(a, *length) for a, length in zip(arrivals, lengths, strict=True)],
        }
    return tasks


_ABOUT = (__doc__ or "").replace("\n\n    ", "\n\n\b\n    ")  # the example keeps its lines


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True}, help=_ABOUT)
@click.option("--tree", "trees", multiple=True, help="NAME=FOLDER; give two.")
@click.option("--model", default="llama-3.1-8b", help="Of both trees' engines.")
@click.option("--policy", default="auto", help="Of both trees' engines.")
@click.option("--kv-gib", default=36, help="KV cache of each engine.")
@click.option("--decode", "batches", multiple=True, type=int, default=(1, 64, 256), help="Rows of a batch to decode.")
@click.option("--at-once", multiple=True, default=("azure:conv=600", "azure:code=400"), help="TRACE=COUNT.")
@click.option(
    "--rate", "rates", multiple=True, default=("azure:conv=500@20", "azure:code=300@10"), help="TRACE=COUNT@RATE."
)
@click.option("--rounds", default=3, help="Runs of each task with each tree.")
@click.option("--time-budget-s", default=500.0, help="Begin no further task after this time.")
@click.option("--seed", default=7, help="Of the arrivals.")
@click.option("--output-json", type=click.Path(path_type=Path), help="Where the result goes.")
@click.option("--worker", is_flag=True, hidden=True)
def main(
    trees: tuple[str, ...],
    model: str,
    policy: str,
    kv_gib: int,
    batches: tuple[int, ...],
    at_once: tuple[str, ...],
    rates: tuple[str, ...],
    rounds: int,
    time_budget_s: float,
    seed: int,
    output_json: Path | None,
    worker: bool,
) -> None:
    if worker:
        serve_tasks()
        return
    folders = {name: Path(folder) for name, _, folder in (one.partition("=") for one in trees) if folder}
    if not len(trees) == len(folders) == 2:
        raise click.UsageError("--tree is given twice, each as NAME=FOLDER with a name of its own")
    if others := [folder for folder in folders.values() if not (folder / "bullet_graph").is_dir()]:
        raise click.UsageError(f"--tree {others[0]}: a source tree has a folder bullet_graph, but this has none")
    if output_json is not None and not output_json.parent.is_dir():
        raise click.UsageError(f"--output-json {output_json}: its folder does not exist; make it first")
    from bullet_graph.cli.result_file import command_line  # noqa: PLC0415
    from bullet_graph.perf.energy import DeviceMonitor, NvmlProbe  # noqa: PLC0415

    began_s = time.perf_counter()
    settings = {"model": model, "policy": policy, "max_num_seqs": 1024, "kv_cache_bytes": kv_gib << 30}
    settings["gpu_memory_utilization"] = 0.95
    try:
        tasks = make_tasks(batches, at_once, rates, seed)
    except (ValueError, ZeroDivisionError) as error:
        raise click.UsageError(f"--at-once and --rate are TRACE=COUNT and TRACE=COUNT@RATE: {error}") from None
    workers = []
    starts = {}
    for name, folder in folders.items():  # one after the other: each takes its share of what memory is free
        workers.append(Worker(name, folder, settings))
        starts[name] = workers[-1].answer()
        print(f"{name}: ready after {starts[name]['start_s']:.1f} s", file=sys.stderr)
    uuid = starts[workers[0].name]["provenance"]["device_uuid"]
    runs: list[dict[str, Any]] = []

    def measure(number: int, name: str, order: Sequence[Worker]) -> None:
        for one in order:
            with DeviceMonitor(NvmlProbe.open(uuid or "")) as monitor:
                figures = one.ask(tasks[name])
            mean = {k: r.mean for k in ("sm_clock_mhz", "power_w") if (r := getattr(monitor.report, k)) is not None}
            runs.append({"round": number, "task": name, "tree": one.name, **figures, **mean})
            print(json.dumps(runs[-1]), file=sys.stderr)

    def result() -> dict[str, Any]:
        return {
            "argv": command_line(),
            "settings": settings,
            "starts": starts,
            "ratios": ratios(runs, [one.name for one in workers]),
            "runs": runs,
        }

    for _ in range(2):
        measure(-1, f"decode {max(batches)}", workers)  # warms both engines and the card up
    for number, name in itertools.product(range(rounds), tasks):
        if time.perf_counter() - began_s > time_budget_s:
            break
        measure(number, name, workers if number % 2 == 0 else workers[::-1])
        if output_json is not None:  # whatever ends the command, what was measured is kept
            output_json.write_text(json.dumps(result(), indent=1) + "\n", encoding="utf-8")
    for one in workers:
        one.close()
    for row in result()["ratios"]:
        before, after = row["values"]
        print(f"{row['task']:22} {row['figure']:12} {before:10.3f} {after:10.3f} {row['ratio'] or 0:7.4f}")


def ratios(runs: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Second tree over first tree, of the medians over rounds."""
    rows = []
    measured = [r for r in runs if r["round"] >= 0]
    for task, figure in sorted({(r["task"], k) for r in measured for k in r if k not in ("round", "task", "tree")}):
        of_tree = [[r[figure] for r in measured if (r["task"], r["tree"]) == (task, name)] for name in names]
        values = [statistics.median(found) for found in of_tree]
        ratio = values[1] / values[0] if values[0] else None
        rows.append({"task": task, "figure": figure, "values": values, "ratio": ratio})
    return rows


if __name__ == "__main__":
    main()
