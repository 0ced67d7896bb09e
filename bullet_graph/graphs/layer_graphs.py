"""Captured pieces of short forwards: what an eager one launches kernel by kernel, in one call a layer.

An eager forward costs the host about 200 µs a layer, whatever its size; a short one would wait for that on the device.
"""

import time
from itertools import pairwise

import torch

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
        worthwhile: those of them that were found worthwhile here before, which alone are then captured; None times all.

    Attributes:
        pieces: what is captured; between replays, its buffers are the caller's to fill and read.
        buckets: numbers of rows to pad a forward to, rising; once captured, those that are faster than all larger ones.
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: LayerOps,
        *,
        buckets: tuple[int, ...],
        worthwhile: tuple[int, ...] | None = None,
    ) -> None:
        self.buckets = buckets if worthwhile is None else worthwhile
        self._is_tuned = worthwhile is not None
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
                # Kernels are loaded on first use, which a capture may not; all layers use the same.
                self.pieces.run(min(1, self._num_layers - 1), rows)
                for layer in range(self._num_layers):
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    try:
                        self.pieces.run(layer, rows)
                    finally:
                        graph.capture_end()
                    self._graphs[rows, layer] = graph
                    advance(1)
        if not self._is_tuned:
            self.buckets = worthwhile_buckets({rows: self._time_ms(rows) for rows in self.buckets})
        torch.cuda.synchronize()
        free_after, _ = torch.cuda.mem_get_info()
        return CaptureReport(
            num_graphs=total,
            compile_seconds=0.0,
            capture_seconds=time.perf_counter() - start_s,
            num_bytes=free_before - free_after,
        )

    def _time_ms(self, rows: int) -> float:
        """Of one piece, the least of several."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED_REPLAYS + 1)]
        events[0].record()
        for event in events[1:]:
            self.replay(self._num_layers - 1, rows)
            event.record()
        events[-1].synchronize()
        times: list[float] = [start.elapsed_time(end) for start, end in pairwise(events)]
        return min(times)

    def bucket(self, rows: int) -> int | None:
        """The captured number of rows that holds ``rows``; None for more than any does, and before :meth:`capture`."""
        if not self._graphs or rows > self.buckets[-1]:
            return None
        return bucket_for(rows, self.buckets)

    def replay(self, layer: int, bucket: int) -> None:
        """Enqueue the piece that ends with the layer's rows."""
        self._graphs[bucket, layer].replay()
