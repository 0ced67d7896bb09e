"""Which ways to prefill beside decode there are to choose from."""

from collections.abc import Mapping, Sequence

from bullet_graph.graphs.key import EAGER_LAYER_MS
from bullet_graph.perf.performance import PerformanceModel, attention_pairs
from bullet_graph.planner.options import Outlook
from bullet_graph.planner.plan import Load, Option


class Offers:
    """Options for one device and model, whatever the load.

    Args:
        decode_sms: sizes of the decode lane, rising.
        max_batch_sizes: most rows of a decode step on such a lane, by its SMs; one that is not in it takes any.
        lane_waits_for_host: offer no prefill lane; see :func:`lane_waits_for_host`.

    Attributes:
        max_batch_sizes: as given; may change.
    """

    def __init__(
        self, decode_sms: Sequence[int], max_batch_sizes: Mapping[int, int], *, lane_waits_for_host: bool
    ) -> None:
        self._decode_sms = decode_sms
        self._lane_waits_for_host = lane_waits_for_host
        self.max_batch_sizes = max_batch_sizes

    def prefilling(self, outlook: Outlook, load: Load) -> list[Option]:
        """One for each way to prefill beside decode; a chunk on the prefill lane stays there."""
        mixed = outlook.mixed_sizes() if load.chunk is None else []
        if not self._has_lane(load):
            return mixed
        return [*mixed, *self.splits(outlook)]

    def splits(self, outlook: Outlook) -> list[Option]:
        """One for each size of the decode lane that has a graph for the batch."""
        rows = outlook.batch_size
        return [outlook.split(sms) for sms in self._decode_sms if rows <= self.max_batch_sizes.get(sms, rows)]

    def _has_lane(self, load: Load) -> bool:
        return load.chunk is not None or not self._lane_waits_for_host


def lane_waits_for_host(model: PerformanceModel, lane_chunk_tokens: int) -> bool:
    """Whether chunks of the prefill lane take the host longer to launch than the device to run.

    They are launched kernel by kernel: decode steps would wait for that, and no prediction knows for how long.

    Args:
        model: of the device.
        lane_chunk_tokens: rows of the lane's chunks, on the whole GPU.
    """
    ms = model.prefill(lane_chunk_tokens, attention_pairs(lane_chunk_tokens)).ms
    return ms < model.num_layers * EAGER_LAYER_MS
