"""In-flight launches: what each lane has been given and the loop has not yet retired."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bullet_graph.engine.sequence import ScheduledStep
from bullet_graph.partition.masks import LANES, SMS_PER_TPC, Lane, SmPartition
from bullet_graph.planner.plan import PolicyName
from bullet_graph.runtime.step import Placement, Step


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch in flight.

    Attributes:
        ticket: the executor's.
        scheduled: the step; for a slice, the step that it is part of.
        placement: where it runs.
        policy: the policy that planned it.
        predicted_ms: predicted time on the device; None without a performance model.
        beside: whether the other lane had work at the time of the launch.
    """

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


@dataclass(frozen=True, slots=True)
class Launching:
    """A call of the executor that has not returned.

    Attributes:
        step: what is launched.
        placement: where.
        since_s: when the call began, on the executor's clock.
    """

    step: Step
    placement: Placement
    since_s: float


class InFlight:
    """In-flight launches of each lane, oldest first.

    Args:
        num_sms: SMs of the GPU; None without a GPU.
    """

    def __init__(self, num_sms: int | None) -> None:
        self._num_sms = num_sms
        self._lanes: dict[Lane, deque[Launch]] = {lane: deque() for lane in LANES}
        self._oldest: dict[Lane, tuple[Launch, float] | None] = dict.fromkeys(LANES)

    def __getitem__(self, lane: Lane) -> deque[Launch]:
        return self._lanes[lane]

    def __bool__(self) -> bool:
        return any(self._lanes.values())

    def heads(self) -> list[int]:
        """The oldest ticket of each lane that has work."""
        return [launches[0].ticket for launches in self._lanes.values() if launches]

    def oldest(self, lane: Lane) -> tuple[Launch, float] | None:
        """A lane's oldest launch, and the time since which it is the oldest. Safe in any thread."""
        return self._oldest[lane]

    def lane_of(self, ticket: int) -> Lane:
        """The lane whose oldest launch has this ticket."""
        return next(
            lane for lane, launches in self._lanes.items() if launches and launches[0].ticket == ticket
        )

    def add(self, launch: Launch, now_s: float) -> None:
        """Note a launch."""
        lane = launch.placement.lane
        launches = self._lanes[lane]
        if not launches:
            self._oldest[lane] = launch, now_s
        launches.append(launch)

    def pop(self, lane: Lane, now_s: float) -> Launch:
        """Remove a lane's oldest launch, which has just finished."""
        launches = self._lanes[lane]
        launch = launches.popleft()
        self._oldest[lane] = (launches[0], now_s) if launches else None
        return launch

    def clear(self) -> list[int]:
        """Forget all launches and return their tickets, lane by lane, oldest first."""
        tickets = [launch.ticket for launches in self._lanes.values() for launch in launches]
        for lane, launches in self._lanes.items():
            launches.clear()
            self._oldest[lane] = None
        return tickets

    # ---- when it will be done ----

    def decode_due_s(self, now_s: float) -> float:
        """When the tokens in flight on the decode lane are expected, turns of the other lane included."""
        return self._due_s("decode", now_s)

    def awaited_s(self, now_s: float) -> list[tuple[float, float]]:
        """(expected, due) times of the first and last tokens in flight; slack covers the tokens between them."""
        awaited = []
        for lane, launches in self._lanes.items():
            due_s = self._due_s(lane, now_s)
            for sequence in (s for launch in launches if launch.ends_chunk for s in launch.scheduled.sampled):
                if sequence.first_token_s is None:
                    awaited.append((due_s, sequence.deadline_s))
                elif sequence.slo.tpot_ms is not None and sequence.num_tokens >= sequence.max_tokens:
                    gaps = sequence.num_tokens - len(sequence.prompt_token_ids) - 1
                    awaited.append((due_s, sequence.first_token_s + gaps * sequence.slo.tpot_ms / 1e3))
        return awaited

    def _due_s(self, lane: Lane, now_s: float) -> float:
        due_s = now_s + self._left_s(lane, now_s)
        prefill = self._lanes["prefill"]
        if any(p.takes_turns or p.partition.prefill_tpcs is None for p in (x.placement for x in prefill)):
            due_s += self._left_s(other_lane(lane), now_s)
        return due_s

    def _left_s(self, lane: Lane, now_s: float) -> float:
        oldest = self._oldest[lane]
        if oldest is None:
            return 0.0
        predicted_s = sum(launch.predicted_ms or 0.0 for launch in self._lanes[lane]) / 1e3
        return max(predicted_s - (now_s - oldest[1]), 0.0)

    # ---- which SMs it uses ----

    def fit_beside(self, lane: Lane, partition: SmPartition) -> bool:
        """Whether the lane's SMs are disjoint from those of everything in flight on the other lane.

        Two lanes on the same SMs starve each other: short decode kernels wait for long prefill kernels hundreds of
        times per step.
        """
        for launch in self._lanes[other_lane(lane)]:
            other = launch.placement.partition
            decode, prefill = (partition, other) if lane == "decode" else (other, partition)
            if self._num_sms is None or decode.decode_tpcs is None or prefill.prefill_tpcs is None:
                return False
            if SMS_PER_TPC * (decode.decode_tpcs + prefill.prefill_tpcs) > self._num_sms:
                return False
        return True

    def decode_partition(
        self, planned: SmPartition, rows: int, max_rows: Callable[[SmPartition], int | None]
    ) -> SmPartition:
        """The partition of a decode step: the planned one, unless slices in flight use its SMs.

        The last slices of a split may still run when the plan has changed. Decode then stays on its side of the split
        until they are done, if a graph of that side holds the batch.

        Args:
            planned: the plan's partition.
            rows: rows of the step.
            max_rows: the largest batch of a partition; None for no limit.
        """
        prefilling = self._lanes["prefill"]
        if not prefilling or self.fit_beside("decode", planned):
            return planned
        beside = prefilling[-1].placement.partition
        most = max_rows(beside)
        return beside if most is None or rows <= most else planned


def other_lane(lane: Lane) -> Lane:
    """The lane beside this one."""
    return "prefill" if lane == "decode" else "decode"
