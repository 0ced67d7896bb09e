"""A forward cut at its attentions: what lies between two of them, over buffers at fixed addresses.

Attention alone depends on the sequences' lengths. All else depends on the number of rows, so that it can be captured
once for each number and replayed.
"""

from torch import Tensor

from bullet_graph.models.attention import LayerRows
from bullet_graph.models.decoder import Decoder, Hidden, attention_output
from bullet_graph.models.ops import LayerOps, RowInputs


class LayerPieces:
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
                layer.o,
                layer.post_norm,
                layer.gate_up,
                layer.down,
                eps,
            )
        layer = layers[layer_index]
        normed, _ = ops.add_rms_norm(x, residual, layer.input_norm, eps, summed=self.residual[:rows])
        keys, values = decoder.cache.layer(layer_index)
        ops.rope_and_cache(
            ops.linear(normed, layer.qkv, layer.qkv_bias, out=self._qkv[:rows]),
            RowInputs(self._positions[:rows], self._kv_slots[:rows], decoder.cos_sin),
            keys,
            values,
            layer,
            config,
            out=self._queries[:rows],
        )
