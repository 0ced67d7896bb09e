"""Sums over ranks in CUDA graphs, as decode steps make them: NCCL beside the engine's own launch.

    python -m bench.kernels.collectives --ranks 2 --output-json bench/results/h200/collectives.json

A process for each GPU. A graph holds 40 sums of [rows, hidden] in bfloat16; the time is that of one, the median over
replays. With ``--sms``, the stream is masked.
"""

import itertools
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from bench.kernels.harness import DTYPE, GpuCommand, capture, output_option, parse_counts, replays_us
from bench.record import write_report
from bullet_graph.errors import DeviceError
from bullet_graph.kernels.communicator import Communicator
from bullet_graph.partition.backend import open_backend
from bullet_graph.partition.masks import Lane, partition_of
from bullet_graph.runtime.cuda import lane_stream
from bullet_graph.runtime.ranks import make_communicators

_SUMS = 40
_REPLAYS = 30


def measure(rank: int, folder: Path, num_ranks: int, hidden: int, rows: tuple[int, ...], sms: tuple[int, ...]) -> None:
    """One rank's part; rank 0 writes the cases to a file in the folder. Raises DeviceError for a wrong sum."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    partitions = {size: partition_of(size, num_sms=num_sms) for size in (None, *sms)}
    backend, why = open_backend("auto", tuple(partitions.values()), device=rank)
    free = torch.cuda.mem_get_info(device)[0]
    made: dict[Lane, Communicator] = {}
    make_communicators(folder, rank, num_ranks, device, made)
    reducers: Mapping[str, Communicator] = {"nccl": made["prefill"], "own": made["decode"]}
    cases: list[dict[str, Any]] = []
    for (size, partition), count in itertools.product(partitions.items(), rows):
        for name, reducer in reducers.items():
            generator = torch.Generator(device).manual_seed(rank)
            x = torch.empty(count, hidden, dtype=DTYPE, device=device).normal_(generator=generator)
            check(reducer, made["prefill"], x)
            stream = lane_stream(backend, "decode", partition, device)
            cases.append({"sms": size or num_sms, "rows": count, "reducer": name, "us": time_us(reducer, x, stream)})
    used = free - torch.cuda.mem_get_info(device)[0]
    if rank == 0:
        report = {"backend": why, "communicators_bytes": used, "cases": cases}
        (folder / "cases").write_text(json.dumps(report), encoding="utf-8")
    for communicator in made.values():
        communicator.close()
    backend.close()


def check(reducer: Communicator, reference: Communicator, x: Tensor) -> None:
    """A sum must be that of all ranks' rows in float32, and have the same bits on all ranks."""
    expected = reference.all_gather(x).float().sum(0).to(x.dtype)
    found = reducer.all_reduce(x.clone())
    same = reference.all_gather(found)
    error = (found.float() - expected.float()).abs().max().item()
    if error > 0.02 * expected.float().abs().max().item() or not all(each.equal(found) for each in same):
        raise DeviceError(f"{type(reducer).__name__} adds up {list(x.shape)} wrongly: off by {error}; report this")


def time_us(reducer: Communicator, x: Tensor, stream: torch.cuda.Stream) -> float:
    """Median time of a sum of this size, in µs."""

    def sums() -> None:
        for _ in range(_SUMS):
            reducer.all_reduce(x)

    # As many replays on each rank: burst_us takes as many as fill a time.
    return round(statistics.median(replays_us(capture(sums, stream), stream, _REPLAYS)) / _SUMS, 2)


@click.command(cls=GpuCommand)
@click.option("--ranks", type=click.IntRange(min=2), default=2)
@click.option("--hidden", type=click.IntRange(min=16), default=8192, help="Elements of a row.")
@click.option("--rows", default="1,4,16,64,128,256,512", callback=parse_counts)
@click.option("--sms", default="32,64", callback=parse_counts, help="Sizes of masked lanes.")
@output_option
def main(ranks: int, hidden: int, rows: tuple[int, ...], sms: tuple[int, ...], output_json: Path) -> None:
    if torch.cuda.device_count() < ranks:
        raise DeviceError(f"--ranks {ranks} needs a GPU for each, but torch sees {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spawn(measure, (folder, ranks, hidden, rows, sms), nprocs=ranks)
        report = json.loads((folder / "cases").read_text(encoding="utf-8"))
    for case in report["cases"]:
        click.echo("{rows:5} rows on {sms:3} SMs, {reducer:>4}: {us:7.1f} us".format(**case))
    click.echo(f"communicators take {report['communicators_bytes'] / 2**20:.0f} MiB on rank 0")
    write_report(output_json, {"ranks": ranks, "hidden": hidden, **report})


if __name__ == "__main__":
    main()
