"""Short sustained measurements on the GPU: each lane's stream is kept busy, and CUDA events time its work.

With tensor parallelism, rank 0 decides when to launch, and the others replay its launches in order.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import torch

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.graphs.decode_graph import DecodeGraphs
from bullet_graph.graphs.key import GraphKey, bucket_for, row_buckets
from bullet_graph.graphs.piecewise import PiecewiseGraphs
from bullet_graph.kernels.communicator import ALONE, Communicators
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.progress import progress_bar
from bullet_graph.partition.backend import PartitionBackend, open_backend
from bullet_graph.partition.masks import WHOLE_GPU, Lane, SmPartition, partition_of
from bullet_graph.perf.profile_plan import MIN_INTERVALS, WARM_S, ProfileLimits
from bullet_graph.perf.table import ProfilePoint
from bullet_graph.runtime.build import Start, decoder_while_loading, partitions_of
from bullet_graph.runtime.cuda import decode_inputs, lane_stream
from bullet_graph.runtime.eager_lane import EagerLane
from bullet_graph.runtime.profile import Prepared
from bullet_graph.runtime.ranks import Message, Ranks
from bullet_graph.runtime.rows import Rows, lay_out, make_batches
from bullet_graph.runtime.step import DecodeBatch, PrefillBatch

_AHEAD = 2
"""Launches in flight on each lane, as in the engine."""
_SLICE_LAYERS = 8
"""Layers of a prefill launch beside decode, as in the engine: until the host has launched them, decode waits for it."""

Span = tuple[int, int]
"""The first and the last of some launches, by their numbers."""


class FedLane:
    """Keeps a stream busy with what ``launch`` enqueues, and records when each launch finished.

    ``num_launches`` in a row make a forward. ``announce`` is called before each launch that :meth:`feed` makes.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream,
        launch: Callable[[], object],
        announce: Callable[[], object] = lambda: None,
        num_launches: int = 1,
    ) -> None:
        self._stream = stream
        self._launch = launch
        self._announce = announce
        self._num_launches = num_launches
        self._enough = MIN_INTERVALS * num_launches
        self._ends: list[torch.cuda.Event] = []
        self._done_s: list[float] = []

    @property
    def has_enough(self) -> bool:
        return len(self._done_s) > self._enough

    def poll(self) -> None:
        """Record finished work."""
        while self._num_pending and self._ends[len(self._done_s)].query():
            self._done_s.append(time.perf_counter())

    def feed(self, until_s: float) -> None:
        """Launch if there is room and the work in flight may finish before ``until_s``."""
        if self._num_pending == _AHEAD or (len(self._ends) > self._enough and self._busy_until_s() > until_s):
            return
        self._announce()
        self.launch()

    def launch(self) -> None:
        with torch.cuda.stream(self._stream):
            self._launch()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._ends.append(event)

    def span(self, from_s: float) -> Span:
        """The launches that finished from ``from_s`` on, or the last few, in whole forwards."""
        last = len(self._done_s) - 1
        count = last - min(bisect_left(self._done_s, from_s), last - self._enough)
        return last - count + count % self._num_launches, last

    def interval_ms(self, span: Span) -> float:
        """Mean time between the end of one forward and the next."""
        first, last = span
        return float(self._ends[first].elapsed_time(self._ends[last])) / (last - first) * self._num_launches

    @property
    def _num_pending(self) -> int:
        return len(self._ends) - len(self._done_s)

    def _busy_until_s(self) -> float:
        if len(self._done_s) < 2:
            return 0.0
        before_s, last_s = self._done_s[-2:]
        return last_s + self._num_pending * (last_s - before_s)


def run_burst(lanes: Sequence[FedLane], burst_s: float) -> tuple[Span, ...]:
    """Keep all lanes busy for ``burst_s`` after a warm-up, or longer if needed; returns the launches to time."""
    start_s = time.perf_counter()
    end_s = start_s + WARM_S + burst_s
    while (now_s := time.perf_counter()) < end_s or not all(lane.has_enough for lane in lanes):
        for lane in lanes:
            lane.poll()
            # A lane that has enough continues while the other needs it: both must run at once.
            needed = any(not other.has_enough for other in lanes if other is not lane)
            lane.feed(float("inf") if needed else max(end_s, now_s))
    torch.cuda.synchronize()
    return tuple(lane.span(start_s + WARM_S) for lane in lanes)


