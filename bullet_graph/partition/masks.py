"""Partitions of the GPU between two lanes, and the masks over TPCs (pairs of SMs) that confine them.

Pure arithmetic: nothing here calls the driver.
"""

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

    Whether a back end can make this partition is not checked here.

    Raises:
        PartitionError: the number of SMs is odd, or leaves a lane without a TPC.
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


def asks_for_disjoint_lanes(partition: SmPartition, *, num_tpcs: int) -> bool:
    """Whether the two lanes' TPCs fit on the GPU side by side."""
    counts = (partition.decode_tpcs, partition.prefill_tpcs)
    return sum(num_tpcs if count is None else count for count in counts) <= num_tpcs


@dataclass(frozen=True, slots=True)
class TpcMask:
    """The TPCs that a lane may use: at least one.

    Attributes:
        bits: bit i is set where TPC i, that is SMs 2i and 2i + 1, may be used.
        num_tpcs: TPCs of the GPU.

    Raises:
        PartitionError: no TPC at all, or bits beyond the last TPC.
    """

    bits: int
    num_tpcs: int

    def __post_init__(self) -> None:
        if self.num_tpcs < 1 or not 0 < self.bits < 1 << self.num_tpcs:
            raise PartitionError(
                f"a mask needs from 1 to all of the GPU's {self.num_tpcs} TPCs, but its bits are {self.bits:#x}: "
                "choose a partition in which each lane has at least one TPC"
            )

    @classmethod
    def in_order(cls, count: int, layout: GpcLayout, *, start: int = 0) -> "TpcMask":
        """``count`` TPCs in the layout's order, from its entry ``start`` on.

        Raises:
            PartitionError: ``count`` is not positive, the range leaves the GPU, or the layout does not name
                each TPC exactly once.
        """
        order = tuple(chain.from_iterable(layout))
        if sorted(order) != list(range(len(order))):
            raise PartitionError(
                f"a GPC layout must name every TPC from 0 on exactly once, but found {layout}: discover it anew"
            )
        if count < 1 or start < 0 or start + count > len(order):
            raise PartitionError(
                f"a lane needs from 1 to {len(order)} TPCs of this GPU, but {count} from the one numbered {start} "
                "on were asked for: choose a partition that fits"
            )
        return cls(sum(1 << tpc for tpc in order[start : start + count]), len(order))

    @property
    def sms(self) -> frozenset[int]:
        """The SMs that may be used, as ``%smid`` names them."""
        return frozenset(
            sm for sm in range(self.num_tpcs * SMS_PER_TPC) if self.bits >> sm // SMS_PER_TPC & 1
        )

    @property
    def disable_bits(self) -> int:
        """The mask in the driver's form, in which a set bit *disables* a TPC. The only place that inverts."""
        return ~self.bits & ((1 << self.num_tpcs) - 1)


def lane_masks(
    partition: SmPartition, *, num_tpcs: int, layout: GpcLayout | None = None
) -> dict[Lane, TpcMask]:
    """The masks of a partition: decode takes the first TPCs, prefill the last.

    They are disjoint where the two counts together do not exceed ``num_tpcs``, and overlap by the excess
    otherwise.

    Args:
        partition: TPCs of each lane.
        num_tpcs: TPCs of the GPU.
        layout: the order in which TPCs are taken; None takes them by number.

    Raises:
        PartitionError: a count is not positive or exceeds ``num_tpcs``, or the layout is another GPU's.
    """
    if layout is None:
        layout = (tuple(range(num_tpcs)),)
    if (found := sum(map(len, layout))) != num_tpcs:
        raise PartitionError(
            f"the GPC layout must name this GPU's {num_tpcs} TPCs, but it names {found}: discover it anew"
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
        masks[lane] = TpcMask.in_order(count, layout, start=0 if lane == "decode" else num_tpcs - count)
    return masks


def require_clusters(mask: TpcMask, layout: GpcLayout, lane: Lane) -> None:
    """Refuse a mask under which a kernel launched in thread-block clusters might never be scheduled.

    All blocks of a cluster must find room in one GPC at the same time. A mask that spreads its TPCs over the GPCs
    can leave none with enough SMs. cuBLAS kernels with clusters of four then hang the stream for ever (seen on an
    H200 with TPCs 0-7, one in each GPC). Green contexts are safe: their groups hold the largest portable cluster.

    Args:
        layout: groups of TPCs that share a GPC and hold the largest portable cluster. A group of another size than
            the first holds left-over TPCs of any GPC, and does not count.

    Raises:
        PartitionError: no group of the layout is wholly inside the mask.
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
