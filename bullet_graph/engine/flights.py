"""What has been launched on each lane and not yet retired."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bullet_graph.engine.scheduled import ScheduledStep
from bullet_graph.partition.masks import LANES, Lane
from bullet_graph.partition.spec import SMS_PER_TPC, SmPartition
from bullet_graph.planner.plan import PolicyName
from bullet_graph.runtime.step import Placement


@dataclass(frozen=True, slots=True)
class Flight:
    """A launch under way.

    Attributes:
        ticket: the executor's.
        scheduled: the step; for a slice, the step it is part of.
        placement: where it runs.
        policy: that it was launched under.
        predicted_ms: its time on the device, None without a model.
        beside: the other lane had work when it was launched.
    """

    ticket: int
    scheduled: ScheduledStep
    placement: Placement
    policy: PolicyName
    predicted_ms: float | None
    beside: bool

    @property
    def ends_chunk(self) -> bool:
        """Whether nothing of its step is left to launch."""
        return self.placement.last_layer is None


class Flights:
    """Launches in flight by lane, oldest first.

    Args:
        num_sms: of the GPU; None where there is none to divide.
    """

    def __init__(self, num_sms: int | None) -> None:
        self._num_sms = num_sms
        self._lanes: dict[Lane, deque[Flight]] = {lane: deque() for lane in LANES}
        self._oldest: dict[Lane, tuple[Flight, float] | None] = dict.fromkeys(LANES)

    def __getitem__(self, lane: Lane) -> deque[Flight]:
        return self._lanes[lane]

    def __bool__(self) -> bool:
        return any(self._lanes.values())

    def heads(self) -> list[int]:
        """The oldest ticket of each lane that has one."""
        return [flights[0].ticket for flights in self._lanes.values() if flights]

    def oldest(self, lane: Lane) -> tuple[Flight, float] | None:
        """A lane's oldest launch, and since when (on the executor's clock) it has been that; from any thread."""
        return self._oldest[lane]

    def lane_of(self, ticket: int) -> Lane:
        """The lane whose oldest launch has this ticket."""
        return next(lane for lane, flights in self._lanes.items() if flights and flights[0].ticket == ticket)

    def add(self, flight: Flight, now_s: float) -> None:
        """Note a launch."""
        lane = flight.placement.lane
        flights = self._lanes[lane]
        if not flights:
            self._oldest[lane] = flight, now_s
        flights.append(flight)

    def pop(self, lane: Lane, now_s: float) -> Flight:
        """Take the oldest launch of a lane out; it has just finished."""
        flights = self._lanes[lane]
        flight = flights.popleft()
        self._oldest[lane] = (flights[0], now_s) if flights else None
        return flight

    def clear(self) -> list[int]:
        """Forget all launches; their tickets, lane by lane, oldest first."""
        tickets = [flight.ticket for flights in self._lanes.values() for flight in flights]
        for lane, flights in self._lanes.items():
            flights.clear()
            self._oldest[lane] = None
        return tickets

    def decode_due_s(self, now_s: float) -> float:
        """When the tokens in flight on the decode lane are expected, the other lane's turns before them included."""
        return self._due_s("decode", now_s)

    def awaited_s(self, now_s: float) -> list[tuple[float, float]]:
        """When first tokens and last ones in flight are expected, and when each is due; others are slack's matter."""
        awaited = []
        for lane, flights in self._lanes.items():
            due_s = self._due_s(lane, now_s)
            for sequence in (s for flight in flights if flight.ends_chunk for s in flight.scheduled.sampled):
                if sequence.first_token_s is None:
                    awaited.append((due_s, sequence.deadline_s))
                elif sequence.slo.tpot_ms is not None and sequence.num_tokens >= sequence.max_tokens:
                    gaps = sequence.num_tokens - len(sequence.prompt_token_ids) - 1
                    awaited.append((due_s, sequence.first_token_s + gaps * sequence.slo.tpot_ms / 1e3))
        return awaited

    def _due_s(self, lane: Lane, now_s: float) -> float:
        due_s = now_s + self._left_s(lane, now_s)
        prefill = self._lanes["prefill"]
        if any(f.placement.takes_turns or f.placement.partition.prefill_tpcs is None for f in prefill):
            due_s += self._left_s(other_lane(lane), now_s)
        return due_s

    def _left_s(self, lane: Lane, now_s: float) -> float:
        oldest = self._oldest[lane]
        if oldest is None:
            return 0.0
        predicted_s = sum(flight.predicted_ms or 0.0 for flight in self._lanes[lane]) / 1e3
        return max(predicted_s - (now_s - oldest[1]), 0.0)

    def fit_beside(self, lane: Lane, partition: SmPartition) -> bool:
        """Whether the lane's SMs are disjoint from those of all that is in flight on the other lane.

        Two lanes on the same SMs starve each other: short decode kernels wait behind long prefill kernels, hundreds
        of times a step.
        """
        for flight in self._lanes[other_lane(lane)]:
            other = flight.placement.partition
            decode, prefill = (partition, other) if lane == "decode" else (other, partition)
            if self._num_sms is None or decode.decode_tpcs is None or prefill.prefill_tpcs is None:
                return False
            if SMS_PER_TPC * (decode.decode_tpcs + prefill.prefill_tpcs) > self._num_sms:
                return False
        return True

    def decode_partition(
        self, planned: SmPartition, rows: int, max_rows: Callable[[SmPartition], int | None]
    ) -> SmPartition:
        """Where a decode step goes: as planned, unless slices that run need those SMs.

        The last slices of a split may still run when the plan is another: decode stays on its side until they are done,
        if a graph there holds the batch.

        Args:
            rows: of the step.
            max_rows: most that a partition takes; None is no limit.
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
