"""Counters of the loop: steps, device time and SMs of each lane."""

from bullet_graph.engine.block_pool import BlockPool
from bullet_graph.engine.in_flight import InFlight, Launch
from bullet_graph.engine.output import EngineStats
from bullet_graph.engine.scheduler import Scheduler
from bullet_graph.engine.sequence import ScheduledStep
from bullet_graph.partition.masks import LANES, SMS_PER_TPC, Lane, lane_tpcs
from bullet_graph.planner.plan import PolicyName
from bullet_graph.planner.planner import Planner
from bullet_graph.runtime.step import Placement


class LoopCounters:
    """Counts steps, and the time and SMs of what each lane has run.

    Args:
        num_sms: SMs of the GPU; None without a GPU.

    Attributes:
        first_token_s: when the first token reached the host, on the executor's clock; None before that.
    """

    def __init__(self, num_sms: int | None) -> None:
        self._num_sms = num_sms
        self._num_steps = 0
        self.first_token_s: float | None = None
        self._policy_seconds: dict[PolicyName, float] = {}
        self._lane_seconds: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self._lane_sm_seconds: dict[Lane, float] = {} if num_sms is None else dict.fromkeys(LANES, 0.0)

    def retired(self, launch: Launch, device_ms: float) -> None:
        """Count a finished launch."""
        policy, lane = launch.policy, launch.placement.lane
        self._policy_seconds[policy] = self._policy_seconds.get(policy, 0.0) + device_ms / 1e3
        self._lane_seconds[lane] += device_ms / 1e3
        if self._num_sms is not None:
            self._lane_sm_seconds[lane] += _sms(launch.placement, self._num_sms) * device_ms / 1e3

    def stepped(self, scheduled: ScheduledStep, now_s: float) -> None:
        """Count a finished step."""
        self._num_steps += 1
        if self.first_token_s is None and scheduled.sampled:
            self.first_token_s = now_s

    def stats(
        self,
        *,
        scheduler: Scheduler,
        pool: BlockPool,
        in_flight: InFlight,
        planner: Planner,
        num_missing_graphs: int,
    ) -> EngineStats:
        """The counters and the loop's state now."""
        return EngineStats(
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            kv_blocks_total=pool.num_usable,
            kv_blocks_used=pool.num_used,
            kv_blocks_peak=pool.peak_used,
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.queue),
            num_decoding=len(scheduler.decoding()),
            num_missing_graphs=num_missing_graphs,
            policy_seconds=dict(self._policy_seconds),
            lane_seconds=dict(self._lane_seconds),
            lane_sm_seconds=dict(self._lane_sm_seconds),
            lane_sms=self._lane_sms(in_flight),
            corrections=planner.corrections,
        )

    def _lane_sms(self, in_flight: InFlight) -> dict[Lane, int]:
        if self._num_sms is None:
            return {}
        running = {lane: in_flight.oldest(lane) for lane in LANES}
        return {
            lane: 0 if head is None else _sms(head[0].placement, self._num_sms)
            for lane, head in running.items()
        }


def _sms(placement: Placement, num_sms: int) -> int:
    tpcs = lane_tpcs(placement.partition, placement.lane)
    return num_sms if tpcs is None else SMS_PER_TPC * tpcs
