"""Captured pieces of short forwards: what an eager one launches kernel by kernel, in one call a layer.

An eager forward costs the host about 200 µs a layer, whatever its size; a short one would wait for that on the device.
How long short is depends on the model: :func:`~bullet_graph.graphs.key.row_buckets`.
"""

import time
from collections.abc import Mapping
from itertools import pairwise

import torch

from bullet_graph.graphs.collector import paused_collector
from bullet_graph.graphs.key import bucket_for, worthwhile_buckets
from bullet_graph.graphs.report import CaptureReport
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.ops import LayerOps
from bullet_graph.models.pieces import LayerPieces
from bullet_graph.models.progress import progress_bar

_TIMED_REPLAYS = 5


class LayerGraphs:
    """Captures :class:`~bullet_graph.models.pieces.LayerPieces` for rising numbers of rows and replays what fits.

    Args:
        decoder: weights and cache.
        ops: how the steps of a layer are computed.
        buckets: numbers of rows to capture, rising; longer forwards will not be asked for.

    Attributes:
        pieces: what is captured; between replays, its buffers are the caller's to fill and read.
        buckets: numbers of rows to pad a forward to, rising; once captured, those that are faster than all larger ones.
    """

    def __init__(self, decoder: Decoder, ops: LayerOps, *, buckets: tuple[int, ...]) -> None:
        self.buckets = buckets
        self._num_layers = decoder.config.num_layers
        self.pieces = LayerPieces(decoder, ops, self.buckets[-1] if self.buckets else 0)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, *, progress: bool) -> CaptureReport:
        """Capture every piece for every number of rows on the current stream, which must see the whole GPU."""
        start_s = time.perf_counter()
        free_before, _ = torch.cuda.mem_get_info()
        total = len(self.buckets) * self._num_layers
        with progress_bar(progress, total=total, desc="Capturing layers", unit="graph") as advance:
            for rows in self.buckets[::-1]:
                for layer in range(self._num_layers):
                    self.capture_piece(rows, layer)
                    advance(1)
        self.choose_buckets({rows: self.time_ms(rows) for rows in self.buckets})
        torch.cuda.synchronize()
        free_after, _ = torch.cuda.mem_get_info()
        return CaptureReport(
            num_graphs=total,
            compile_seconds=0.0,
            capture_seconds=time.perf_counter() - start_s,
            num_bytes=free_before - free_after,
        )

    def capture_piece(self, rows: int, layer: int) -> None:
        """Capture one piece on the current stream, which must see the whole GPU; a size's layers in their order."""
        if layer == 0:
            # Kernels are loaded on first use, which a capture may not; all layers use the same.
            self.pieces.clear()
            self.pieces.run(min(1, self._num_layers - 1), rows)
        graph = torch.cuda.CUDAGraph()
        with paused_collector():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self.pieces.run(layer, rows)
            finally:
                graph.capture_end()
        self._graphs[rows, layer] = graph

    def choose_buckets(self, times_ms: Mapping[int, float]) -> None:
        """From now on use no size that is slower than a larger one.

        Args:
            times_ms: of a piece, by its rows; of every size.
        """
        self.buckets = worthwhile_buckets(times_ms)

    def time_ms(self, rows: int) -> float:
        """Time of one piece, the least of several, on the current stream; nothing else should run on the GPU."""
        self.pieces.clear()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED_REPLAYS + 1)]
        events[0].record()
        for event in events[1:]:
            self.replay(self._num_layers - 1, rows)
            event.record()
        events[-1].synchronize()
        times: list[float] = [start.elapsed_time(end) for start, end in pairwise(events)]
        return min(times)

    def bucket(self, rows: int) -> int | None:
        """The captured number of rows to pad ``rows`` to; None for more than any holds, and while it is not captured.

        Before it is, a forward is not padded to a larger number instead: its time grows with its rows.
        """
        if not self.buckets or rows > self.buckets[-1]:
            return None
        bucket = bucket_for(rows, self.buckets)
        return bucket if (bucket, self._num_layers - 1) in self._graphs else None

    def replay(self, layer: int, bucket: int) -> None:
        """Enqueue the piece that ends with the layer's rows."""
        self._graphs[bucket, layer].replay()
