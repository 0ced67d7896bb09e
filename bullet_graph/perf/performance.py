"""What planner and simulator ask of a performance model, and a model whose decode steps are padded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted time on the device; ``measured``: interpolated between measured points, without a roofline."""

    ms: float
    measured: bool


@dataclass(frozen=True, slots=True)
class SplitPrediction:
    """Times with both lanes kept busy at once: of one decode step, and of the whole chunk through all layers."""

    decode_ms: float
    prefill_ms: float
    measured: bool


def attention_pairs(tokens: int, cached_tokens: int = 0) -> float:
    """(query, key) pairs of causal attention of ``tokens`` new tokens after ``cached_tokens`` old ones."""
    return tokens * (cached_tokens + (tokens + 1) / 2)


OPENED_ROWS = 16
"""Profiles measure what opening a tile costs with so many rows beyond full tiles."""


def tile_of(rows: int) -> tuple[int, int]:
    """Where the last tile of a forward begins and ends, in rows: tiles of matrix kernels have 128, the first two 64."""
    size = 64 if rows <= 128 else 128
    end = -(-rows // size) * size
    return end - size, end


def size_of(rows: int) -> int:
    """The size of a forward of so many rows, for comparisons of predictions: the next power of two, 64 at least."""
    return 1 << (max(rows, 64) - 1).bit_length()


class PerformanceModel(Protocol):
    """Predicts step times of one model on one GPU; a call costs some microseconds.

    ``sms`` is the size of the lane, None for the whole GPU. ``kv_tokens`` are attended to by all decode rows together.
    ``tokens`` are prompt rows, and ``pairs`` the :func:`attention_pairs` of all sequences together.
    """

    @property
    def num_sms(self) -> int: ...
    @property
    def num_layers(self) -> int: ...

    @property
    def decode_sms(self) -> Sequence[int]:
        """Sizes of the decode lane that ``split`` knows, in SMs, rising; the prefill lane has the others."""

    def decode(self, batch_size: int, kv_tokens: int, sms: int | None = None) -> Prediction:
        """One decode step, alone."""

    def prefill(self, tokens: int, pairs: float, sms: int | None = None) -> Prediction:
        """A forward of prompt rows, all layers, alone."""

    def mixed(self, tokens: int, pairs: float, batch_size: int, kv_tokens: int) -> Prediction:
        """A forward of prompt rows and decode rows on the whole GPU."""

    def split(self, decode_sms: int, batch_size: int, kv_tokens: int, tokens: int, pairs: float) -> SplitPrediction:
        """Decode on ``decode_sms`` SMs beside prefill on the others."""

    def wave_chunk_tokens(self, max_tokens: int, sms: int | None = None) -> int:
        """The chunk of at most ``max_tokens`` rows with the highest prefill rate on ``sms`` SMs (None: all)."""


class PaddedModel:
    """Another model's predictions with decode steps padded as captured graphs pad them.

    ``pad`` gives the rows of the graph that serves a batch size on a decode lane of some SMs (None: the whole GPU).
    With ``routes``, the model has experts: rows of padding are alike, take the same ones, and count as one row.
    """

    def __init__(self, model: PerformanceModel, pad: Callable[[int, int | None], int], *, routes: bool) -> None:
        self.num_sms, self.num_layers, self.decode_sms = model.num_sms, model.num_layers, model.decode_sms
        self.prefill, self.mixed = model.prefill, model.mixed
        self.wave_chunk_tokens = model.wave_chunk_tokens
        self._model = model
        self._pad = (lambda rows, sms: min(pad(rows, sms), rows + 1)) if routes else pad

    def decode(self, batch_size: int, kv_tokens: int, sms: int | None = None) -> Prediction:
        return self._model.decode(self._pad(batch_size, sms), kv_tokens, sms)

    def split(self, decode_sms: int, batch_size: int, kv_tokens: int, tokens: int, pairs: float) -> SplitPrediction:
        return self._model.split(decode_sms, self._pad(batch_size, decode_sms), kv_tokens, tokens, pairs)
