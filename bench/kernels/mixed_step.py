"""Forwards with prompt rows and decode rows by the engine's lane, in several ways, and where their time goes.

    python bench/kernels/mixed_step.py --output-json bench/results/h200/mixed_step.json

Ways: in captured pieces, where there are any for so many rows, or launched kernel by kernel; prompts that go on and
those that begin attending in a launch of their own each, or all in one. They take turns, round by round, once the GPU
has run long enough to be at its power cap, and each round is a few forwards back to back, the host ahead of the GPU as
it is in the engine. A time is the median over a way's rounds, of a forward; so is the host's. By kernel: of the first
way, in torch's profiler.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

# Run as a script, only this file's own folder would be looked in.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.kernels.decode_inputs import DEVICE
from bench.kernels.gpu_command import GpuCommand
from bench.kernels.mixed_cases import CASES, Case, rows_of
from bench.kernels.random_decoder import random_decoder
from bench.kernels.step_breakdown import Kernel, in_turn, kernels_of
from bullet_graph.cli.result_file import check_result_file, write_result_file
from bullet_graph.graphs.key import row_buckets
from bullet_graph.graphs.layer_graphs import LayerGraphs
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.sampler import SamplingState
from bullet_graph.models.triton_ops import TritonOps
from bullet_graph.perf.energy import DeviceMonitor
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.runtime.eager_lane import EagerLane

LAUNCHES = {"two": 0, "one": 2**31}
"""Of attention of prompts, where some go on and some begin: up to how many rows of the latter there is one."""
FORWARDS_A_ROUND, PROFILED_FORWARDS = 4, 4
WARM_UP_S = 3.0
MAX_NAME = 70
"""Characters of a kernel's name that are kept: templates have hundreds."""

Forward = Callable[[], object]


def by_kernel(kernels: Sequence[Kernel], num_forwards: int) -> list[dict[str, Any]]:
    """µs a forward by kernel, the longest first, and those in which none ran."""
    us: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for kernel, gap, own in in_turn(kernels):
        name = kernel.name[:MAX_NAME]
        us["(none)"] += gap
        us[name] += own
        counts[name] += 1
    return [
        {"kernel": name, "launches": counts[name] / num_forwards, "us": round(total / num_forwards, 2)}
        for name, total in us.most_common()
    ]


def profiled(forward: Forward) -> list[dict[str, Any]]:
    """By kernel, of forwards enqueued one behind the other."""

    def run() -> None:
        for _ in range(PROFILED_FORWARDS):
            forward()

    forward()
    torch.cuda.synchronize()
    return by_kernel(kernels_of(run), PROFILED_FORWARDS)


