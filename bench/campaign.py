"""Run a list of measurements, one job per GPU, or group of GPUs, at a time, and continue where it stopped.

    python -m bench.campaign bench/campaigns/one_gpu.toml --results bench/results/h200 --gpus 0,1 --time-limit-s 540

A campaign is a TOML file of jobs. The commands of a job run in order on one GPU, or on a group such as 0+1.
`{results}` in them stands for the results' folder. Commands that succeeded are listed in `campaign.json` there and not
run again. At the time limit commands are interrupted; those whose files can be continued lose nothing. With fewer GPUs
than jobs, jobs wait.
"""

import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.record import Tool
from bullet_graph.cli.result_file import write_result_file
from bullet_graph.errors import ConfigError

RESULTS = "{results}"
_GRACE_S = 20.0
"""Time for an interrupted command to write its results and free its memory."""


@dataclass(frozen=True, slots=True)
class Job:
    """Commands for one GPU or group, in order; a failure ends the job."""

    name: str
    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state of a command: ``done``, ``done before``, ``stopped`` at the time limit, ``failed``, ``not begun``."""

    job: str
    command: str
    state: str
    seconds: float


def read_campaign(path: Path) -> tuple[Job, ...]:
    """The jobs of a file; ConfigError if it cannot be read, or is no campaign."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        jobs = tuple(Job(job["name"], tuple(job["commands"])) for job in content["job"])
        for job in jobs:
            for command in job.commands:
                if not shlex.split(command):
                    raise ValueError("an empty command")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no campaign: it needs [[job]] tables, each with a name and a list of commands ({error!r})"
        ) from error
    names = [job.name for job in jobs]
    if not jobs or len(set(names)) < len(names) or not all(job.commands for job in jobs):
        raise ConfigError(f"{path}: a campaign needs jobs of different names, each with commands; found {names}")
    return jobs


class Campaign:
    """Runs jobs, each on a GPU or group of its own.

    Args:
        gpus: indices of the GPUs of each group, joined by commas; None is the CPU, one job at a time.
        results: the folder for results, each command's log, and the list of what is done.
        time_limit_s: running commands are interrupted then, and none begins.
    """

    def __init__(self, jobs: Sequence[Job], gpus: Sequence[str | None], results: Path, *, time_limit_s: float) -> None:
        self._jobs = jobs
        self._results = results
        self._deadline_s = time.monotonic() + time_limit_s
        self._notes = results / "campaign.json"
        self._done: set[str] = set(json.loads(self._notes.read_text("utf-8"))) if self._notes.exists() else set()
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for gpu in gpus:
            self._free.put(gpu)

    def run(self) -> list[Outcome]:
        """Run all that is left; returns the outcome of every command, in the campaign's order."""
        for number in (signal.SIGINT, signal.SIGTERM):  # a background job's children would ignore the first
            signal.signal(number, signal.default_int_handler)
        with ThreadPoolExecutor(len(self._jobs)) as pool:
            running = [pool.submit(self._run_job, job) for job in self._jobs]
            try:
                wait(running)  # an interrupted Thread.join takes the thread for ended, before Python 3.13
            except KeyboardInterrupt:
                self._deadline_s = 0.0  # the threads end with their commands
                raise
        return [outcome for job in running for outcome in job.result()]

    def _run_job(self, job: Job) -> list[Outcome]:
        gpu, told = self._free.get(), list[Outcome]()
        try:
            goes_on = True
            for number, text in enumerate(job.commands):
                command, state, start_s = text.replace(RESULTS, str(self._results)), "not begun", time.monotonic()
                if command in self._done:
                    state = "done before"
                elif goes_on and start_s < self._deadline_s:
                    try:
                        state = self._run_command(job, number, command, gpu)
                    except (OSError, ConfigError) as error:  # there is no such program, or the disk is full
                        state = f"failed ({error})"
                    goes_on = state == "done"
                told.append(Outcome(job.name, command, state, time.monotonic() - start_s))
            return told
        finally:
            self._free.put(gpu)

    def _run_command(self, job: Job, number: int, command: str, gpu: str | None) -> str:
        """The command's state at its end."""
        environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        words = [word.replace(RESULTS, str(self._results)) for word in shlex.split(job.commands[number])]
        words = [sys.executable if word == "python" else word for word in words]
        with (self._results / f"{job.name}-{number}.log").open("ab") as log:
            process = subprocess.Popen(
                words, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            while process.poll() is None:
                if time.monotonic() >= self._deadline_s:
                    self._stop(process)
                    return "stopped"
                time.sleep(0.05)
        if process.returncode != 0:
            return f"failed ({process.returncode})"
        with self._lock:
            self._done.add(command)
            write_result_file(self._notes, json.dumps(sorted(self._done), indent=1))
        return "done"

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            # With whatever it has started itself.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@click.command(cls=Tool)
@click.argument("campaign", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--gpus", default="0", help="Such as 0,1,2, or groups: 0+1,2+3; cpu for none.")
@click.option("--only", default="", metavar="NAME,…", show_default=False, help="Run these jobs alone.")
@click.option("--time-limit-s", type=click.FloatRange(min=0), default=float("inf"), help="Stop after this time.")
def main(campaign: Path, results: Path, gpus: str, only: str, time_limit_s: float) -> None:
    jobs = read_campaign(campaign)
    wanted = {name for name in only.split(",") if name}
    unknown = sorted(wanted - {job.name for job in jobs})
    if unknown:
        raise ConfigError(f"{campaign} has no job {unknown[0]!r}: it has {', '.join(j.name for j in jobs)}")
    indices = [None] if gpus == "cpu" else _indices(gpus)
    results.mkdir(parents=True, exist_ok=True)
    chosen = [job for job in jobs if not wanted or job.name in wanted]
    outcomes = Campaign(chosen, indices, results, time_limit_s=time_limit_s).run()
    table = Table("job", "command", "state", "s")
    for outcome in outcomes:
        table.add_row(outcome.job, outcome.command[:100], outcome.state, f"{outcome.seconds:.0f}")
    Console(width=150).print(table)
    sys.exit(0 if all(outcome.state.startswith("done") for outcome in outcomes) else 1)


def _indices(text: str) -> list[str | None]:
    words = text.replace("+", ",").split(",")
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise ConfigError(f"--gpus {text!r}: write indices such as 0,1,2 or 0+1,2+3, each once, or cpu")
    return [group.replace("+", ",") for group in text.split(",")]


if __name__ == "__main__":
    main()
