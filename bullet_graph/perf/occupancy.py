"""Who was on the device when: the launches of a trace as intervals, and sums over them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bullet_graph.perf.trace_records import LANES, LaneName, Launch

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """``n`` launches on the device, and the ``m`` stretches of time between one start or end and the next.

    Attributes:
        launches: those that were measured, in order.
        start_s: [n].
        end_s: [n].
        edges_s: [m + 1], where each stretch begins and the last one ends.
        active: by lane, [m]: the launch on it in each stretch; −1 for none.
    """

    launches: tuple[Launch, ...]
    start_s: FloatArray
    end_s: FloatArray
    edges_s: FloatArray
    active: dict[LaneName, NDArray[np.int64]]

    @classmethod
    def of(cls, launches: Iterable[Launch]) -> "Occupancy":
        """Place the launches in time.

        Only how long each took and when the host saw that it was over are known. A lane runs its launches in order,
        so each ended when the next began, at the latest.
        """
        measured = tuple(launch for launch in launches if launch.device_ms is not None)
        start_s, end_s = np.zeros(len(measured)), np.zeros(len(measured))
        next_start_s = dict.fromkeys(LANES, np.inf)
        for index in range(len(measured) - 1, -1, -1):
            launch = measured[index]
            assert launch.retired_s is not None
            assert launch.device_ms is not None
            end_s[index] = min(launch.retired_s, next_start_s[launch.lane])
            start_s[index] = next_start_s[launch.lane] = end_s[index] - launch.device_ms / 1e3
        edges_s = np.unique(np.concatenate((start_s, end_s))) if measured else np.zeros(1)
        middle_s = (edges_s[1:] + edges_s[:-1]) / 2
        active = {}
        for lane in LANES:
            own = np.array([i for i, launch in enumerate(measured) if launch.lane == lane], dtype=np.int64)
            last = np.searchsorted(start_s[own], middle_s, side="right") - 1
            candidate = own[last] if own.size else np.full(middle_s.size, -1, dtype=np.int64)
            on_device = (last >= 0) & (end_s[candidate] > middle_s) if own.size else candidate >= 0
            active[lane] = np.where(on_device, candidate, -1)
        return cls(measured, start_s, end_s, edges_s, active)

    def on_lane(self, lane: LaneName, values: FloatArray) -> FloatArray:
        """[m]: in each stretch, the value ([n]) of the launch on the lane, or 0."""
        index = self.active[lane]
        return np.where(index >= 0, values[index], 0.0) if len(self.launches) else np.zeros(index.size)

    def sms(self, num_sms: int) -> FloatArray:
        """[n]: the SMs that each launch may use, of a device with so many."""
        own = (x.decode_sms if x.lane == "decode" else x.prefill_sms for x in self.launches)
        return np.array([num_sms if sms is None else sms for sms in own], dtype=np.float64)

    def of_policy(self, policy: str) -> FloatArray:
        """[m]: the policy's part of each stretch: 1, half of it beside another policy, or 0."""
        is_policy = np.array([launch.policy == policy for launch in self.launches], dtype=np.float64)
        lanes_of_policy = sum(self.on_lane(lane, is_policy) for lane in LANES)
        lanes_busy = sum((self.active[lane] >= 0).astype(np.float64) for lane in LANES)
        return np.asarray(lanes_of_policy / np.maximum(lanes_busy, 1.0), dtype=np.float64)

    def accumulated(self, weights: FloatArray, at_s: FloatArray) -> FloatArray:
        """Seconds up to each of the times, each stretch counted by its weight ([m])."""
        sums = np.concatenate(([0.0], np.cumsum(weights * np.diff(self.edges_s))))
        return np.asarray(np.interp(at_s, self.edges_s, sums), dtype=np.float64)

    def share(self, weights: FloatArray, start_s: float, end_s: float) -> float:
        """Mean weight from one time to another; 0 for no time at all."""
        before, after = self.accumulated(weights, np.array([start_s, end_s]))
        return float(after - before) / (end_s - start_s) if end_s > start_s else 0.0

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies of the launches, in order of appearance."""
        return tuple(dict.fromkeys(launch.policy for launch in self.launches))
