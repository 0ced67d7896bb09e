"""Piecewise CUDA graphs: a short forward is cut at its attentions, and what lies between two of them is captured.

Attention alone depends on the sequences' lengths. All else depends on the number of rows, so it is captured once for
each number and replayed. An eager forward costs the host about 200 µs a layer, whatever its size; a short one would
wait for that on the device. :func:`~bullet_graph.graphs.key.row_buckets` says how long short is.
"""

import time
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from bullet_graph.graphs.collector import paused_collector
from bullet_graph.graphs.key import bucket_for, worthwhile_buckets
from bullet_graph.graphs.report import CaptureReport
from bullet_graph.kernels.attention import LayerRows
from bullet_graph.kernels.ops import LayerOps, RowInputs
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.decoder import Decoder, Hidden
from bullet_graph.models.layers import attention_output
from bullet_graph.models.progress import progress_bar

_TIMED_REPLAYS = 5


def piecewise_buffer_bytes(config: ModelConfig, max_rows: int, *, dtype_bytes: int) -> int:
    """Buffers of :class:`~bullet_graph.graphs.piecewise.PiecewiseForward` of up to ``max_rows`` rows.

    Activations and their residual, qkv, queries and what attention made of them; positions and cache slots in int32.
    """
    columns = 2 * config.hidden_size + (config.q_size + 2 * config.kv_size) + 2 * config.q_size
    return max_rows * (columns * dtype_bytes + 2 * 4)


def piecewise_scratch_bytes(config: ModelConfig, max_rows: int, *, dtype_bytes: int) -> int:
    """What captured pieces of forwards of up to ``max_rows`` rows compute in, the graphs themselves left out.

    Besides their buffers that is the intermediate results of one piece, in a pool that all of them share: at most three
    of [rows, hidden_size] at a time, and gate, up and their product.
    """
    columns = 3 * config.hidden_size + 3 * config.intermediate_size
    return (
        piecewise_buffer_bytes(config, max_rows, dtype_bytes=dtype_bytes) + max_rows * columns * dtype_bytes
    )


class PiecewiseForward:
    """Pieces of a forward of up to ``max_rows`` rows; one forward at a time.

    Piece ``i`` ends with the rows of layer ``i``, whose keys and values it has written into the cache; from the
    second on, it begins with what attention gave in the layer before. So a forward is: :meth:`load`, then for each
    layer its piece and its attention from :meth:`rows` into ``attended``. What follows the last attention is left to
    the caller, who may want but a few of the rows.

    Args:
        decoder: weights and cache.
        ops: how the steps of a layer are computed.
        max_rows: size of the buffers.

    Attributes:
        attended: [max_rows, num_heads, head_dim], where attention puts what the next piece reads.
        residual: [max_rows, hidden_size], of the piece that ran last.
    """

    def __init__(self, decoder: Decoder, ops: LayerOps, max_rows: int) -> None:
        self._decoder = decoder
        self._ops = ops
        config, weights = decoder.config, decoder.weights
        # Zeroed: rows beyond a forward's own are computed as well, and must stay finite.
        self._x = weights.embed.new_zeros(max_rows, config.hidden_size)
        self.residual = self._x.clone()
        self._qkv = weights.embed.new_zeros(max_rows, config.q_size + 2 * config.kv_size)
        self._queries = weights.embed.new_zeros(max_rows, config.num_heads, config.head_dim)
        self.attended = self._queries.clone()
        self._positions = decoder.cos_sin.new_zeros(max_rows).int()
        self._kv_slots = self._positions.clone()

    def clear(self) -> None:
        """Forget the last forward: what runs next without :meth:`load` writes into the cache's padding alone."""
        for buffer in (
            *(self._x, self.residual, self._qkv, self._queries, self.attended),
            *(self._positions, self._kv_slots),
        ):
            buffer.zero_()

    def load(self, hidden: Hidden, positions: Tensor, kv_slots: Tensor) -> None:
        """Take a forward's inputs.

        Args:
            hidden: activations before the first layer, [rows].
            positions: at least [rows]; what is more is of padding.
            kv_slots: likewise; those of padding belong to no sequence.
        """
        rows = len(hidden.x)
        self._x[:rows].copy_(hidden.x)
        self.residual[:rows].copy_(hidden.residual)
        self._positions[: len(positions)].copy_(positions)
        self._kv_slots[: len(kv_slots)].copy_(kv_slots)

    def rows(self, num_rows: int) -> LayerRows:
        """The first ``num_rows`` rows of the piece that ran last."""
        return LayerRows.of(self._queries[:num_rows], self._qkv[:num_rows], self._decoder.config)

    def run(self, layer_index: int, rows: int) -> None:
        """Compute a piece for the first ``rows`` rows."""
        decoder, ops = self._decoder, self._ops
        config, layers = decoder.config, decoder.weights.layers
        eps = config.rms_norm_eps
        x, residual = self._x[:rows], self.residual[:rows]
        if layer_index > 0:
            layer = layers[layer_index - 1]
            x, residual = attention_output(
                ops,
                self.attended[:rows].flatten(1),
                residual,
                *layer.output_weights,
                eps,
            )
        layer = layers[layer_index]
        normed, _ = ops.add_rms_norm(x, residual, layer.input_norm, eps, summed=self.residual[:rows])
        keys, values = decoder.cache.layer(layer_index)
        qkv = layer.attention.qkv
        ops.rope_and_cache(
            ops.linear(normed, qkv.weight, qkv.bias, out=self._qkv[:rows]),
            RowInputs(self._positions[:rows], self._kv_slots[:rows], decoder.cos_sin),
            keys,
            values,
            layer.attention.head_norms,
            config,
            out=self._queries[:rows],
        )


class PiecewiseGraphs:
    """Captures a :class:`PiecewiseForward` for rising numbers of rows, and replays what fits.

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
        self.pieces = PiecewiseForward(decoder, ops, self.buckets[-1] if self.buckets else 0)
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
