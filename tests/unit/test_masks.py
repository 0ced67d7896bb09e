"""Masks over TPCs: sizes, overlaps, orders."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.errors import PartitionError
from bullet_graph.partition.masks import (
    LANES,
    WHOLE_GPU,
    GpcLayout,
    SmPartition,
    TpcMask,
    check_clusters,
    fits_side_by_side,
    lane_masks,
    sm_ranges,
)

NUM_TPCS = 66
# As an H200 hands out its TPCs: four of each GPC at a time.
H200_LAYOUT: GpcLayout = (
    *(tuple(range(32 * half + gpc, 32 * half + 32, 8)) for half in (0, 1) for gpc in range(8)),
    (64, 65),
)

masks = st.integers(2, 128).flatmap(
    lambda num_tpcs: st.builds(TpcMask, st.integers(1, (1 << num_tpcs) - 1), st.just(num_tpcs))
)


@st.composite
def layouts(draw: st.DrawFn) -> GpcLayout:
    order = draw(st.permutations(range(draw(st.integers(1, 80)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(order)))) | {0, len(order)})
    return tuple(tuple(order[a:b]) for a, b in pairwise(cuts))


@given(masks)
def test_a_mask_disables_exactly_the_tpcs_it_leaves_out(mask: TpcMask) -> None:
    assert mask.disable_bits >> mask.num_tpcs == 0
    for tpc in range(mask.num_tpcs):
        assert ({2 * tpc, 2 * tpc + 1} <= mask.sms) == (mask.disable_bits >> tpc & 1 == 0)
    assert len(mask.sms) == 2 * mask.bits.bit_count()


@given(st.data(), layouts())
def test_lanes_are_disjoint_or_overlap_by_the_excess(data: st.DataObject, layout: GpcLayout) -> None:
    num_tpcs = sum(map(len, layout))
    sizes = st.one_of(st.none(), st.integers(1, num_tpcs))
    partition = SmPartition(data.draw(sizes), data.draw(sizes))
    lanes = lane_masks(partition, num_tpcs=num_tpcs, layout=layout)
    counts = [num_tpcs if size is None else size for size in (partition.decode_tpcs, partition.prefill_tpcs)]
    order = [tpc for gpc in layout for tpc in gpc]
    taken = order[: counts[0]], order[num_tpcs - counts[1] :]
    assert [lanes[lane].sms for lane in LANES] == [
        {sm for tpc in tpcs for sm in (2 * tpc, 2 * tpc + 1)} for tpcs in taken
    ]
    shared = lanes["decode"].sms & lanes["prefill"].sms
    assert len(shared) == 2 * max(0, sum(counts) - num_tpcs)
    assert fits_side_by_side(partition, num_tpcs=num_tpcs) == (not shared)
    if sum(counts) == num_tpcs:
        assert lanes["prefill"].bits == lanes["decode"].disable_bits


@pytest.mark.parametrize("count", [0, -1, NUM_TPCS + 1])
def test_a_lane_has_from_one_to_all_tpcs(count: int) -> None:
    for partition, lane in ((SmPartition(count, 2), "decode"), (SmPartition(None, count), "prefill")):
        with pytest.raises(PartitionError, match=f"{lane} lane needs from 1 to 66 TPCs.*but {count} were"):
            lane_masks(partition, num_tpcs=NUM_TPCS)


@pytest.mark.parametrize("layout", [((0, 1), (1, 2)), ((0, 2),), ((1, 2),), ((0, 1), (2, 3))])
def test_a_layout_names_each_tpc_of_the_gpu_once(layout: GpcLayout) -> None:
    with pytest.raises(PartitionError, match="this GPU's 3 TPCs exactly once"):
        lane_masks(WHOLE_GPU, num_tpcs=3, layout=layout)


def test_sm_ranges() -> None:
    assert [sm_ranges(sms) for sms in ([], [3], [0, 1, 2], [5, 0, 1, 7, 6])] == ["none", "3", "0-2", "0-1, 5-7"]


@pytest.mark.parametrize(
    ("bits", "sms"), [(0xFF, "0-15"), (0b11 << 64, "128-131")], ids=["one TPC in each GPC", "left over"]
)
def test_a_mask_without_room_for_a_cluster(bits: int, sms: str) -> None:
    with pytest.raises(PartitionError, match=f"SMs {sms} hold no whole group of 8 SMs"):
        check_clusters(TpcMask(bits, NUM_TPCS), H200_LAYOUT, "decode")


@given(st.integers(4, NUM_TPCS - 6))
def test_lanes_that_follow_the_gpcs_have_room_for_clusters(decode_tpcs: int) -> None:
    partition = SmPartition(decode_tpcs, NUM_TPCS - decode_tpcs)
    for lane, mask in lane_masks(partition, num_tpcs=NUM_TPCS, layout=H200_LAYOUT).items():
        check_clusters(mask, H200_LAYOUT, lane)