class Bench:
    """One decoder and four lanes: with captured pieces and without, with one launch of attention and with two."""

    def __init__(self, config: ModelConfig, cases: tuple[Case, ...]) -> None:
        self.config = config
        num_blocks = max(case.num_blocks for case in cases)
        max_rows = max(case.rows for case in cases)
        max_seqs = max(case.decode_rows + len(case.prompts) for case in cases)
        longest = max(max(case.context, *(p.cached + p.tokens for p in case.prompts)) for case in cases)
        decoder = random_decoder(config, num_blocks=num_blocks, max_positions=longest)
        state = SamplingState(max_seqs + 1, DEVICE)
        graphs = LayerGraphs(decoder, TritonOps(), buckets=row_buckets(max_rows, config))

        def lane(pieces: LayerGraphs | None, launches: str) -> EagerLane:
            return EagerLane(
                decoder,
                state,
                max_num_seqs=max_seqs,
                max_rows=max_rows,
                num_kv_blocks=num_blocks,
                graphs=pieces,
                few_fresh_rows=LAUNCHES[launches],
            )

        self.graphs = graphs
        self.lanes = {
            (kind, launches): lane(pieces, launches)
            for kind, pieces in (("pieces", graphs), ("kernel by kernel", None))
            for launches in LAUNCHES
        }
        self.stream = torch.cuda.Stream()

    def ways(self, case: Case) -> dict[str, Forward]:
        """Forwards of a case by way."""
        rows = rows_of(case, vocab_size=self.config.vocab_size)
        has_both = 0 < rows.num_continued < rows.num_prefill
        return {
            f"{kind}, {launches} launch{'' if launches == 'one' else 'es'} of attention": partial(
                lane.run, rows
            )
            for (kind, launches), lane in self.lanes.items()
            if (kind != "pieces" or self.graphs.bucket(case.rows) is not None)
            and (has_both or launches == "one")
        }

    def measure(self, case: Case, rounds: int) -> dict[str, Any]:
        """Time every way of a case, and profile the first."""
        ways = self.ways(case)
        ms: dict[str, list[float]] = {name: [] for name in ways}
        host_ms: dict[str, list[float]] = {name: [] for name in ways}
        for forward in ways.values():
            forward()
        with DeviceMonitor.for_gpu(str(torch.cuda.get_device_properties(0).uuid)) as monitor:
            for turn in range(rounds):
                names = list(ways)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    device, host = self._round(ways[name])
                    ms[name].append(device)
                    host_ms[name].append(host)
        return {
            "case": dataclasses.asdict(case),
            "rows": case.rows,
            "ways": [
                {
                    "name": name,
                    "ms": round(statistics.median(ms[name]), 4),
                    "host_ms": round(statistics.median(host_ms[name]), 4),
                }
                for name in ways
            ],
            "device": dataclasses.asdict(monitor.report),
            "by_kernel": profiled(next(iter(ways.values()))),
        }

    @staticmethod
    def _round(forward: Forward) -> tuple[float, float]:
        """(ms of the GPU, of the host) a forward; the first is not timed, and keeps the GPU busy meanwhile."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        forward()
        events[0].record()
        begin_s = time.perf_counter()
        for _ in range(FORWARDS_A_ROUND):
            forward()
        host_s = time.perf_counter() - begin_s
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / FORWARDS_A_ROUND, 1e3 * host_s / FORWARDS_A_ROUND


def table(report: dict[str, Any]) -> list[str]:
    """Ways by case, then the longest kernels of each."""
    lines = []
    for one in report["cases"]:
        power = one["device"]["power_w"]
        watts = "" if power is None else f", {power['mean']:.0f} W"
        lines.append(f"{one['case']['name']}, {one['rows']} rows{watts}")
        base = one["ways"][0]["ms"]
        for way in one["ways"]:
            lines.append(
                f"  {way['name']:42} {way['ms']:8.3f} ms {100 * (way['ms'] / base - 1):+6.2f} %  host "
                f"{way['host_ms']:6.3f} ms"
            )
        for row in one["by_kernel"][:12]:
            lines.append(f"    {row['us']:9.1f} us {row['launches']:6.1f} x {row['kernel']}")
    return lines


@click.command(cls=GpuCommand)
@click.option("--model", type=click.Choice(sorted(PRESETS)), default="llama-3.1-8b", show_default=True)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=12, show_default=True, help="Turns of each way."
)
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
@torch.inference_mode()
def main(model: str, rounds: int, output_json: Path) -> None:
    """Measure, print a table and write the JSON."""
    check_result_file(output_json, overwrite=True)
    torch.manual_seed(0)
    bench = Bench(PRESETS[model], CASES)
    report: dict[str, Any] = {"model": model, "rounds": rounds, "cases": []}
    try:
        with torch.cuda.stream(bench.stream):
            bench.graphs.capture(progress=False)
            warm_up = next(iter(bench.ways(CASES[1]).values()))
            end_s = time.perf_counter() + WARM_UP_S
            while time.perf_counter() < end_s:
                warm_up()
                torch.cuda.synchronize()
            for case in CASES:
                report["cases"].append(bench.measure(case, rounds))
    finally:
        report["provenance"] = dataclasses.asdict(collect_provenance("cuda"))
        write_result_file(output_json, json.dumps(report, indent=1))
        click.echo("\n".join(table(report)))


if __name__ == "__main__":
    main()
