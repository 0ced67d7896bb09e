"""The sizes that CUDA graphs are captured for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.graphs.key import batch_size_buckets, bucket_for, launch_bound_rows, row_buckets, worthwhile_buckets
from bullet_graph.models.presets import PRESETS

MAX = st.integers(1, 2000)


@given(MAX, st.data())
def test_the_bucket_is_the_smallest_that_holds_the_batch(max_batch_size: int, data: st.DataObject) -> None:
    buckets = batch_size_buckets(max_batch_size)
    assert (buckets[0], buckets[-1]) == (1, max_batch_size)
    assert list(buckets) == sorted(set(buckets))
    batch_size = data.draw(st.integers(1, max_batch_size))
    bucket = bucket_for(batch_size, buckets)
    assert bucket == min(size for size in buckets if size >= batch_size)
    limit = 8 if batch_size <= 56 else 16 if batch_size <= 240 else 32 if batch_size <= 480 else 64
    assert bucket - batch_size < limit
    with pytest.raises(IndexError):
        bucket_for(max_batch_size + 1, buckets)


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 10), min_size=1))
def test_no_larger_bucket_is_faster_than_one_that_is_kept(times_ms: dict[int, float]) -> None:
    kept = worthwhile_buckets(times_ms)
    assert kept[-1] == max(times_ms)
    assert list(kept) == sorted(kept)
    for size, time_ms in times_ms.items():
        padded = bucket_for(size, kept)
        assert times_ms[padded] <= time_ms
        assert times_ms[padded] == min(times_ms[larger] for larger in times_ms if larger >= size)


@given(st.integers(1, 20_000), st.sampled_from(sorted(PRESETS)), st.data())
def test_short_forwards_are_padded_little(max_rows: int, model: str, data: st.DataObject) -> None:
    buckets = row_buckets(max_rows, PRESETS[model])
    assert list(buckets) == sorted(set(buckets))
    largest = max(buckets, default=0)
    assert largest <= max_rows
    # All forwards that wait for the host have a bucket, but for those between the last one and the most rows.
    step = 16 if largest < 256 else 32 if largest < 512 else 64 if largest < 1024 else largest // 8
    assert largest >= max(launch_bound_rows(PRESETS[model]), 1024) or max_rows - largest < step
    if buckets:
        rows = data.draw(st.integers(1, largest))
        padding = bucket_for(rows, buckets) - rows
        assert padding <= (15 if rows <= 256 else 31 if rows <= 512 else 63 if rows <= 1024 else 511)
        assert padding <= max(15, rows / 8)


def test_the_largest_bucket_follows_the_model() -> None:
    assert launch_bound_rows(PRESETS["llama-3.1-8b"]) == 276
    assert launch_bound_rows(PRESETS["qwen3-0.6b"]) == 3815
    assert launch_bound_rows(PRESETS["llama-3.1-8b-fp8"]) == 1926
    large = (*range(16, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))
    assert len(large) == 32
    for name in ("llama-3.1-8b", "qwen3-8b", "llama-3.2-1b"):
        assert row_buckets(8448, PRESETS[name]) == large
    small = (*large, *range(1152, 2049, 128), *range(2304, 3841, 256))
    assert row_buckets(8448, PRESETS["qwen3-0.6b"]) == small
    assert row_buckets(8448, PRESETS["llama-3.1-8b-fp8"]) == small[: small.index(2048) + 1]
    assert row_buckets(8448, PRESETS["qwen3-30b-a3b-fp8"]) == (*small, 4096)
    assert row_buckets(2048 + 64, PRESETS["qwen3-0.6b"]) == small[: small.index(2048) + 1]
    assert row_buckets(8448, PRESETS["tiny"])[-4:] == (6656, 7168, 7680, 8192), "no forward is longer"
    assert row_buckets(15, PRESETS["tiny"]) == ()


def test_buckets_by_hand() -> None:
    assert batch_size_buckets(3) == (1, 2, 3)
    steps = (*range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 641, 64))
    assert batch_size_buckets(700) == (1, 2, 4, *steps, 700)
