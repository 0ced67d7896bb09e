"""What the lanes do: SMs and time for the counters, and in words for whoever watches that they go on."""

from collections.abc import Mapping
from dataclasses import dataclass

from bullet_graph.engine.flights import Flights
from bullet_graph.graphs.key import batch_size_buckets, bucket_for
from bullet_graph.partition.masks import LANES, Lane, lane_tpcs, sm_ranges
from bullet_graph.partition.spec import SMS_PER_TPC, SmPartition
from bullet_graph.runtime.step import Placement, Step

LaneSms = Mapping[tuple[Lane, SmPartition], frozenset[int]]
"""The SMs, as ``%smid`` names them, of each lane in each partition; empty where there are none to divide."""


@dataclass(frozen=True, slots=True)
class Launching:
    """A launch that the executor has been told of and has not yet taken.

    Attributes:
        step: what is launched.
        placement: where.
        since_s: when the call began, on the executor's clock.
    """

    step: Step
    placement: Placement
    since_s: float


class LaneUse:
    """Counts time and SMs of what each lane has run.

    Args:
        num_sms: of the GPU; None where there is none to divide.

    Attributes:
        seconds: device time of each lane's launches.
        sm_seconds: the same times their SMs; empty without a GPU.
    """

    def __init__(self, num_sms: int | None) -> None:
        self._num_sms = num_sms
        self.seconds: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self.sm_seconds: dict[Lane, float] = {} if num_sms is None else dict.fromkeys(LANES, 0.0)

    def retired(self, placement: Placement, device_ms: float) -> None:
        """Count a launch that is over."""
        lane = placement.lane
        self.seconds[lane] += device_ms / 1e3
        if self._num_sms is not None:
            self.sm_seconds[lane] += _sms(placement, self._num_sms) * device_ms / 1e3

    def now(self, flights: Flights) -> dict[Lane, int]:
        """SMs of what each lane runs, 0 where it is idle; nothing without a GPU."""
        if self._num_sms is None:
            return {}
        running = {lane: flights.oldest(lane) for lane in LANES}
        return {
            lane: 0 if head is None else _sms(head[0].placement, self._num_sms)
            for lane, head in running.items()
        }


def _sms(placement: Placement, num_sms: int) -> int:
    tpcs = lane_tpcs(placement.partition, placement.lane)
    return num_sms if tpcs is None else SMS_PER_TPC * tpcs


def describe_launch(
    step: Step, placement: Placement, *, lane_sms: LaneSms, max_num_seqs: int, cuda_graphs: bool
) -> str:
    """A launch in words: its lane, the graph that it replays or the rows that it runs, and its mask.

    Args:
        step: what runs.
        placement: where.
        lane_sms: of the engine's partitions.
        max_num_seqs: of the engine: its largest decode graph.
        cuda_graphs: decode steps are replayed from graphs.
    """
    rows = 0 if step.decode is None else len(step.decode.slots)
    if step.prefill is None and cuda_graphs:
        size = bucket_for(rows, batch_size_buckets(max_num_seqs))
        what = f"the decode graph of batch size {size} ({rows} rows)"
    elif step.prefill is None:
        what = f"a decode step of {rows} rows, launched kernel by kernel"
    else:
        tokens, prompts = len(step.prefill.token_ids), len(step.prefill.slots)
        what = f"a forward of {tokens} prompt tokens ({prompts} prompts) and {rows} decode rows"
    first, last = placement.first_layer, placement.last_layer
    if first or last is not None:
        what += f", layers {first} to {'the last' if last is None else last - 1}"
    return f"{placement.lane} lane: {what} on {_mask(placement, lane_sms)}"


def _mask(placement: Placement, lane_sms: LaneSms) -> str:
    sms = lane_sms.get((placement.lane, placement.partition))
    if sms is None:
        return "a device without SMs"
    bits = sum(1 << tpc for tpc in {sm // SMS_PER_TPC for sm in sms})
    return f"{len(sms)} SMs (TPC mask {bits:#x}, SMs {sm_ranges(sms)})"
