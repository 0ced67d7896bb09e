"""In-flight launches: what each lane has been given and the loop has not yet retired, and which of them stall."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bullet_graph.config import EngineConfig
from bullet_graph.engine.sequence import ScheduledStep
from bullet_graph.graphs.key import batch_size_buckets, bucket_for
from bullet_graph.partition.masks import LANES, SMS_PER_TPC, Lane, SmPartition, fits_side_by_side, sm_ranges
from bullet_graph.planner.plan import PolicyName
from bullet_graph.runtime.step import Placement, Step

LaneSms = Mapping[tuple[Lane, SmPartition], frozenset[int]]
"""The SMs (numbers as in ``%smid``) of each lane in each partition; empty without a GPU."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch in flight: of a step, or of some layers of one; ``beside`` says that the other lane had work then."""

    ticket: int
    scheduled: ScheduledStep
    placement: Placement
    policy: PolicyName
    predicted_ms: float | None
    beside: bool

    @property
    def ends_chunk(self) -> bool:
        """Whether it runs the last layers of its step."""
        return self.placement.last_layer is None


class InFlight:
    """In-flight launches of each lane, oldest first.

    Other threads may read ``oldest``, each lane's oldest launch and since when it is, and ``launching``: step,
    placement and start of a call of the executor that has not returned.
    """

    def __init__(self, num_sms: int | None) -> None:
        self._num_sms = num_sms
        self._lanes: dict[Lane, deque[Launch]] = {lane: deque() for lane in LANES}
        self.oldest: dict[Lane, tuple[Launch, float] | None] = dict.fromkeys(LANES)
        self.launching: tuple[Step, Placement, float] | None = None

    def __getitem__(self, lane: Lane) -> deque[Launch]:
        return self._lanes[lane]

    def __bool__(self) -> bool:
        return any(self._lanes.values())

    def heads(self) -> dict[int, Lane]:
        """The oldest ticket of each lane that has work."""
        return {launches[0].ticket: lane for lane, launches in self._lanes.items() if launches}

    def add(self, launch: Launch, now_s: float) -> None:
        lane = launch.placement.lane
        launches = self._lanes[lane]
        if not launches:
            self.oldest[lane] = launch, now_s
        launches.append(launch)

    def pop(self, lane: Lane, now_s: float) -> Launch:
        """Remove a lane's oldest launch, which has just finished."""
        launches = self._lanes[lane]
        launch = launches.popleft()
        self.oldest[lane] = (launches[0], now_s) if launches else None
        return launch

    # ---- when it will be done ----

    def awaited_s(self, now_s: float) -> list[tuple[float, float]]:
        """(expected, due) times of the first and last tokens in flight; slack covers the tokens between them."""
        awaited = []
        for lane, launches in self._lanes.items():
            due_s = self.due_s(lane, now_s)
            for sequence in (s for launch in launches if launch.ends_chunk for s in launch.scheduled.sampled):
                if sequence.first_token_s is None:
                    awaited.append((due_s, sequence.deadline_s))
                elif sequence.slo.tpot_ms is not None and sequence.num_tokens >= sequence.max_tokens:
                    gaps = sequence.num_tokens - len(sequence.prompt_token_ids) - 1
                    awaited.append((due_s, sequence.first_token_s + gaps * sequence.slo.tpot_ms / 1e3))
        return awaited

    def due_s(self, lane: Lane, now_s: float) -> float:
        """When the lane's tokens in flight are expected, turns of the other lane included."""
        due_s = now_s + self._left_s(lane, now_s)
        prefill = self._lanes["prefill"]
        if any(p.takes_turns or p.partition.prefill_tpcs is None for p in (x.placement for x in prefill)):
            due_s += self._left_s(other_lane(lane), now_s)
        return due_s

    def _left_s(self, lane: Lane, now_s: float) -> float:
        oldest = self.oldest[lane]
        if oldest is None:
            return 0.0
        return max(sum(launch.predicted_ms or 0.0 for launch in self._lanes[lane]) / 1e3 - (now_s - oldest[1]), 0.0)

    # ---- which SMs it uses ----

    def fit_beside(self, lane: Lane, partition: SmPartition) -> bool:
        """Whether the lane's SMs are disjoint from those of everything in flight on the other lane.

        On the same SMs, short decode kernels would wait for long prefill kernels hundreds of times per step.
        """
        for launch in self._lanes[other_lane(lane)]:
            other = launch.placement.partition
            decode, prefill = (partition, other) if lane == "decode" else (other, partition)
            both = SmPartition(decode.decode_tpcs, prefill.prefill_tpcs)
            if self._num_sms is None or not fits_side_by_side(both, num_tpcs=self._num_sms // SMS_PER_TPC):
                return False
        return True

    def decode_partition(
        self, planned: SmPartition, rows: int, max_rows: Callable[[SmPartition], int | None]
    ) -> SmPartition:
        """The partition of a decode step: the planned one, unless slices in flight use its SMs.

        The last slices of a split may still run when the plan has changed. Decode then stays on its side of the split
        until they are done, if a graph of that side holds the batch: ``max_rows`` gives a partition's largest.
        """
        if self.fit_beside("decode", planned):
            return planned
        beside = self._lanes["prefill"][-1].placement.partition
        most = max_rows(beside)
        return beside if most is None or rows <= most else planned


def other_lane(lane: Lane) -> Lane:
    return "prefill" if lane == "decode" else "decode"


def stalled_launches(
    in_flight: InFlight, now_s: float, limit_s: float, config: EngineConfig, lane_sms: LaneSms
) -> tuple[str, ...]:
    """Describe launches that have been the oldest of their lane, or being launched, for more than ``limit_s``.

    They come in order of launch: lanes that take turns wait for each other, so the first is the one to look at.
    """
    heads = sorted((head for head in in_flight.oldest.values() if head), key=lambda head: head[0].ticket)
    waiting = [(x.scheduled.step, x.placement, since_s, "has not finished") for x, since_s in heads]
    if (launching := in_flight.launching) is not None:
        waiting.append((*launching, "is still being launched"))
    return tuple(
        f"{_describe(step, placement, config, lane_sms)} {what} after {now_s - since_s:.1f} s"
        for step, placement, since_s, what in waiting
        if now_s - since_s > limit_s
    )


def _describe(step: Step, placement: Placement, config: EngineConfig, lane_sms: LaneSms) -> str:
    rows = step.decode_rows
    if step.prefill is not None:
        prompts = len(step.prefill.slots)
        what = f"a forward of {step.prefill_rows} prompt tokens ({prompts} prompts) and {rows} decode rows"
    elif config.cuda_graphs and lane_sms:
        size = bucket_for(rows, batch_size_buckets(config.max_num_seqs))
        what = f"the decode graph of batch size {size} ({rows} rows)"
    else:
        what = f"a decode step of {rows} rows, launched kernel by kernel"
    first, last = placement.first_layer, placement.last_layer
    if first or last is not None:
        what += f", layers {first} to {'the last' if last is None else last - 1}"
    sms = lane_sms.get((placement.lane, placement.partition))
    if sms is None:
        return f"{placement.lane} lane: {what} on a device without SMs"
    bits = sum(1 << tpc for tpc in {sm // SMS_PER_TPC for sm in sms})
    return f"{placement.lane} lane: {what} on {len(sms)} SMs (TPC mask {bits:#x}, SMs {sm_ranges(sms)})"