class Workbench:
    """A model, its cache, filled with random numbers, and both lanes' buffers, which measure points up to limits.

    ``ranks`` are those that the bench of rank 0 leads; theirs :meth:`follow` it.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: PartitionBackend,
        *,
        limits: ProfileLimits,
        seed: int,
        communicators: Communicators = ALONE,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self.num_ranks = decoder.config.num_ranks
        self._num_layers = decoder.config.num_layers
        device = decoder.cos_sin.device
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._backend = backend
        self.device = device
        max_batch_size = limits.max_batch_size
        for layer in range(decoder.config.num_layers):
            for half in decoder.cache.layer(layer):
                # By way of the model's dtype: no numbers are drawn in FP8.
                half.copy_(torch.randn(half.shape, dtype=decoder.weights.embed.dtype, device=device))
        state = SamplingState(max_batch_size + 2, decoder.config.vocab_size, device)
        self._prefill_slot = max_batch_size + 1
        self._graphs = DecodeGraphs(
            decoder, state, max_batch_size=max_batch_size, communicator=communicators.get("decode")
        )
        max_rows = limits.max_tokens + max_batch_size
        buckets = row_buckets(max_rows, decoder.config)
        # Of both, as one forward at a time has prompt rows.
        communicator = communicators.get("prefill")
        ops = TritonOps(Gpu.of(device), communicator)
        # Ranks would time them differently.
        self._layer_graphs = PiecewiseGraphs(decoder, ops, buckets=buckets, are_tuned=communicator is not None)
        self._eager = EagerLane(
            decoder,
            state,
            max_num_seqs=max_batch_size + 1,  # a chunk's prompt is sampled besides
            max_rows=max_rows,
            graphs=self._layer_graphs,
            communicator=communicator,
        )
        rng = np.random.default_rng(seed)
        # In random order, as a cache has its blocks after hours of service; block 0 is padding.
        self._blocks = (1 + rng.permutation(decoder.cache.num_blocks - 1)).astype(np.int32)
        self._tokens = rng.integers(0, decoder.config.vocab_size, limits.max_tokens).astype(np.int32)
        torch.cuda.synchronize()

    def close(self) -> None:
        """Free the memory; must precede the closing of the streams, which torch asks about pinned buffers."""
        self.__dict__.clear()

    def capture(self, points: Sequence[ProfilePoint], *, progress: bool) -> int:
        """Compile, and capture the decode graphs of these points; returns their number."""
        if self._ranks is not None:
            self._ranks.send("capture", points)
        keys = {
            GraphKey(bucket_for(point.batch_size, self._graphs.batch_sizes), self._partition(point))
            for point in points
            if point.kind in ("decode", "split")
        }
        self._graphs.compile()
        # Largest first: the smaller ones then fit into its memory.
        ordered = sorted(keys, key=lambda key: (-key.batch_size, key.partition.decode_tpcs or 0))
        with progress_bar(progress, total=len(keys), desc="Capturing decode graphs", unit="graph") as advance:
            for key in ordered:
                self._graphs.capture_one(key, self._stream("decode", key.partition))
                advance(1)
        if any(point.kind == "mixed" for point in points):
            with torch.cuda.stream(self._stream("decode", WHOLE_GPU)):
                self._layer_graphs.capture(progress=progress)
        torch.cuda.synchronize()
        return len(keys)

    def measure(self, point: ProfilePoint, burst_s: float) -> tuple[float, ...]:
        """Measure a step's time once, in ms; for a split that of a decode step and that of a prefill forward.

        With several ranks, the slowest one's.
        """
        ranks = self._ranks
        if ranks is None:
            lanes = self.lanes(point)
            return _times_ms(lanes, run_burst(lanes, burst_s))

        def announce(lane: int) -> None:
            ranks.check()
            ranks.send("feed", lane)

        ranks.send("measure", point)
        lanes = self.lanes(point, announce)
        with ranks.watched():
            spans = run_burst(lanes, burst_s)
            ranks.send("times", spans)
            times = [_times_ms(lanes, spans), *(theirs for _, theirs in ranks.gather("times"))]
        return tuple(map(max, zip(*times, strict=True)))

    def follow(self, receive: Callable[[], Message], send: Callable[[Message], object]) -> None:
        """Replay what the bench of rank 0 does, until it stops."""
        lanes: list[FedLane] = []
        while True:
            match receive():
                case ("capture", points):
                    self.capture(points, progress=False)
                case ("measure", point):
                    lanes = self.lanes(point)
                case ("feed", lane):
                    lanes[lane].launch()
                case ("times", spans):
                    torch.cuda.synchronize()
                    send(("times", _times_ms(lanes, spans)))
                case _:
                    return

    def lanes(self, point: ProfilePoint, announce: Callable[[int], object] = lambda _: None) -> list[FedLane]:
        """The lanes that a point keeps busy; ``announce`` is called with a lane's index before each launch."""
        partition = self._partition(point)
        lanes: list[FedLane] = []
        if point.kind in ("decode", "split"):
            inputs = decode_inputs(lay_out(None, self._decode_rows(point), KV_BLOCK_TOKENS))
            stream = self._stream("decode", partition)
            lanes.append(FedLane(stream, lambda: self._graphs.run(inputs, partition), partial(announce, 0)))
        if point.kind == "mixed":
            # A forward with decode rows in it runs on the decode lane, as in the engine.
            mixed = lay_out(self._chunk(point), self._decode_rows(point), KV_BLOCK_TOKENS)
            stream = self._stream("decode", partition)
            lanes.append(FedLane(stream, lambda: self._eager.run(mixed), partial(announce, 0)))
        if point.kind in ("prefill", "split"):
            chunk = lay_out(self._chunk(point), None, KV_BLOCK_TOKENS)
            if point.kind == "split":
                run, num_launches = partial(next, self._slices(chunk)), -(-self._num_layers // _SLICE_LAYERS)
            else:
                # On the whole GPU as on the decode lane, with piecewise graphs.
                run, num_launches = partial(self._eager.run, chunk, whole_gpu=partition == WHOLE_GPU), 1
            lanes.append(FedLane(self._stream("prefill", partition), run, partial(announce, len(lanes)), num_launches))
        return lanes

    def _slices(self, chunk: Rows) -> Iterator[None]:
        """Forward after forward on a part of the GPU, a slice of layers at a time, as the engine launches them."""
        while True:
            forward = self._eager.begin(chunk, whole_gpu=False)
            for first in range(0, self._num_layers, _SLICE_LAYERS):
                last = first + _SLICE_LAYERS if first + _SLICE_LAYERS < self._num_layers else None
                forward = self._eager.run_layers(forward, first, last, whole_gpu=False)
                if last is None:
                    self._eager.finish(forward)
                yield

    def _stream(self, lane: Lane, partition: SmPartition) -> torch.cuda.Stream:
        return lane_stream(self._backend, lane, partition, self.device)

    def _partition(self, point: ProfilePoint) -> SmPartition:
        if point.sms is None:
            return WHOLE_GPU
        return partition_of(self.num_sms - point.sms if point.kind == "prefill" else point.sms, num_sms=self.num_sms)

    def _decode_rows(self, point: ProfilePoint) -> DecodeBatch | None:
        return make_batches((), [point.context_tokens - 1] * point.batch_size, blocks=self._blocks)[1]

    def _chunk(self, point: ProfilePoint) -> PrefillBatch | None:
        chunk = (point.cached_tokens, point.tokens, True)
        # Blocks from the end, where the decode rows' are not.
        blocks, tokens, slots = self._blocks[::-1], self._tokens[: point.tokens], [self._prefill_slot]
        return make_batches([chunk], (), blocks=blocks, token_ids=tokens, slots=slots)[0]


def _times_ms(lanes: Sequence[FedLane], spans: Sequence[Span]) -> tuple[float, ...]:
    return tuple(lane.interval_ms(span) for lane, span in zip(lanes, spans, strict=True))


@contextmanager
def open_workbench(
    prepared: Prepared, *, progress: bool, communicators: Communicators = ALONE, ranks: Ranks | None = None
) -> Iterator[tuple[Workbench, str]]:
    """Verify the partitions, load the weights and make a workbench; closes its streams after the block.

    Yields the workbench, and the back end that confines its lanes, and why. Raises PartitionError where the partitions
    cannot be made or verified, CheckpointError where the weights cannot be read.
    """
    config, runtime = prepared.config, prepared.runtime
    # Before the weights, so that a failing partition does not cost their loading.
    backend, why = open_backend(config.partition_backend, partitions_of(config, runtime), device=runtime.device.index)
    with closing(backend):
        # The bench alone holds the decoder, so that closing it frees the memory.
        bench = Workbench(
            _loaded_decoder(prepared, progress),
            backend,
            limits=prepared.limits,
            seed=config.seed,
            communicators=communicators,
            ranks=ranks,
        )
        try:
            yield bench, why
        finally:
            torch.cuda.synchronize()  # streams are closed only when their work has finished
            bench.close()


def _loaded_decoder(prepared: Prepared, progress: bool) -> Decoder:
    loading = decoder_while_loading(prepared.config, prepared.runtime, prepared.ledger, Start(progress=progress))
    with loading as (decoder, join_weights):
        join_weights()
    return decoder
