"""What the lanes do, in words for whoever watches that they go on."""

from collections.abc import Mapping
from dataclasses import dataclass

from bullet_graph.graphs.key import batch_size_buckets, bucket_for
from bullet_graph.partition.masks import Lane, sm_ranges
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
