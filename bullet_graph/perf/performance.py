"""What planner and simulator ask of a performance model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted time on the device.

    Attributes:
        ms: the time.
        measured: it comes from measured points alone, by interpolation; else a roofline had a part in it.
    """

    ms: float
    measured: bool


@dataclass(frozen=True, slots=True)
class SplitPrediction:
    """Both lanes at once, each kept busy.

    Attributes:
        decode_ms: one decode step beside prefill.
        prefill_ms: the whole chunk, all layers, beside decode.
        measured: as in :class:`Prediction`.
    """

    decode_ms: float
    prefill_ms: float
    measured: bool


def attention_pairs(tokens: int, cached_tokens: int = 0) -> float:
    """(query, key) pairs of causal attention of ``tokens`` new tokens after ``cached_tokens`` old ones."""
    return tokens * (cached_tokens + (tokens + 1) / 2)


class PerformanceModel(Protocol):
    """Predicts step times of one model on one GPU; a call costs some microseconds."""

    @property
    def num_sms(self) -> int:
        """SMs of the GPU."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""

    @property
    def decode_sms(self) -> Sequence[int]:
        """Sizes of the decode lane that ``split`` knows, rising; the prefill lane has the other SMs."""

    def decode(self, batch_size: int, kv_tokens: int, sms: int | None = None) -> Prediction:
        """One decode step, alone.

        Args:
            batch_size: rows; the model pads them as the captured graphs do.
            kv_tokens: tokens attended to, all rows together.
            sms: SMs of the lane, None for the whole GPU.
        """

    def prefill(self, tokens: int, pairs: float, sms: int | None = None) -> Prediction:
        """A forward of prompt rows, all layers, alone.

        Args:
            tokens: rows.
            pairs: of attention, see :func:`attention_pairs`, all sequences together.
            sms: SMs of the prefill lane, None for the whole GPU.
        """

    def mixed(self, tokens: int, pairs: float, batch_size: int, kv_tokens: int) -> Prediction:
        """A forward of prompt rows and decode rows on the whole GPU."""

    def split(
        self, decode_sms: int, batch_size: int, kv_tokens: int, tokens: int, pairs: float
    ) -> SplitPrediction:
        """Decode on ``decode_sms`` SMs beside prefill on the others."""

    def wave_chunk_tokens(self, max_tokens: int, sms: int | None = None) -> int:
        """The chunk of at most ``max_tokens`` rows with the highest prefill rate on so many SMs (None: all)."""
