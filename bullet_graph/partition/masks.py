"""Masks over TPCs: pure arithmetic on which pairs of SMs a lane may use."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from bullet_graph.errors import PartitionError
from bullet_graph.partition.spec import SMS_PER_TPC, SmPartition

Lane = Literal["decode", "prefill"]
LANES: tuple[Lane, Lane] = ("decode", "prefill")

GpcLayout = tuple[tuple[int, ...], ...]
"""TPC ids in the order in which green contexts take them; TPCs of one inner tuple share a GPC."""


@dataclass(frozen=True, slots=True)
class TpcMask:
    """The TPCs that may be used: at least one.

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
    def contiguous(cls, count: int, *, num_tpcs: int, start: int = 0) -> "TpcMask":
        """``count`` TPCs from TPC ``start`` on.

        Raises:
            PartitionError: ``count`` is not positive, or the range leaves the GPU.
        """
        return cls.following_gpcs(count, (tuple(range(num_tpcs)),), start=start)

    @classmethod
    def following_gpcs(cls, count: int, layout: GpcLayout, *, start: int = 0) -> "TpcMask":
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
    def count(self) -> int:
        """TPCs that may be used."""
        return self.bits.bit_count()

    @property
    def num_sms(self) -> int:
        """SMs that may be used."""
        return self.count * SMS_PER_TPC

    @property
    def sms(self) -> frozenset[int]:
        """The SMs that may be used, as ``%smid`` names them."""
        return frozenset(
            sm for sm in range(self.num_tpcs * SMS_PER_TPC) if self.bits >> sm // SMS_PER_TPC & 1
        )

    @property
    def disable_bits(self) -> int:
        """The mask as the driver wants it: a set bit *disables* a TPC. The only place that inverts."""
        return ~self.bits & ((1 << self.num_tpcs) - 1)

    def complement(self) -> "TpcMask":
        """All other TPCs.

        Raises:
            PartitionError: this mask already has them all.
        """
        return TpcMask(self.disable_bits, self.num_tpcs)


@dataclass(frozen=True, slots=True)
class LaneMasks:
    """The masks of a partition's two lanes, which may overlap."""

    decode: TpcMask
    prefill: TpcMask


def lane_masks(partition: SmPartition, *, num_tpcs: int, layout: GpcLayout | None = None) -> LaneMasks:
    """The masks of a partition: decode takes the first TPCs, prefill the last.

    They are disjoint where the two counts together do not exceed ``num_tpcs``, and overlap by the excess
    otherwise.

    Args:
        partition: TPCs of each lane, None for all.
        num_tpcs: TPCs of the GPU.
        layout: take them in this order; else by number.

    Raises:
        PartitionError: a count is not positive or exceeds ``num_tpcs``, or the layout is another GPU's.
    """
    if layout is None:
        layout = (tuple(range(num_tpcs)),)
    if (found := sum(map(len, layout))) != num_tpcs:
        raise PartitionError(
            f"the GPC layout must name this GPU's {num_tpcs} TPCs, but it names {found}: discover it anew"
        )
    counts = []
    for lane in LANES:
        tpcs = lane_tpcs(partition, lane)
        counts.append(num_tpcs if tpcs is None else tpcs)
        if not 1 <= counts[-1] <= num_tpcs:
            raise PartitionError(
                f"the {lane} lane needs from 1 to {num_tpcs} TPCs of this GPU, but {tpcs} were asked for: "
                "choose a partition that fits, or None for all"
            )
    decode_tpcs, prefill_tpcs = counts
    return LaneMasks(
        TpcMask.following_gpcs(decode_tpcs, layout),
        TpcMask.following_gpcs(prefill_tpcs, layout, start=num_tpcs - prefill_tpcs),
    )


def require_clusters(mask: TpcMask, layout: GpcLayout, lane: Lane) -> None:
    """Refuse a mask under which a kernel launched in thread-block clusters might never be scheduled.

    All blocks of a cluster must find room in one GPC at the same time. A mask that spreads its TPCs over the
    GPCs can leave none with enough SMs: cuBLAS's kernels with clusters of four then hang the stream for ever
    (seen on an H200 with TPCs 0–7, one in each GPC). Green contexts are safe by construction: their groups
    hold the largest portable cluster.

    Args:
        layout: groups of TPCs that share a GPC and have room for the largest portable cluster; a group of
            another size than the first holds what was left over, of any GPC, and does not count.

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


def lane_tpcs(partition: SmPartition, lane: Lane) -> int | None:
    """TPCs of one lane, None for all."""
    return partition.decode_tpcs if lane == "decode" else partition.prefill_tpcs


def asks_for_disjoint_lanes(partition: SmPartition, *, num_tpcs: int) -> bool:
    """Whether the two lanes' TPCs fit on the GPU side by side."""
    counts = (partition.decode_tpcs, partition.prefill_tpcs)
    return sum(num_tpcs if count is None else count for count in counts) <= num_tpcs


def sm_ranges(sms: Iterable[int]) -> str:
    """SM ids for people to read, such as "0-7, 16-23"."""
    ranges: list[list[int]] = []
    for sm in sorted(sms):
        if ranges and sm == ranges[-1][-1] + 1:
            ranges[-1][1:] = [sm]
        else:
            ranges.append([sm])
    return ", ".join("-".join(map(str, ends)) for ends in ranges) or "none"
