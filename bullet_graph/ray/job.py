"""A batch on Ray Data: engines in actors, rows with the longest outputs first, until each row is written once.

Only the actors import torch.
"""

import asyncio
import logging
import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.data
from pydantic_core import from_json
from ray.util.annotations import RayDeprecationWarning

from bullet_graph.errors import ConfigError, EngineDeadError, io_errors
from bullet_graph.ray.batch_files import BatchInput, OutputFolder, PartFile

if TYPE_CHECKING:
    from bullet_graph.ray.predictor import RowEngine

_ROWS_PER_TASK = 32
"""At most: a task that is lost with its actor is done again, apart from the rows that it has written."""
_TASKS_PER_WORKER = 8
"""At least, so that no worker has many rows left when the others have none."""
_MOST_TASKS_AHEAD = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What one run of a batch did.

    Attributes:
        rows: of the input.
        skipped: rows that an earlier run has written.
        errors: rows whose output is an error.
        prompt_tokens, output_tokens: of this run's rows.
        seconds: of this run, with the start of its engines.
        output: the file with each row once, in the input's order.
    """

    rows: int
    skipped: int
    errors: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output: str


class _Worker:
    """The actor: writes each row as soon as it is answered, and reports what it has written."""

    def __init__(self, folder: str, settings: Mapping[str, Any]) -> None:
        from bullet_graph._imports import load  # noqa: PLC0415

        self._failure = ""
        try:
            self._engine: RowEngine = load("bullet_graph.ray.predictor", "RowEngine")(**settings)
            self._part = PartFile(Path(folder))
        except Exception as error:
            # Raised here, Ray would start the actor again and again.
            self._failure = str(error) or repr(error)

    async def __call__(self, rows: pa.Table) -> pa.Table:
        done = [0, 0, 0, 0]
        if not self._failure:
            cells = zip(rows["custom_id"].to_pylist(), rows["line"].to_pylist(), strict=True)
            counts = await asyncio.gather(*(self._do(*cell) for cell in cells))
            await asyncio.to_thread(self._part.sync)
            done = [sum(column) for column in zip(*counts, strict=True)]
        names = ("rows", "errors", "prompt_tokens", "output_tokens")
        return pa.table({name: [count] for name, count in zip(names, done, strict=True)} | {"failure": [self._failure]})

    async def _do(self, custom_id: str, line: bytes) -> tuple[int, int, int, int]:
        answered = await self._engine.answer(from_json(line))
        if (failure := self._engine.engine.failure) is not None:
            # A dead engine refuses all rows. Ray starts the actor again, and others do these rows.
            logger.error("the engine is dead, so this worker ends: %s", failure)
            os._exit(1)
        self._part.append(answered.row(custom_id))
        return 1, answered.error is not None, answered.prompt_tokens, answered.output_tokens


def run_batch(
    rows: BatchInput,
    folder: Path,
    settings: Mapping[str, Any],
    *,
    identity: Mapping[str, Any],
    num_workers: int | None,
    address: str | None = None,
    on_progress: Callable[[int], object] = lambda _: None,
) -> BatchReport:
    """Do those rows that ``folder``, which all machines of the cluster must see, does not hold yet.

    ``settings`` are all of :class:`~bullet_graph.ray.predictor.RowEngine`'s arguments. ``identity`` is what a later run
    must have in common with this one. A worker takes ``tensor_parallel_size`` GPUs; ``num_workers`` None is as many as
    there are GPUs for. Without an ``address``, Ray takes the cluster that runs on this machine, or runs in this
    process. ``on_progress`` gets the numbers of rows that are done, one after the other.

    Raises ConfigError where the folder is of another batch or in use, no machine has enough GPUs, or no engine can be
    built; EngineDeadError where the workers die without writing a row.
    """
    began_s = time.monotonic()
    with ExitStack() as stack:
        output = stack.enter_context(OutputFolder(folder, {**identity, "input": rows.digest}))
        left, prompt_tokens, output_tokens = set(rows.custom_ids) - output.done, 0, 0
        skipped = len(rows.custom_ids) - len(left)
        on_progress(skipped)
        if left and not ray.is_initialized():
            try:
                # A dashboard would take seconds of a start on this machine alone.
                ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, RuntimeError, ValueError) as error:
                raise ConfigError(f"Ray must start here, or run at --ray-address, but: {error}") from error
            except SystemExit:  # Ray's handler of SIGTERM
                raise KeyboardInterrupt from None
            stack.callback(ray.shutdown)
            # Ray's own handler prints a stack, and ends the process as if it had exit code 15.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        workers = _workers(num_workers, settings["device"], settings["tensor_parallel_size"]) if left else (0, 0)
        while left:
            for report in _pass(rows.longest_first(left), folder, settings, *workers):
                if report["failure"]:
                    raise ConfigError(f"a worker cannot start its engine: {report['failure']}")
                prompt_tokens += report["prompt_tokens"]
                output_tokens += report["output_tokens"]
                on_progress(report["rows"])
            output.refresh()
            before, left = left, left - output.done
            if left == before and left <= output.written:
                break  # the server's side fails on these rows: the next run tries again
            if left == before:
                raise EngineDeadError(
                    f"the workers wrote none of {len(left)} rows, as they died or their disk takes nothing: their logs "
                    "in Ray's folder tell why; the same command goes on"
                )
        with io_errors(f"--output {folder} must take one file of all rows: make room, and repeat", ConfigError):
            target = output.finish(rows.custom_ids)
        seconds = time.monotonic() - began_s
        return BatchReport(
            len(rows.custom_ids), skipped, output.num_errors, prompt_tokens, output_tokens, seconds, str(target)
        )


def _workers(wanted: int | None, device: str, num_ranks: int) -> tuple[int, int]:
    """As many as wanted, or as there are GPUs for; and the GPUs of each: one for each rank, all of one machine."""
    found = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    if device == "cpu" or (device == "auto" and not any(found)):
        return wanted or 1, 0
    most = sum(gpus // num_ranks for gpus in found)
    if not most:
        raise ConfigError(
            f"each worker needs {num_ranks} GPUs of one machine (--tensor-parallel-size), and Ray finds at most "
            f"{max(found)}: lower it, give --device cpu, or another cluster (--ray-address)"
        )
    return wanted or most, num_ranks


def _pass(
    table: pa.Table, folder: Path, settings: Mapping[str, Any], num_workers: int, num_gpus: int
) -> Iterator[dict[str, Any]]:
    """Give each row to a worker once, and yield their reports. Rows of a worker that dies have none."""
    # An engine takes longer to start than to answer a few rows.
    number = min(num_workers, math.ceil(len(table) / _ROWS_PER_TASK))
    size = min(_ROWS_PER_TASK, math.ceil(len(table) / (number * _TASKS_PER_WORKER)))
    # Enough to fill the engine, and one to go on with.
    ahead = min(math.ceil(settings["max_num_seqs"] / size) + 1, _MOST_TASKS_AHEAD)
    # `from_arrow` would start processes that look at each table.
    tasks = ray.data.from_blocks([table.slice(begin, size) for begin in range(0, len(table), size)])
    tasks.context.enable_progress_bars = tasks.context.print_on_execution_start = False
    # Ray would repeat a dead actor's tasks on its successor alone, with those of their rows that are written.
    tasks.context.max_errored_blocks = -1
    with warnings.catch_warnings():
        # `max_task_retries`: until Ray 2.64 names it, it goes by way of a deprecated argument.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        reports = tasks.map_batches(
            _Worker,
            batch_size=size,
            batch_format="pyarrow",
            fn_constructor_args=(str(folder.absolute()), dict(settings)),
            compute=ray.data.ActorPoolStrategy(
                size=number, max_tasks_in_flight_per_actor=ahead, max_concurrent_calls_per_actor=ahead
            ),
            num_gpus=num_gpus or None,
            num_cpus=None if num_gpus else 1,
            max_task_retries=0,
        )
    yield from reports.iter_rows()
