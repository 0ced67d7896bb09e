"""Describes launches that make no progress; reads only what is safe in other threads."""

from collections.abc import Mapping

from bullet_graph.config import EngineConfig
from bullet_graph.engine.core import EngineCore
from bullet_graph.graphs.key import batch_size_buckets, bucket_for
from bullet_graph.partition.masks import LANES, SMS_PER_TPC, Lane, SmPartition, sm_ranges
from bullet_graph.runtime.step import Placement, Step

LaneSms = Mapping[tuple[Lane, SmPartition], frozenset[int]]
"""The SMs (numbers as in ``%smid``) of each lane in each partition; empty without a GPU."""


def stalled_launches(
    core: EngineCore, *, now_s: float, limit_s: float, config: EngineConfig, lane_sms: LaneSms
) -> tuple[str, ...]:
    """Describe the launches that have blocked a lane for longer than a limit, in order of launch.

    Lanes that take turns wait for each other, so the first is the one to look at.

    Args:
        core: the loop; it may be running, or stuck, in another thread.
        now_s: time on the executor's clock.
        limit_s: longest time for a launch as the oldest of its lane, and for the call that launches it.
        config: the engine's settings.
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
    """Describe a launch: its lane, the CUDA graph that it replays or its rows, and its TPC mask.

    Args:
        step: the step.
        placement: where it runs.
        lane_sms: the SMs of each lane in each partition.
        max_num_seqs: the engine's setting, which is also the batch size of its largest decode graph.
        cuda_graphs: decode steps are replayed from CUDA graphs.
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
