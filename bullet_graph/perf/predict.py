"""The performance model of a measured table: interpolation, with a roofline where nothing was measured."""

from collections.abc import Callable

from bullet_graph.errors import PerfTableError
from bullet_graph.hardware import gpu_spec
from bullet_graph.perf import waves
from bullet_graph.perf.lane_times import Beside, LaneTimes
from bullet_graph.perf.mixed_times import MixedTimes
from bullet_graph.perf.performance import Prediction, SplitPrediction, attention_pairs
from bullet_graph.perf.roofline import Roofline
from bullet_graph.perf.table import PerfTable, shape_numbers
from bullet_graph.perf.traffic import DecoderShape

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_MAX_BATCH_SIZE = 4096
_MAX_CHUNK_TOKENS = 1 << 16
"""Up to here and beyond, the roofline carries the measured times on."""

_ENOUGH_SIZES = 3
"""Chunk sizes measured on so many SMs, from which their rates say more than arithmetic does."""


def _unpadded(batch_size: int) -> int:
    return batch_size


class TableModel:
    """Predicts times from a table; implements :class:`~bullet_graph.perf.performance.PerformanceModel`.

    Within the measured range times are interpolated: linearly in rows and in the tokens that a row attends to, and
    by rates between numbers of SMs. Outside of it, a roofline scaled to agree with the nearest measured points goes
    on, and the prediction says ``measured=False``. No prediction falls when rows or depth rise (but that of a split of
    a size that was not measured may). Rows are at least 1; a mixed forward may have no decode rows.

    Args:
        table: a complete one.
        shape: of the model, the same as the table's.
        pad: rows of the captured graph that serves a batch size: a decode step costs as much as its graph. The
            table's own batch sizes are taken for those of graphs.

    Raises:
        PerfTableError: the table is that of an interrupted profile, or of another model.
    """

    def __init__(
        self, table: PerfTable, shape: DecoderShape, *, pad: Callable[[int], int] = _unpadded
    ) -> None:
        _check(table, shape)
        key, points = table.key, table.points
        num_sms = key.num_sms
        roofline = Roofline(gpu_spec(key.gpu, num_sms), shape, dtype_bytes=_DTYPE_BYTES[key.dtype])
        self._pad = pad
        self._num_layers = table.num_layers
        self._num_sms = num_sms
        self._roofline = roofline
        self._decode = LaneTimes(
            [(p.sms or num_sms, p.batch_size, p.context_tokens, p.ms) for p in points.decode],
            lambda rows, depth, sms: roofline.decode_ms(rows, rows * depth, sms),
            num_sms=num_sms,
            end=_MAX_BATCH_SIZE,
        )
        self._prefill = LaneTimes(
            [
                (p.sms or num_sms, p.tokens, attention_pairs(p.tokens, p.cached_tokens) / p.tokens, p.ms)
                for p in points.prefill
            ],
            lambda rows, depth, sms: roofline.prefill_ms(rows, rows * depth, sms),
            num_sms=num_sms,
            end=_MAX_CHUNK_TOKENS,
        )
        self._mixed = MixedTimes(points.mixed, self._decode.whole, self._prefill.whole)
        self._decode_sms = tuple(sorted({p.decode_sms for p in points.split}))
        self._beside = {sms: self._measured_beside(table, sms) for sms in self._decode_sms}
        self._chunks: dict[tuple[int, int], int] = {}

    @property
    def num_sms(self) -> int:
        """SMs of the GPU."""
        return self._num_sms

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._num_layers

    @property
    def decode_sms(self) -> tuple[int, ...]:
        """Sizes of the decode lane that were measured beside prefill; none where no split was."""
        return self._decode_sms

    def decode(self, batch_size: int, kv_tokens: int, sms: int | None = None) -> Prediction:
        """One decode step, alone."""
        rows = self._pad(batch_size)
        return Prediction(*self._decode(rows, kv_tokens / rows, sms or self._num_sms))

    def prefill(self, tokens: int, pairs: float, sms: int | None = None) -> Prediction:
        """A forward of prompt rows, all layers, alone."""
        return Prediction(*self._prefill(tokens, pairs / tokens, sms or self._num_sms))

    def mixed(self, tokens: int, pairs: float, batch_size: int, kv_tokens: int) -> Prediction:
        """A forward of prompt rows and decode rows; without measured ones, both parts are put together."""
        return Prediction(*self._mixed(tokens, pairs, batch_size, kv_tokens))

    def split(
        self, decode_sms: int, batch_size: int, kv_tokens: int, tokens: int, pairs: float
    ) -> SplitPrediction:
        """Both lanes at once; a size that was not measured takes the slowdown of the nearest that was."""
        rows = self._pad(batch_size)
        depth, prefill_depth = kv_tokens / rows, pairs / tokens
        beside = self._beside.get(decode_sms)
        if beside is not None:
            return SplitPrediction(*beside(rows, depth, tokens, prefill_depth))
        decode_ms, _ = self._decode(rows, depth, decode_sms)
        prefill_ms, _ = self._prefill(tokens, prefill_depth, self._num_sms - decode_sms)
        if not self._decode_sms:
            slowdown = self._roofline.sharing_slowdown
            return SplitPrediction(slowdown * decode_ms, slowdown * prefill_ms, measured=False)
        nearest = min(self._decode_sms, key=lambda sms: abs(sms - decode_sms))
        beside_decode_ms, beside_prefill_ms, _ = self._beside[nearest](rows, depth, tokens, prefill_depth)
        alone_decode_ms, _ = self._decode(rows, depth, nearest)
        alone_prefill_ms, _ = self._prefill(tokens, prefill_depth, self._num_sms - nearest)
        return SplitPrediction(
            decode_ms * beside_decode_ms / alone_decode_ms,
            prefill_ms * beside_prefill_ms / alone_prefill_ms,
            measured=False,
        )

    def wave_chunk_tokens(self, max_tokens: int, sms: int | None = None) -> int:
        """The chunk of at most ``max_tokens`` rows with the highest prefill rate.

        Measured sizes, and the most that fits, are compared at one depth; where fewer than three sizes that fit were
        measured on so many SMs, whole waves decide.
        """
        if max_tokens < waves.CHUNK_STEP_TOKENS:
            return max_tokens
        # Asked for at every tick, with few distinct answers.
        key = (max_tokens - max_tokens % waves.CHUNK_STEP_TOKENS, sms or self._num_sms)
        if key not in self._chunks:
            self._chunks[key] = self._best_chunk(*key)
        return self._chunks[key]

    def _best_chunk(self, max_tokens: int, sms: int) -> int:
        sizes = [int(tokens) for tokens in self._prefill.measured_rows(sms) if tokens <= max_tokens]
        if len(sizes) < _ENOUGH_SIZES:
            return self._roofline.wave_chunk_tokens(max_tokens, sms)
        if self._prefill.surface(sms).is_measured(max_tokens):
            sizes.append(max_tokens)
        depth = max_tokens / 2
        return max(sizes, key=lambda tokens: (tokens / self._prefill(tokens, depth, sms)[0], tokens))

    def _measured_beside(self, table: PerfTable, decode_sms: int) -> Beside:
        points = [point for point in table.points.split if point.decode_sms == decode_sms]
        return Beside(
            decode=[(p.tokens, p.batch_size, p.context_tokens, p.decode_ms) for p in points],
            prefill=[
                (p.batch_size * p.context_tokens, p.tokens, (p.tokens + 1) / 2, p.prefill_ms) for p in points
            ],
            decode_alone=self._decode.surface(decode_sms),
            prefill_alone=self._prefill.surface(self._num_sms - decode_sms),
        )


def _check(table: PerfTable, shape: DecoderShape) -> None:
    if not table.complete:
        raise PerfTableError(
            "a complete performance table is required, this one is of an interrupted profile: "
            "run `bullet-graph profile` again to resume it"
        )
    if dict(table.key.shape) != shape_numbers(shape):
        raise PerfTableError(
            f"the performance table is of {table.key.model}, another model than the one to predict: "
            "run `bullet-graph profile` for this one"
        )
    if table.key.dtype not in _DTYPE_BYTES:
        raise PerfTableError(
            f"the performance table's dtype must be one of {', '.join(_DTYPE_BYTES)}, found "
            f"{table.key.dtype!r}: run `bullet-graph profile` with one of them"
        )
