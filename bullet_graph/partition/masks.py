"""Partitions of the GPU between two lanes, and the masks over TPCs (pairs of SMs) that confine them: arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from bullet_graph.errors import PartitionError

SMS_PER_TPC = 2
"""SMs in a TPC, the unit of a mask: two since Pascal."""

Lane = Literal["decode", "prefill"]
LANES: tuple[Lane, Lane] = ("decode", "prefill")

GpcLayout = tuple[tuple[int, ...], ...]
"""TPC ids in the order in which green contexts take them; TPCs of one inner tuple share a GPC."""


@dataclass(frozen=True, slots=True, order=True)
class SmPartition:
    """How many TPCs each lane may use; None for all of them."""

    decode_tpcs: int | None = None
    prefill_tpcs: int | None = None


WHOLE_GPU = SmPartition()
"""Each lane may use every SM."""


def partition_of(decode_sms: int | None, *, num_sms: int) -> SmPartition:
    """The partition that gives ``decode_sms`` SMs to decode and the rest to prefill; None is the whole GPU.

    Raises PartitionError where the number is odd, or leaves a lane without a TPC.
    """
    if decode_sms is None:
        return WHOLE_GPU
    decode_tpcs, odd = divmod(decode_sms, SMS_PER_TPC)
    if odd:
        raise PartitionError(
            f"a decode lane must be a multiple of {SMS_PER_TPC} SMs (a TPC), got {decode_sms}: choose "
            f"{decode_sms - odd} or {decode_sms + odd}"
        )
    if not 0 < decode_sms < num_sms:
        raise PartitionError(
            f"a decode lane must have from {SMS_PER_TPC} to {num_sms - SMS_PER_TPC} of the GPU's {num_sms} SMs, got "
            f"{decode_sms}: the prefill lane needs the others; for the whole GPU leave the size out"
        )
    return SmPartition(decode_tpcs, num_sms // SMS_PER_TPC - decode_tpcs)


def lane_tpcs(partition: SmPartition, lane: Lane) -> int | None:
    """TPCs of one lane, None for all."""
    return partition.decode_tpcs if lane == "decode" else partition.prefill_tpcs


def lane_sms(partition: SmPartition, lane: Lane = "decode") -> int | None:
    """SMs of one lane, None for all."""
    tpcs = lane_tpcs(partition, lane)
    return None if tpcs is None else SMS_PER_TPC * tpcs


def fits_side_by_side(partition: SmPartition, *, num_tpcs: int) -> bool:
    """Whether the two lanes' TPCs fit on the GPU side by side."""
    counts = (partition.decode_tpcs, partition.prefill_tpcs)
    return sum(num_tpcs if count is None else count for count in counts) <= num_tpcs


@dataclass(frozen=True, slots=True)
class TpcMask:
    """The TPCs that a lane may use: bit i is set for TPC i, that is for SMs 2i and 2i + 1."""

    bits: int
    num_tpcs: int

    @property
    def sms(self) -> frozenset[int]:
        """The SMs that may be used, as ``%smid`` names them."""
        return frozenset(sm for sm in range(self.num_tpcs * SMS_PER_TPC) if self.bits >> sm // SMS_PER_TPC & 1)

    @property
    def disable_bits(self) -> int:
        """The mask in the driver's form, in which a set bit *disables* a TPC. The only place that inverts."""
        return ~self.bits & ((1 << self.num_tpcs) - 1)


def lane_masks(partition: SmPartition, *, num_tpcs: int, layout: GpcLayout | None = None) -> dict[Lane, TpcMask]:
    """The masks of a partition: decode takes the layout's first TPCs, prefill the last; they overlap where they must.

    ``layout`` None takes TPCs by number. Raises PartitionError where a count is not from 1 to ``num_tpcs``, or the
    layout is not this GPU's.
    """
    order = tuple(range(num_tpcs) if layout is None else chain.from_iterable(layout))
    if sorted(order) != list(range(num_tpcs)):
        raise PartitionError(
            f"a GPC layout must name each of this GPU's {num_tpcs} TPCs exactly once, but found {layout}: discover it "
            "anew"
        )
    masks: dict[Lane, TpcMask] = {}
    for lane in LANES:
        tpcs = lane_tpcs(partition, lane)
        count = num_tpcs if tpcs is None else tpcs
        if not 1 <= count <= num_tpcs:
            raise PartitionError(
                f"the {lane} lane needs from 1 to {num_tpcs} TPCs of this GPU, but {tpcs} were asked for: "
                "choose a partition that fits, or None for all"
            )
        taken = order[:count] if lane == "decode" else order[num_tpcs - count :]
        masks[lane] = TpcMask(sum(1 << tpc for tpc in taken), num_tpcs)
    return masks


def check_clusters(mask: TpcMask, layout: GpcLayout, lane: Lane) -> None:
    """Raise PartitionError for a mask under which a kernel with thread-block clusters might never be scheduled.

    All blocks of a cluster must find room in one GPC at the same time. Under a mask that spreads its TPCs over the
    GPCs, cuBLAS kernels with clusters of four hang for ever (seen on an H200 with TPCs 0-7, one in each GPC). So the
    mask must hold a whole group of the layout: each holds the largest portable cluster, as green contexts do. A group
    of another size than the first has left-over TPCs of any GPC and does not count.
    """
    size = len(layout[0])
    if not any(len(group) == size and all(mask.bits >> tpc & 1 for tpc in group) for group in layout):
        least = SMS_PER_TPC * size
        raise PartitionError(
            f"the {lane} lane's SMs {sm_ranges(mask.sms)} hold no whole group of {least} SMs that share a GPC, so "
            f"kernels launched in clusters would wait for ever: give the lane at least {least} SMs"
        )


def sm_ranges(sms: Iterable[int]) -> str:
    """SM ids as text, such as "0-7, 16-23"."""
    ranges: list[list[int]] = []
    for sm in sorted(sms):
        if ranges and sm == ranges[-1][-1] + 1:
            ranges[-1][1:] = [sm]
        else:
            ranges.append([sm])
    return ", ".join("-".join(map(str, ends)) for ends in ranges) or "none"
