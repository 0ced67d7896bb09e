"""Tells which lane makes no progress, and on what; reads only what other threads may read."""

from bullet_graph.config import EngineConfig
from bullet_graph.engine.core import EngineCore
from bullet_graph.engine.lanes import LaneSms, describe_launch
from bullet_graph.partition.masks import LANES


def stalled_launches(
    core: EngineCore, *, now_s: float, limit_s: float, config: EngineConfig, lane_sms: LaneSms
) -> tuple[str, ...]:
    """The launches that have held a lane up for longer than a limit, in words; the one launched first comes first.

    Lanes that take turns wait for one another, so of several the first is the one to look at.

    Args:
        core: its loop may be running, or stuck, in another thread.
        now_s: on the executor's clock.
        limit_s: most time that a launch may be the oldest of its lane, or that the call that launches it may take.
        config: of the engine.
        lane_sms: the SMs of each lane in each partition.
    """
    stuck = []
    for lane in LANES:
        oldest = core.oldest(lane)
        if oldest is not None and now_s - oldest[1] > limit_s:
            flight, since_s = oldest
            stuck.append(
                (flight.ticket, flight.scheduled.step, flight.placement, since_s, "has not finished")
            )
    launching = core.launching
    if launching is not None and now_s - launching.since_s > limit_s:
        last = 1 + max((ticket for ticket, *_ in stuck), default=0)
        stuck.append(
            (last, launching.step, launching.placement, launching.since_s, "is still being launched")
        )
    return tuple(
        describe_launch(
            step,
            placement,
            lane_sms=lane_sms,
            max_num_seqs=config.max_num_seqs,
            cuda_graphs=config.cuda_graphs and bool(lane_sms),
        )
        + f" {what} after {now_s - since_s:.1f} s"
        for _, step, placement, since_s, what in sorted(stuck, key=lambda entry: entry[0])
    )
