"""Step times from arithmetic alone: bytes moved, operations, and how well matrix products fill the SMs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bullet_graph.hardware import GpuSpec
from bullet_graph.perf.performance import Prediction, SplitPrediction

CHUNK_STEP_TOKENS = 64
"""Chunks are multiples of this: the matrix kernels work in tiles of 64 rows or more."""

TILE_ROWS = 128
TILE_COLUMNS = 256
EXPERT_TILE_ROWS = 64
"""Of products with experts, each of which has few rows."""

_SPLIT_STEP_SMS = 16

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Of one number in each dtype that a model may have."""

PROJECTIONS = ("qkv", "o", "gate_up", "down")
"""A layer's projections; in a model of experts, gate_up and down are those of every expert."""

FP8_BLOCK = 128
"""Rows and columns of a block of FP8 weights, and columns of FP8 activations, that share a scale."""


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """Projections whose weights are FP8 (E4M3), of all layers alike, and whose products are of FP8.

    ``blocks``: a float32 scale for each 128 × 128 block of weights, else for each output channel. ``plain`` are those
    of :data:`PROJECTIONS` that stay in 16 bits, of experts too. ``is_stored``: not quantized while loading.
    """

    blocks: bool = False
    plain: tuple[str, ...] = ()
    is_stored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The numbers of a decoder that decide its operations and memory traffic.

    ``qk_norm``: RMSNorm over each query and key head before RoPE. ``layer_windows``: see :attr:`windows`; empty means
    none in any layer. With ``num_experts``, every layer has experts instead of an MLP of ``intermediate_size``. ``fp8``
    None: all weights are in the model's dtype, as are keys and values without ``fp8_kv``. With ``num_ranks``, all sizes
    but the model's width, vocabulary and experts are those of one rank of tensor parallelism. With ``expert_parallel``,
    the ranks divide the experts among them, and each is whole on its rank.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    fp8: Fp8Weights | None = None
    fp8_kv: bool = False
    num_ranks: int = 1
    expert_parallel: bool = False

    @property
    def expert_ranks(self) -> int:
        """Ranks that the experts of a layer are divided among; 1 where each rank holds a part of every expert."""
        return self.num_ranks if self.expert_parallel else 1

    @property
    def own_experts(self) -> int:
        """Experts of a layer whose weights, or a part of them, a rank holds."""
        return self.num_experts // self.expert_ranks

    @property
    def own_experts_per_token(self) -> float:
        """How many of a row's experts a rank computes, on average."""
        return self.experts_per_token / self.expert_ranks

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the output head on a rank; the last rank's may be fewer, and are padded."""
        return -(-self.vocab_size // self.num_ranks)

    @property
    def dense_mlp_size(self) -> int:
        """Intermediate size of the MLP that all rows go through: the shared expert's in a model of experts."""
        return self.shared_expert_intermediate_size if self.num_experts else self.intermediate_size

    @property
    def mlp_result_size(self) -> int:
        """Widths of a row's intermediate results in the MLP, added up."""
        # Both as computed, and in FP8.
        copies = 1 if self.fp8 is None else 2
        routed = self.experts_per_token * (copies * self.expert_intermediate_size + self.hidden_size)
        return routed + 3 * self.dense_mlp_size + 2 * self.num_experts

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or all value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """By layer, how many of the last tokens a query attends to, its own included; None: to all."""
        return self.layer_windows or (None,) * self.num_layers

    @property
    def widest_window(self) -> int | None:
        """How many of the last tokens any layer attends to; None: one attends to all."""
        widths = [window for window in self.layer_windows if window is not None]
        return max(widths) if len(widths) == self.num_layers else None


# ---- bytes ----


def kv_cache_bytes_per_token(shape: DecoderShape, *, dtype_bytes: int) -> int:
    """Bytes of one token's keys and values in all layers; ``dtype_bytes`` are those of the model's dtype."""
    return 2 * shape.num_layers * shape.kv_size * (1 if shape.fp8_kv else dtype_bytes)


def fp8_savings(shape: DecoderShape, *, dtype_bytes: int, experts: float) -> float:
    """Bytes by which FP8 makes the weights of all layers smaller, less their scales', with so many experts a layer."""
    blocks = shape.fp8 is not None and shape.fp8.blocks

    def saved(matrices: tuple[tuple[int, int], ...]) -> int:
        scales = (-(-rows // FP8_BLOCK) * -(-depth // FP8_BLOCK) if blocks else rows for rows, depth in matrices)
        return sum(map(math.prod, matrices)) * (dtype_bytes - 1) - 4 * sum(scales)

    of_layer, of_expert = in_fp8(shape, layer_projections(shape)), in_fp8(shape, expert_projections(shape))
    return shape.num_layers * (saved(of_layer) + experts * saved(of_expert))


def attended_tokens(shape: DecoderShape, context_tokens: float) -> float:
    """Tokens that a row attends to, as a mean over layers: ``context_tokens`` in those without a window."""
    limits = (context_tokens if window is None else min(window, context_tokens) for window in shape.windows)
    return sum(limits) / shape.num_layers


def decode_weight_bytes(shape: DecoderShape, *, batch_size: int, dtype_bytes: int) -> int:
    """Bytes of weights that one decode step reads.

    Every layer's matrices, norms and biases and the whole output head (tied or not) are read once, whatever the batch;
    of the embedding table only one row per sequence, and of experts those of :func:`touched_experts`.
    """
    experts = touched_experts(shape, batch_size)
    weights = round(num_weights(shape, embedding_rows=batch_size, experts=experts)) * dtype_bytes
    return weights - round(fp8_savings(shape, dtype_bytes=dtype_bytes, experts=experts))


def num_weights(shape: DecoderShape, *, embedding_rows: int, experts: float) -> float:
    """Weights of all layers with this number of experts each, of the output head, and of rows of the embedding."""
    layer = (
        sum(map(math.prod, layer_matrices(shape)))
        + experts * sum(map(math.prod, expert_projections(shape).values()))
        + 2 * shape.hidden_size
        + (shape.q_size + 2 * shape.kv_size if shape.qkv_bias else 0)
        + (2 * shape.head_dim if shape.qk_norm else 0)
    )
    # The final norm, the output head and the embedding rows.
    return shape.num_layers * layer + shape.hidden_size * (1 + shape.vocab_rows + embedding_rows)


def touched_experts(shape: DecoderShape, rows: float) -> float:
    """Experts of a rank's layer that at least one of these rows goes to, on average: E · (1 - (1 - k / E) ** rows).

    It holds where each row takes k of E experts, all equally likely; a skewed router touches fewer.
    """
    if not shape.num_experts:
        return 0.0
    missed: float = (1 - shape.experts_per_token / shape.num_experts) ** rows
    return shape.own_experts * (1 - missed)


def decode_step_bytes(shape: DecoderShape, *, batch_size: int, context_tokens: float, dtype_bytes: int) -> float:
    """Least bytes that one decode step moves: weights, the KV cache read, and the tokens added to it.

    Activations are left out: they stay in the caches of any device that could run the model. Each sequence attends to
    ``context_tokens`` tokens, the one being decoded included; it may be a mean.
    """
    tokens = attended_tokens(shape, context_tokens) + 1
    kv_moved = batch_size * tokens * kv_cache_bytes_per_token(shape, dtype_bytes=dtype_bytes)
    return decode_weight_bytes(shape, batch_size=batch_size, dtype_bytes=dtype_bytes) + kv_moved


# ---- waves ----
# A matrix product is cut into tiles, one per thread block. The SMs run a limited number of blocks at a time, one wave;
# the last wave takes as long as the others however few blocks are left for it.


def layer_projections(shape: DecoderShape) -> dict[str, tuple[int, int]]:
    """(output columns, input columns) of the products of all rows, by name of :data:`PROJECTIONS`.

    In a model of experts, gate_up and down are those of the shared expert, if there is one.
    """
    size, hidden_size = shape.dense_mlp_size, shape.hidden_size
    attention = {"qkv": (shape.q_size + 2 * shape.kv_size, hidden_size), "o": (hidden_size, shape.q_size)}
    return attention | ({"gate_up": (2 * size, hidden_size), "down": (hidden_size, size)} if size else {})


def expert_projections(shape: DecoderShape) -> dict[str, tuple[int, int]]:
    """(output columns, input columns) of one routed expert's products, by name; none in a dense model."""
    size, hidden_size = shape.expert_intermediate_size, shape.hidden_size
    return {"gate_up": (2 * size, hidden_size), "down": (hidden_size, size)} if shape.num_experts else {}


def layer_matrices(shape: DecoderShape) -> tuple[tuple[int, int], ...]:
    """Sizes of :func:`layer_projections`, and in a model of experts of the router with the shared expert's gate."""
    gates = ((shape.num_experts + bool(shape.dense_mlp_size), shape.hidden_size),) if shape.num_experts else ()
    return tuple(layer_projections(shape).values()) + gates


def in_fp8(shape: DecoderShape, projections: Mapping[str, tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sizes of those projections whose products are of FP8."""
    return tuple(size for name, size in projections.items() if shape.fp8 is not None and name not in shape.fp8.plain)


def num_waves(rows: float, columns: int, sms: int) -> int:
    """Waves of thread blocks that a product of rows × columns takes on ``sms`` SMs, one block per SM."""
    return math.ceil(math.ceil(rows / TILE_ROWS) * math.ceil(columns / TILE_COLUMNS) / sms)


def wave_efficiency(tokens: float, sms: int, shape: DecoderShape) -> float:
    """Share of the SMs' time that the products of ``tokens`` rows use: above 0, at most 1; memory is not considered.

    All experts that are touched are taken to have equally many rows, and one launch to compute them all.
    """
    useful = spent = 0.0
    for columns, depth in layer_matrices(shape):
        useful += columns * depth
        spent += num_waves(tokens, columns, sms) * depth * TILE_ROWS
    if touched := touched_experts(shape, tokens):
        tiles = touched * math.ceil(tokens * shape.own_experts_per_token / touched / EXPERT_TILE_ROWS)
        for columns, depth in expert_projections(shape).values():
            useful += shape.own_experts_per_token * columns * depth
            spent += math.ceil(tiles * math.ceil(columns / TILE_COLUMNS) / sms) * depth * EXPERT_TILE_ROWS
    return tokens * useful / (spent * sms * TILE_COLUMNS)


# ---- times ----


class Roofline:
    """A performance model of bytes, operations and waves, in which no point is measured.

    Computing, reading weights and launching overlap in part: their times add as squares.
    Implements :class:`~bullet_graph.perf.performance.PerformanceModel`. The decode lane has every multiple of 16 SMs
    that leaves 16 to prefill. ``dtype_bytes`` is the size of a weight and of a KV-cache element.
    """

    def __init__(self, spec: GpuSpec, shape: DecoderShape, *, dtype_bytes: int = 2) -> None:
        self.num_sms = spec.num_sms
        self.num_layers = shape.num_layers
        self.decode_sms = tuple(range(_SPLIT_STEP_SMS, spec.num_sms - _SPLIT_STEP_SMS + 1, _SPLIT_STEP_SMS))
        self.sharing_slowdown = spec.sharing_slowdown
        self._spec = spec
        self._shape = shape
        self._dtype_bytes = dtype_bytes
        self._weight_bytes = decode_weight_bytes(shape, batch_size=0, dtype_bytes=dtype_bytes)
        of_expert = sum(map(math.prod, expert_projections(shape).values()))
        one, none = (fp8_savings(shape, dtype_bytes=dtype_bytes, experts=experts) for experts in (1, 0))
        self._expert_bytes = shape.num_layers * dtype_bytes * of_expert - (one - none)
        self._head_bytes = shape.hidden_size * shape.vocab_size * dtype_bytes
        self._kv_bytes = kv_cache_bytes_per_token(shape, dtype_bytes=dtype_bytes)
        met = num_weights(shape, embedding_rows=0, experts=shape.own_experts_per_token)
        fp8_met: float = sum(map(math.prod, in_fp8(shape, layer_projections(shape))))
        fp8_met += shape.own_experts_per_token * sum(map(math.prod, in_fp8(shape, expert_projections(shape))))
        # As many operations in 16 bits as take this long.
        self._row_flops = 2 * (met - self._head_bytes / dtype_bytes)
        self._row_flops -= 2 * shape.num_layers * fp8_met * (1 - spec.tflops / spec.fp8_tflops)
        self._head_flops = 2 * self._head_bytes / dtype_bytes
        self._pair_flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim
        self._overhead_ms = shape.num_layers * spec.layer_overhead_ms
        self._launch_ms = shape.num_layers * spec.captured_layer_ms

    def decode(self, batch_size: float, kv_tokens: float, sms: int | None = None) -> Prediction:
        """Products, then keys and values at the bandwidth of the SMs; the number of rows may be a mean."""
        sms = sms or self.num_sms
        computed_ms = batch_size * (self._row_flops + self._head_flops) / self._flops_per_ms(sms)
        products_ms = math.hypot(computed_ms, self._weights_ms(batch_size, sms))
        kv_ms = self._kv_ms(batch_size, kv_tokens, sms)
        return Prediction(products_ms + kv_ms + self._overhead_ms + self._sums_ms(batch_size), measured=False)

    def prefill(self, tokens: float, pairs: float, sms: int | None = None) -> Prediction:
        """Products with attention, reads of weights, and the host's launches; the number of rows may be a mean."""
        sms = sms or self.num_sms
        flops = self._attended(tokens, pairs) * self._pair_flops
        attention_ms = flops / (self._spec.attention_tflops * 1e9 * self._compute_share(sms))
        computed_ms = tokens * self._row_flops / self._flops_per_ms(sms)
        if sms != self.num_sms:
            # Tiles are chosen by rows for the whole GPU; on a part of it, waves are whole.
            computed_ms /= wave_efficiency(tokens, sms, self._shape)
        products_ms = math.hypot(computed_ms + attention_ms, self._weights_ms(tokens, sms), self._launch_ms)
        return Prediction(products_ms + self._sums_ms(tokens), measured=False)

    def mixed(self, tokens: int, pairs: float, batch_size: int, kv_tokens: int) -> Prediction:
        kv_ms = self._kv_ms(batch_size, kv_tokens, self.num_sms)
        return Prediction(self.prefill(tokens + batch_size, pairs).ms + kv_ms, measured=False)

    def split(self, decode_sms: int, batch_size: int, kv_tokens: int, tokens: int, pairs: float) -> SplitPrediction:
        return SplitPrediction(
            decode_ms=self.sharing_slowdown * self.decode(batch_size, kv_tokens, decode_sms).ms,
            prefill_ms=self.sharing_slowdown * self.prefill(tokens, pairs, self.num_sms - decode_sms).ms,
            measured=False,
        )

    def wave_chunk_tokens(self, max_tokens: int, sms: int | None = None) -> int:
        """The chunk of at most ``max_tokens`` rows with the highest rate before attention, the largest of equals.

        It is a multiple of ``CHUNK_STEP_TOKENS``, or ``max_tokens`` itself if that is less than one step.
        """
        if max_tokens < CHUNK_STEP_TOKENS:
            return max_tokens
        sizes = range(CHUNK_STEP_TOKENS, max_tokens + 1, CHUNK_STEP_TOKENS)
        return max(sizes, key=lambda tokens: (tokens / self.prefill(tokens, 0, sms).ms, tokens))

    def _weights_ms(self, rows: float, sms: int) -> float:
        return (self._weight_bytes + touched_experts(self._shape, rows) * self._expert_bytes) / self._bytes_per_ms(sms)

    def _sums_ms(self, rows: float) -> float:
        """Two sums a layer over ranks; each rank sends 2 (ranks - 1) / ranks of the rows, as in a ring."""
        ranks = self._shape.num_ranks
        num_bytes = 2 * (ranks - 1) / ranks * rows * self._shape.hidden_size * self._dtype_bytes
        each_ms = self._spec.rank_sum_ms + num_bytes / (self._spec.link_gb_s * 1e6)
        return 2 * self.num_layers * each_ms if ranks > 1 else 0.0

    def _kv_ms(self, batch_size: float, kv_tokens: float, sms: int) -> float:
        return self._attended(batch_size, kv_tokens) * self._kv_bytes / self._bytes_per_ms(sms)

    def _attended(self, rows: float, pairs: float) -> float:
        """(query, key) pairs of rows that have ``pairs`` in layers without a window, as a mean over layers."""
        return rows * attended_tokens(self._shape, pairs / rows) if self._shape.layer_windows and rows else pairs

    def _flops_per_ms(self, sms: int) -> float:
        return self._spec.tflops * 1e9 * self._compute_share(sms)

    def _compute_share(self, sms: int) -> float:
        return min(1.0, self._spec.unthrottled * sms / self.num_sms)

    def _bytes_per_ms(self, sms: int) -> float:
        half = self._spec.half_bandwidth_share * self.num_sms
        return self._spec.bandwidth_gb_s * 1e6 * (sms / (sms + half) * (self.num_sms + half) / self.num_sms)
