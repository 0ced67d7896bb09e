"""Tells which lane makes no progress, and on what; reads only what other threads may read."""

from collections.abc import Mapping

from bullet_graph.config import EngineConfig
from bullet_graph.engine.core import EngineCore
from bullet_graph.graphs.key import batch_size_buckets, bucket_for
from bullet_graph.partition.masks import LANES, SMS_PER_TPC, Lane, SmPartition, sm_ranges
from bullet_graph.runtime.step import Placement, Step

LaneSms = Mapping[tuple[Lane, SmPartition], frozenset[int]]
"""The SMs, as ``%smid`` names them, of each lane in each partition; empty where there are none to divide."""


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
            launch, since_s = oldest
            stuck.append(
                (launch.ticket, launch.scheduled.step, launch.placement, since_s, "has not finished")
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
