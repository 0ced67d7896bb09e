"""The order of captures, and what may run before all is captured."""

from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.graphs.capture_order import CaptureProgress, PieceKey, capture_order, hot_keys
from bullet_graph.graphs.capture_plan import CapturePlan, DecodeSizes, default_plan
from bullet_graph.graphs.key import GraphKey
from bullet_graph.models.presets import PRESETS
from bullet_graph.partition.masks import WHOLE_GPU, SmPartition

NARROW, WIDE = SmPartition(16, 50), SmPartition(32, 34)
LAYERS = 2
PLAN = CapturePlan(
    model="tiny",
    dtype="bfloat16",
    num_sms=132,
    max_num_seqs=64,
    decode=(
        DecodeSizes(None, (1, 2, 4, 6, 16, 24, 64)),
        DecodeSizes(32, (4, 8, 16)),
        DecodeSizes(64, (2, 32)),
    ),
    piecewise_rows=(16, 32, 128),
)

sizes = st.sets(st.integers(1, 300), min_size=1, max_size=8).map(lambda found: tuple(sorted(found)))


@st.composite
def plans(draw: st.DrawFn) -> CapturePlan:
    whole = draw(sizes)
    parts = draw(st.lists(sizes, max_size=3))
    return CapturePlan(
        model="tiny",
        dtype="bfloat16",
        num_sms=132,
        max_num_seqs=whole[-1],
        decode=(
            DecodeSizes(None, whole),
            *(
                DecodeSizes(16 * (index + 1), tuple(size for size in part if size <= whole[-1]) or whole[:1])
                for index, part in enumerate(parts)
            ),
        ),
        piecewise_rows=draw(sizes),
    )


def test_the_order_by_hand() -> None:
    hot = [GraphKey(size) for size in (64, 1, 4, 6, 24)]
    assert hot_keys(PLAN) == hot
    assert capture_order(PLAN, LAYERS) == [
        *hot,
        *(GraphKey(size) for size in (2, 16)),
        GraphKey(16, NARROW),
        GraphKey(32, WIDE),
        *(PieceKey(rows, layer) for rows in (128, 16, 32) for layer in (0, 1)),
        GraphKey(2, WIDE),
        GraphKey(4, NARROW),
        GraphKey(8, NARROW),
    ]


def test_few_of_all_buckets_are_hot() -> None:
    plan = default_plan(
        model="tiny",
        dtype="bfloat16",
        num_sms=132,
        max_num_seqs=256,
        max_rows=1024,
        shape=PRESETS["tiny"],
        decode_sms=(16, 32),
    )
    assert [key.batch_size for key in hot_keys(plan)] == [256, 1, 4, 16, 48, 112]


@given(plans(), st.integers(1, 3))
def test_all_is_captured_once_and_the_largest_before_the_smaller(plan: CapturePlan, layers: int) -> None:
    order = capture_order(plan, layers)
    assert len(order) == len(set(order))
    steps = [key for key in order if isinstance(key, GraphKey)]
    assert {(key.partition, key.batch_size) for key in steps} == {
        (partition, size) for partition, found in plan.batch_sizes.items() for size in found
    }
    pieces = [key for key in order if isinstance(key, PieceKey)]
    assert {(key.rows, key.layer) for key in pieces} == {
        (rows, layer) for rows in plan.piecewise_rows for layer in range(layers)
    }
    assert order[0] == GraphKey(plan.max_num_seqs)
    for partition, found in plan.batch_sizes.items():
        first = next(key for key in steps if key.partition == partition)
        assert first.batch_size == found[-1]
    assert pieces[0].rows == plan.piecewise_rows[-1]
    for rows in plan.piecewise_rows:
        assert [key.layer for key in pieces if key.rows == rows] == list(range(layers))


@given(plans())
def test_hot_sizes_pad_to_twice_the_planned_rows_at_most(plan: CapturePlan) -> None:
    captured = sorted(key.batch_size for key in hot_keys(plan))
    for rows in range(1, plan.max_num_seqs + 1):
        padded = next(size for size in captured if size >= rows)
        assert padded <= 2 * plan.padded(rows)


@given(plans(), st.integers(1, 2))
def test_a_part_of_the_gpu_takes_only_batches_padded_as_planned(plan: CapturePlan, layers: int) -> None:
    progress = CaptureProgress(plan, layers)
    captured: set[object] = set()
    assert all(progress.max_batch_size(partition) == 0 for partition in plan.batch_sizes)
    while (key := progress.next) is not None:
        progress.note(key)
        captured.add(key)
        assert progress.max_batch_size(WHOLE_GPU) == plan.max_num_seqs
        for entry, partition in zip(plan.decode, plan.batch_sizes, strict=True):
            if partition == WHOLE_GPU:
                continue
            most = progress.max_batch_size(partition)
            planned = [plan.padded(rows, entry.decode_sms) for rows in range(1, most + 1)]
            assert all(GraphKey(size, partition) in captured for size in planned)
    assert progress.num_missing == 0
    assert {p: progress.max_batch_size(p) for p in plan.batch_sizes} == plan.max_batch_sizes
