"""Step times from arithmetic alone: what is predicted where nothing was measured."""

from bullet_graph.hardware import GpuSpec
from bullet_graph.perf import waves
from bullet_graph.perf.performance import Prediction, SplitPrediction
from bullet_graph.perf.traffic import DecoderShape, decode_weight_bytes, kv_cache_bytes_per_token

_SPLIT_STEP_SMS = 16


class Roofline:
    """A performance model of bytes, operations and waves: no point is measured.

    Args:
        spec: of the device.
        shape: of the model.
        dtype_bytes: size of a weight and of a KV-cache element.
    """

    def __init__(self, spec: GpuSpec, shape: DecoderShape, *, dtype_bytes: int = 2) -> None:
        self._spec = spec
        self._shape = shape
        self._matrices = waves.layer_matrices(shape)
        self._chunks: dict[tuple[int, int], int] = {}
        self._weight_bytes = decode_weight_bytes(shape, batch_size=0, dtype_bytes=dtype_bytes)
        self._head_bytes = shape.hidden_size * shape.vocab_size * dtype_bytes
        self._kv_bytes = kv_cache_bytes_per_token(shape, dtype_bytes=dtype_bytes)
        self._row_flops = 2 * (self._weight_bytes - self._head_bytes) / dtype_bytes
        self._head_flops = 2 * self._head_bytes / dtype_bytes
        self._pair_flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim
        self._overhead_ms = shape.num_layers * spec.layer_overhead_ms
        self._decode_sms = tuple(range(_SPLIT_STEP_SMS, spec.num_sms - _SPLIT_STEP_SMS + 1, _SPLIT_STEP_SMS))

    @property
    def num_sms(self) -> int:
        """SMs of the GPU."""
        return self._spec.num_sms

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._shape.num_layers

    @property
    def decode_sms(self) -> tuple[int, ...]:
        """Sizes of the decode lane: every 16 SMs, as long as 16 are left to prefill."""
        return self._decode_sms

    @property
    def sharing_slowdown(self) -> float:
        """By how much each lane is slowed beside the other."""
        return self._spec.sharing_slowdown

    def decode(self, batch_size: int, kv_tokens: int, sms: int | None = None) -> Prediction:
        """One decode step, alone: weights and keys and values at the bandwidth of so many SMs."""
        return Prediction(self.decode_ms(batch_size, kv_tokens, sms or self.num_sms), measured=False)

    def prefill(self, tokens: int, pairs: float, sms: int | None = None) -> Prediction:
        """A forward of prompt rows, alone: products in whole waves, then attention."""
        return Prediction(self.prefill_ms(tokens, pairs, sms or self.num_sms), measured=False)

    def mixed(self, tokens: int, pairs: float, batch_size: int, kv_tokens: int) -> Prediction:
        """A forward of prompt rows and decode rows: products of all rows, both attentions in turn."""
        ms = self.prefill_ms(tokens + batch_size, pairs, self.num_sms) + self._kv_ms(kv_tokens, self.num_sms)
        return Prediction(ms, measured=False)

    def split(
        self, decode_sms: int, batch_size: int, kv_tokens: int, tokens: int, pairs: float
    ) -> SplitPrediction:
        """Each lane alone, slowed by what they share."""
        slowdown = self._spec.sharing_slowdown
        return SplitPrediction(
            decode_ms=slowdown * self.decode_ms(batch_size, kv_tokens, decode_sms),
            prefill_ms=slowdown * self.prefill_ms(tokens, pairs, self.num_sms - decode_sms),
            measured=False,
        )

    def wave_chunk_tokens(self, max_tokens: int, sms: int | None = None) -> int:
        """The chunk of at most ``max_tokens`` rows whose waves are filled best."""
        if max_tokens < waves.CHUNK_STEP_TOKENS:
            return max_tokens
        # Asked for at every tick, with few distinct answers.
        key = (max_tokens - max_tokens % waves.CHUNK_STEP_TOKENS, sms or self.num_sms)
        if key not in self._chunks:
            self._chunks[key] = waves.wave_chunk_tokens(*key, self._shape)
        return self._chunks[key]

    def decode_ms(self, batch_size: float, kv_tokens: float, sms: int) -> float:
        """As :meth:`decode`, in plain milliseconds; a mean number of rows will do."""
        flops = batch_size * (self._row_flops + self._head_flops)
        weights_ms = self._weight_bytes / self._bytes_per_ms(sms)
        return (
            max(weights_ms, flops / self._flops_per_ms(sms)) + self._kv_ms(kv_tokens, sms) + self._overhead_ms
        )

    def prefill_ms(self, tokens: float, pairs: float, sms: int) -> float:
        """As :meth:`prefill`, in plain milliseconds."""
        efficiency = waves.matrices_efficiency(tokens, sms, self._matrices)
        products_ms = tokens * self._row_flops / (self._flops_per_ms(sms) * efficiency)
        weights_ms = self._weight_bytes / self._bytes_per_ms(sms)
        attention_ms = (
            pairs * self._pair_flops / (self._spec.attention_tflops * 1e9 * self._compute_share(sms))
        )
        return max(products_ms, weights_ms) + attention_ms + self._overhead_ms

    def _kv_ms(self, kv_tokens: float, sms: int) -> float:
        return kv_tokens * self._kv_bytes / self._bytes_per_ms(sms)

    def _flops_per_ms(self, sms: int) -> float:
        return self._spec.tflops * 1e9 * self._compute_share(sms)

    def _compute_share(self, sms: int) -> float:
        return min(1.0, self._spec.unthrottled * sms / self.num_sms)

    def _bytes_per_ms(self, sms: int) -> float:
        half = self._spec.half_bandwidth_share * self.num_sms
        saturation = sms / (sms + half) * (self.num_sms + half) / self.num_sms
        return self._spec.bandwidth_gb_s * 1e6 * saturation
