"""A performance model whose decode steps are padded as captured graphs pad them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bullet_graph.perf.performance import PerformanceModel, Prediction, SplitPrediction


@dataclass(frozen=True, slots=True)
class PaddedModel:
    """Implements :class:`~bullet_graph.perf.performance.PerformanceModel` over one that pads nothing.

    Attributes:
        model: asked for the padded steps.
        pad: rows of the graph that serves a batch size on so many SMs of the decode lane (None: the whole GPU).
    """

    model: PerformanceModel
    pad: Callable[[int, int | None], int]

    @property
    def num_sms(self) -> int:
        """SMs of the GPU."""
        return self.model.num_sms

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.model.num_layers

    @property
    def decode_sms(self) -> Sequence[int]:
        """Sizes of the decode lane that the model knows."""
        return self.model.decode_sms

    def decode(self, batch_size: int, kv_tokens: int, sms: int | None = None) -> Prediction:
        """One decode step, alone, padded."""
        return self.model.decode(self.pad(batch_size, sms), kv_tokens, sms)

    def prefill(self, tokens: int, pairs: float, sms: int | None = None) -> Prediction:
        """A forward of prompt rows, alone."""
        return self.model.prefill(tokens, pairs, sms)

    def mixed(self, tokens: int, pairs: float, batch_size: int, kv_tokens: int) -> Prediction:
        """A forward of prompt rows and decode rows."""
        return self.model.mixed(tokens, pairs, batch_size, kv_tokens)

    def split(
        self, decode_sms: int, batch_size: int, kv_tokens: int, tokens: int, pairs: float
    ) -> SplitPrediction:
        """Both lanes at once, the decode step padded."""
        return self.model.split(decode_sms, self.pad(batch_size, decode_sms), kv_tokens, tokens, pairs)

    def wave_chunk_tokens(self, max_tokens: int, sms: int | None = None) -> int:
        """The chunk with the highest prefill rate."""
        return self.model.wave_chunk_tokens(max_tokens, sms)
