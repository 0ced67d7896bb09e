"""Run every process of the experiment, write the JSON, print a table: see README.md.

PYTHONPATH=. python -m bench.graph_persistence --output-json bench/results/h200/graph_persistence.json
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench.graph_persistence.job import Job
from bench.graph_persistence.report import address_summary, savings, table
from bench.kernels.gpu_command import GpuCommand
from bullet_graph.cli.result_file import check_result_file, write_result_file
from bullet_graph.perf.provenance import collect_provenance

ROOT = Path(__file__).resolve().parents[2]
ADDRESS_PROCESSES = 10
_LEAST_S = 8.0
_MOST_S = 60.0
_STDERR_CHARS = 1500


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the whole experiment must be over, by ``time.monotonic``."""

    at_s: float

    def left_s(self) -> float:
        """Seconds until then."""
        return self.at_s - time.monotonic()


def plan(work: Path, layers: Sequence[int]) -> list[Job]:
    """The processes in order; the first to save keeps the cubins, the last measures costs without CUPTI beside it."""
    sizes = sorted(layers)
    jobs = [Job(role="pool", work=work)]
    for index, count in enumerate(sizes):
        last = index == len(sizes) - 1
        jobs.append(Job(role="save", work=work, layers=count, images=index == 0, costs=last))
        jobs.append(Job(role="load", work=work, layers=count, images=True))
        if last:
            jobs.append(Job(role="masks", work=work))
        jobs.append(Job(role="load", work=work, layers=count))
    return jobs


def child(module: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """A process of this package, from the repository's root."""
    return subprocess.run(
        [sys.executable, "-m", f"bench.graph_persistence.{module}", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
    )


def run_job(job: Job, deadline: Deadline) -> dict[str, Any]:
    """What a process left behind, however it ended."""
    start = time.monotonic()
    result: dict[str, Any] = {"process": job.name, "rc": "left out: no time", "stderr": ""}
    if deadline.left_s() > _LEAST_S:
        try:
            done = child("child", job.to_json(), timeout_s=min(_MOST_S, deadline.left_s()))
            result["rc"] = done.returncode
            result["stderr"] = done.stderr[-_STDERR_CHARS:] if done.returncode else ""
        except subprocess.TimeoutExpired as error:
            result["rc"] = f"killed after {error.timeout:.0f} s"
    result["seconds"] = round(time.monotonic() - start, 2)
    result["steps"] = json.loads(job.log.read_text(encoding="utf-8")) if job.log.exists() else []
    return result


def probe_addresses(deadline: Deadline) -> dict[str, Any]:
    """Ten fresh processes, the later ones also asked for what the first was given without a hint."""

    def probe(*hints: str) -> dict[str, Any]:
        done = child("address_process", *hints, timeout_s=deadline.left_s())
        if done.returncode:
            raise RuntimeError(done.stderr[-_STDERR_CHARS:])
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    try:
        first = probe()
        with ThreadPoolExecutor(3) as pool:
            others = list(pool.map(lambda _: probe(first["reserved"]), range(ADDRESS_PROCESSES - 1)))
    except (RuntimeError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"error": str(error)[-_STDERR_CHARS:]}
    probes = [first, *others]
    return {"summary": address_summary(probes), "processes": probes}


@click.command(cls=GpuCommand)
@click.option(
    "--layers",
    type=click.IntRange(min=1),
    multiple=True,
    default=(2, 32),
    show_default=True,
    help="Of the step; once for each size.",
)
@click.option("--time-limit-s", type=click.FloatRange(min=1), default=115.0, show_default=True)
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
def main(layers: tuple[int, ...], time_limit_s: float, output_json: Path) -> None:
    """Save CUDA graphs in one process and make them again in another; a step that fails is a result, too."""
    check_result_file(output_json, overwrite=True)
    deadline = Deadline(time.monotonic() + time_limit_s)
    report: dict[str, Any] = {"layers": layers, "addresses": probe_addresses(deadline), "processes": []}
    with tempfile.TemporaryDirectory(prefix="graph_persistence") as folder:
        try:
            for job in plan(Path(folder), layers):
                report["processes"].append(run_job(job, deadline))
                click.echo(f"{job.name}: {report['processes'][-1]['rc']}", err=True)
        finally:
            report["savings"] = savings(report["processes"])
            report["provenance"] = dataclasses.asdict(collect_provenance("cuda"))
            write_result_file(output_json, json.dumps(report, indent=1))
    click.echo("\n".join(table(report)))


if __name__ == "__main__":
    main(prog_name="python -m bench.graph_persistence")
