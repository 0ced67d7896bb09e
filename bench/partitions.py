"""Decode and prefill by SM count, alone and side by side, with the engine's own kernels.

    python bench/partitions.py --backend smctrl --output-json bench/results/h200/sm_scaling.json

Each point runs for `--seconds` after a warm-up, decode and prefill alone and together in turn, so that what is compared
has met the same clocks. A decode step has `--batch-size` rows at `--context` tokens; a prefill forward is one prompt
of `--prompt` tokens. Rates are counted from CUDA events of work that finished inside the window.
"""

import dataclasses
import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.graphs.decode_graph import DecodeGraphs, DecodeInputs
from bullet_graph.graphs.key import GraphKey
from bullet_graph.kernels.memory import KVCache
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.models.decoder import Decoder, cos_sin_table
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import dummy_weights
from bullet_graph.partition.backend import PartitionBackend, open_backend
from bullet_graph.partition.masks import SMS_PER_TPC, WHOLE_GPU, SmPartition
from bullet_graph.perf.energy import DeviceMonitor
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.runtime.eager_lane import EagerLane
from bullet_graph.runtime.rows import lay_out
from bullet_graph.runtime.step import PrefillBatch

DEVICE = torch.device("cuda")
AHEAD = 2
"""Steps in flight on each lane, as the engine has."""


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        decode_sms: SMs of the decode lane, None when it does not run.
        prefill_sms: likewise.
        grid_follows: whether attention's grid was made for the partition.
        decode_step_ms: median.
        prefill_tokens_per_s: tokens of forwards that finished, over the time they took.
        device: clocks and power meanwhile.
    """

    decode_sms: int | None
    prefill_sms: int | None
    grid_follows: bool
    decode_step_ms: float | None
    prefill_tokens_per_s: float | None
    device: dict[str, object]


class Lane:
    """Keeps a stream fed and notes when each piece of work finished."""

    def __init__(self, stream: torch.cuda.Stream, launch: Callable[[], None]) -> None:
        self._stream = stream
        self._launch = launch
        self._pending: deque[torch.cuda.Event] = deque()
        self._done: list[torch.cuda.Event] = []

    def feed(self) -> None:
        while self._pending and self._pending[0].query():
            self._done.append(self._pending.popleft())
        if len(self._pending) < AHEAD:
            with torch.cuda.stream(self._stream):
                self._launch()
                event = torch.cuda.Event(enable_timing=True)
                event.record()
            self._pending.append(event)

    def intervals_ms(self) -> list[float]:
        """Times between one finish and the next; the first ones, from before the lanes ran evenly, left out."""
        ends = self._done[2:]
        return [a.elapsed_time(b) for a, b in itertools.pairwise(ends)]


class Workbench:
    """A model, its cache, and both lanes' buffers."""

    def __init__(self, model: str, batch_size: int, context: int, prompt: int, *, grid_follows: bool) -> None:
        config = PRESETS[model]
        decode_blocks, prefill_blocks = (
            batch_size * (context // KV_BLOCK_TOKENS + 1),
            prompt // KV_BLOCK_TOKENS + 1,
        )
        num_blocks = 1 + decode_blocks + prefill_blocks
        weights = dummy_weights(config, dtype=torch.bfloat16, device=DEVICE, seed=0)
        cache = KVCache(
            config, num_blocks=num_blocks, block_tokens=KV_BLOCK_TOKENS, dtype=torch.bfloat16, device=DEVICE
        )
        for layer in range(config.num_layers):
            for half in cache.layer(layer):
                half.normal_()
        decoder = Decoder(config, weights, cache, cos_sin_table(config, max(context, prompt) + 1, DEVICE))
        state = SamplingState(batch_size + 2, DEVICE)
        self.graphs = DecodeGraphs(
            decoder,
            state,
            max_batch_size=batch_size,
            num_kv_blocks=num_blocks,
            padding_slot=batch_size,
            grid_follows_partition=grid_follows,
        )
        self.eager = EagerLane(decoder, state, max_num_seqs=1, max_rows=prompt, num_kv_blocks=num_blocks)
        positions = np.full(batch_size, context, dtype=np.int32)
        indptr = np.arange(batch_size + 1, dtype=np.int32) * (context // KV_BLOCK_TOKENS + 1)
        # Blocks in random order, as a cache has them after hours of service.
        blocks = (1 + np.random.default_rng(0).permutation(decode_blocks)).astype(np.int32)
        kv_slots = blocks[indptr[1:] - 1] * KV_BLOCK_TOKENS + positions % KV_BLOCK_TOKENS
        self.decode_inputs = DecodeInputs(
            np.arange(batch_size, dtype=np.int32), positions, kv_slots.astype(np.int32), indptr, blocks
        )
        self.prefill_rows = lay_out(
            PrefillBatch(
                slots=np.array([batch_size + 1], dtype=np.int32),
                token_ids=np.random.default_rng(1).integers(0, config.vocab_size, prompt).astype(np.int32),
                q_indptr=np.array([0, prompt], dtype=np.int32),
                starts=np.zeros(1, dtype=np.int32),
                kv_indptr=np.array([0, prefill_blocks], dtype=np.int32),
                kv_indices=np.arange(1 + decode_blocks, num_blocks, dtype=np.int32),
                samples=np.ones(1, dtype=np.bool_),
            ),
            None,
            KV_BLOCK_TOKENS,
        )
        self.batch_size, self.prompt, self.grid_follows = batch_size, prompt, grid_follows
        torch.cuda.synchronize()

    def measure(
        self,
        backend: PartitionBackend,
        partition: SmPartition,
        *,
        decode: bool,
        prefill: bool,
        seconds: float,
    ) -> Point:
        lanes: dict[str, Lane] = {}
        if decode:
            stream = torch.cuda.ExternalStream(backend.stream("decode", partition))
            lanes["decode"] = Lane(stream, lambda: self._decode(partition))
        if prefill:
            stream = torch.cuda.ExternalStream(backend.stream("prefill", partition))
            lanes["prefill"] = Lane(stream, self._prefill)
        with DeviceMonitor.for_gpu(str(torch.cuda.get_device_properties(0).uuid)) as monitor:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                for lane in lanes.values():
                    lane.feed()
            torch.cuda.synchronize()
        steps = lanes["decode"].intervals_ms() if decode else []
        forwards = lanes["prefill"].intervals_ms() if prefill else []
        point = Point(
            decode_sms=len(backend.expected_sms("decode", partition)) if decode else None,
            prefill_sms=len(backend.expected_sms("prefill", partition)) if prefill else None,
            grid_follows=self.grid_follows,
            decode_step_ms=float(np.median(steps)) if steps else None,
            prefill_tokens_per_s=self.prompt * len(forwards) / sum(forwards) * 1e3 if forwards else None,
            device=dataclasses.asdict(monitor.report),
        )
        click.echo(
            f"decode on {point.decode_sms} SMs: {point.decode_step_ms} ms; "
            f"prefill on {point.prefill_sms}: {point.prefill_tokens_per_s} tokens/s",
            err=True,
        )
        return point

    def capture(self, backend: PartitionBackend, partitions: list[SmPartition]) -> None:
        def stream_for(partition: SmPartition) -> torch.cuda.Stream:
            return torch.cuda.ExternalStream(backend.stream("decode", partition))

        self.graphs.capture({}, stream_for, progress=False)
        for partition in partitions:
            self.graphs.capture_one(GraphKey(self.batch_size, partition), stream_for(partition))
        torch.cuda.synchronize()

    def _decode(self, partition: SmPartition) -> None:
        self.graphs.run(self.decode_inputs, partition)

    def _prefill(self) -> None:
        self.eager.run(self.prefill_rows)


@click.command()
@click.option("--model", default="llama-3.1-8b", show_default=True)
@click.option("--backend", default="auto", show_default=True)
@click.option("--decode-sms", default="16,24,32,48,64,80,96,112", show_default=True)
@click.option("--batch-size", default=64, show_default=True)
@click.option("--context", default=1000, show_default=True)
@click.option("--prompt", default=2048, show_default=True, help="Tokens of a prefill forward.")
@click.option("--seconds", default=2.0, show_default=True, help="Of each measurement.")
@click.option("--grid-follows/--grid-of-device", default=True, show_default=True, help="Attention's grid.")
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
@torch.inference_mode()
def main(
    model: str,
    backend: str,
    decode_sms: str,
    batch_size: int,
    context: int,
    prompt: int,
    seconds: float,
    grid_follows: bool,
    output_json: Path,
) -> None:
    """Measure every size alone and side by side."""
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    num_tpcs = num_sms // SMS_PER_TPC
    partitions = [
        SmPartition(int(sms) // SMS_PER_TPC, num_tpcs - int(sms) // SMS_PER_TPC)
        for sms in decode_sms.split(",")
    ]
    torch.cuda.init()
    opened, why = open_backend(backend, partitions)
    click.echo(why, err=True)
    bench = Workbench(model, batch_size, context, prompt, grid_follows=grid_follows)
    bench.capture(opened, [WHOLE_GPU, *partitions])
    bench.measure(opened, WHOLE_GPU, decode=True, prefill=True, seconds=3 * seconds)
    points: list[Point] = []
    for partition in [WHOLE_GPU, *partitions]:
        points.append(bench.measure(opened, partition, decode=True, prefill=False, seconds=seconds))
        points.append(bench.measure(opened, partition, decode=False, prefill=True, seconds=seconds))
        if partition != WHOLE_GPU:
            points.append(bench.measure(opened, partition, decode=True, prefill=True, seconds=seconds))
    whole_decode, whole_prefill = points[0].decode_step_ms, points[1].prefill_tokens_per_s
    table = Table("decode SMs", "prefill SMs", "decode step ms", "prefill tok/s", "sum of shares", "MHz", "W")
    for point in points:
        shares = None
        if point.decode_step_ms and point.prefill_tokens_per_s and whole_decode and whole_prefill:
            shares = whole_decode / point.decode_step_ms + point.prefill_tokens_per_s / whole_prefill
        clock, power = (point.device[name] for name in ("sm_clock_mhz", "power_w"))
        table.add_row(
            *(
                "" if value is None else text.format(value)
                for text, value in (
                    ("{}", point.decode_sms),
                    ("{}", point.prefill_sms),
                    ("{:.2f}", point.decode_step_ms),
                    ("{:,.0f}", point.prefill_tokens_per_s),
                    ("{:.2f}", shares),
                    ("{:.0f}", clock and clock["mean"]),
                    ("{:.0f}", power and power["mean"]),
                )
            )
        )
    Console().print(table)
    report = {
        "model": model,
        "backend": why,
        "batch_size": batch_size,
        "context": context,
        "prompt": prompt,
        "seconds": seconds,
        "points": [dataclasses.asdict(point) for point in points],
        "provenance": dataclasses.asdict(collect_provenance("cuda")),
    }
    output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
