"""Piecewise CUDA graphs: a short forward is cut at its attentions, and each piece between two of them is captured.

Only attention depends on the sequences' lengths; the pieces depend on the number of rows alone. Launching a layer
kernel by kernel costs the host about 200 µs, for which the device would wait in a short forward
(:func:`~bullet_graph.graphs.key.row_buckets`).
"""

from itertools import pairwise

import torch
from torch import Tensor

from bullet_graph.graphs.key import smallest_holding, worthwhile_buckets
from bullet_graph.kernels.attention import LayerRows
from bullet_graph.kernels.gpu import captured
from bullet_graph.kernels.ops import RowInputs, TorchOps
from bullet_graph.models.decoder import Decoder, Hidden
from bullet_graph.models.layers import attention_input, attention_output
from bullet_graph.models.progress import progress_bar

_TIMED_REPLAYS = 5


class PiecewiseForward:
    """The pieces of a forward, over buffers at fixed addresses; one forward at a time.

    Piece ``i`` ends with the queries of layer ``i``, and writes that layer's keys and values into the cache. From the
    second on, a piece begins with the attention output of the layer before. A forward is: :meth:`load`, then for each
    layer its piece and its attention, from :meth:`rows` into ``attended`` [max_rows, num_heads, head_dim]. The caller
    computes what follows the last attention, for the rows it needs; ``residual`` [max_rows, hidden_size] is that of the
    piece that ran last.
    """

    def __init__(self, decoder: Decoder, ops: TorchOps, max_rows: int) -> None:
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
        """Zero the buffers, so that a piece writes only into the cache's padding block until :meth:`load`."""
        activations = (self._x, self.residual, self._qkv, self._queries, self.attended)
        for buffer in (*activations, self._positions, self._kv_slots):
            buffer.zero_()

    def load(self, hidden: Hidden, positions: Tensor, kv_slots: Tensor) -> None:
        """Take a forward's embeddings, and positions and cache slots of its rows and of padding."""
        rows = len(hidden.x)
        self._x[:rows].copy_(hidden.x)
        self.residual[:rows].copy_(hidden.residual)
        self._positions[: len(positions)].copy_(positions)
        self._kv_slots[: len(kv_slots)].copy_(kv_slots)

    def rows(self, num_rows: int) -> LayerRows:
        """The first rows of the piece that ran last."""
        return LayerRows.of(self._queries[:num_rows], self._qkv[:num_rows])

    def run(self, layer_index: int, rows: int) -> None:
        """Compute a piece for the first ``rows`` rows."""
        decoder, ops = self._decoder, self._ops
        layers, eps = decoder.weights.layers, decoder.config.rms_norm_eps
        x, residual = self._x[:rows], self.residual[:rows]
        if layer_index > 0:
            layer = layers[layer_index - 1]
            x, residual = attention_output(ops, self.attended[:rows].flatten(1), residual, *layer.output_weights, eps)
        layer = layers[layer_index]
        summed, out = self.residual[:rows], self._qkv[:rows]
        qkv, _ = attention_input(ops, x, residual, *layer.input_weights, eps, summed=summed, out=out)
        ops.rope_and_cache(
            qkv,
            RowInputs(self._positions[:rows], self._kv_slots[:rows], decoder.cos_sin[layer.attention.rope]),
            decoder.cache.layer(layer_index),
            layer.attention.head_norms,
            out=self._queries[:rows],
        )


class PiecewiseGraphs:
    """CUDA graphs of a :class:`PiecewiseForward`, whose buffers the caller fills and reads between replays.

    ``buckets`` are the numbers of rows to pad a forward to, rising; once timed, those that are faster than all larger
    ones. ``untimed`` are those still to be timed: none where the buckets ``are_tuned``, that is known to be worthwhile.
    """

    def __init__(self, decoder: Decoder, ops: TorchOps, *, buckets: tuple[int, ...], are_tuned: bool = False) -> None:
        self.buckets = buckets
        self.untimed = [] if are_tuned else list(buckets)
        self._times_ms: dict[int, float] = {}
        self._num_layers = decoder.config.num_layers
        self.pieces = PiecewiseForward(decoder, ops, self.buckets[-1] if self.buckets else 0)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, *, progress: bool) -> None:
        """Capture and time all pieces on the current stream, which must have all SMs."""
        total = len(self.buckets) * self._num_layers
        with progress_bar(progress, total=total, desc="Capturing layers", unit="graph") as advance:
            for rows in self.buckets[::-1]:
                for layer in range(self._num_layers):
                    self.capture_piece(rows, layer)
                    advance(1)
        while self.untimed:
            self.time_next()

    def capture_piece(self, rows: int, layer: int) -> None:
        """Capture one piece on the current stream, which must have all SMs; layer 0 of each size comes first."""
        if layer == 0:
            # Kernels are loaded on first use, which a capture does not allow; all layers use the same.
            self.pieces.clear()
            self.pieces.run(min(1, self._num_layers - 1), rows)
        with captured(self._pool) as graph:
            self.pieces.run(layer, rows)
        self._graphs[rows, layer] = graph

    def time_next(self) -> None:
        """Time a piece of the next size on the current stream, with nothing else on the GPU.

        After the last, no size is used that is slower than a larger one.
        """
        rows = self.untimed.pop(0)
        self.pieces.clear()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED_REPLAYS + 1)]
        events[0].record()
        for event in events[1:]:
            self.replay(self._num_layers - 1, rows)
            event.record()
        events[-1].synchronize()
        self._times_ms[rows] = min(start.elapsed_time(end) for start, end in pairwise(events))
        if not self.untimed:
            self.buckets = worthwhile_buckets(self._times_ms)

    def bucket(self, rows: int) -> int | None:
        """The number of rows to pad ``rows`` to; None if it is not captured yet, or ``rows`` exceeds all buckets."""
        # Not padded to a larger bucket that is captured: a forward's time grows with its rows.
        bucket = smallest_holding(rows, self.buckets)
        return bucket if (bucket, self._num_layers - 1) in self._graphs else None

    def replay(self, layer: int, bucket: int) -> None:
        """Enqueue the piece that ends with the layer's rows."""
        self._graphs[bucket, layer].replay()
