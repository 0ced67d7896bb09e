"""Decode attention in Triton against the reference: in Triton's interpreter where there is no GPU."""

import dataclasses
from itertools import accumulate, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet_graph.errors import ConfigError
from bullet_graph.kernels.attention import LayerRows, ReferenceAttention
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.memory import KVCache
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bullet_graph.kernels import decode_attention
from bullet_graph.kernels.decode_attention import DecodeBatch, TritonDecodeAttention, window_indptr
from bullet_graph.kernels.shared_blocks import SharedBlocks, shared_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter multiplies bfloat16's bits as integers; float16 takes the same way through the kernel.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
LAYER = 1


def model(*, heads: int = 8, kv_heads: int = 2, head_dim: int = 64, window: int | None = None) -> ModelConfig:
    return dataclasses.replace(
        PRESETS["tiny"],
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layer_windows=() if window is None else (None, window),
    )


def filled_cache(config: ModelConfig, num_blocks: int, dtype: torch.dtype, block_tokens: int = 16) -> KVCache:
    cache = KVCache(config, num_blocks=num_blocks, block_tokens=block_tokens, dtype=dtype, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(5)
    for tensor in cache.layer(LAYER):
        tensor.copy_(torch.randn(tensor.shape, generator=generator, device=DEVICE))
    return cache


def rows_of(q: torch.Tensor) -> LayerRows:
    """Their keys and values are in the cache, and read from there."""
    return LayerRows(q, q[:, :0], q[:, :0])


def lane_of(config: ModelConfig, cache: KVCache, *, max_rows: int = 2, num_sms: int = 1) -> TritonDecodeAttention:
    return TritonDecodeAttention(config, cache, max_rows=max_rows, gpu=Gpu(num_sms, (8, 0)))


def check(
    config: ModelConfig,
    kv_lens: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    num_sms: int = 3,
    padding_rows: int = 0,
    block_tokens: int = 16,
    seed: int = 0,
    twice: bool = False,
) -> None:
    """Compare both ways to add up with the reference; ``twice``: and each with a second run.

    Blocks are scattered. Those that no row owns, and tokens before the window, hold NaN. Blocks before it are others'.
    """
    window = config.windows[LAYER]
    counts = [-(-length // block_tokens) for length in kv_lens]
    num_blocks = sum(counts) + 2
    cache = filled_cache(config, num_blocks, dtype, block_tokens)
    shuffled = (1 + np.random.default_rng(seed).permutation(num_blocks - 1)).astype(np.int32)
    padded_lens = kv_lens + [1] * padding_rows
    indptr = [0, *accumulate(counts + [1] * padding_rows)]
    indices = torch.from_numpy(np.append(shuffled[: sum(counts)], np.zeros(padding_rows, np.int32))).to(DEVICE)
    for tensor in cache.layer(LAYER):
        tensor[int(shuffled[-1])] = float("nan")
        for length, end in zip(kv_lens, indptr[1:], strict=False):
            tensor[int(indices[end - 1]), (length - 1) % block_tokens + 1 :] = float("nan")
        for length, begin in zip(kv_lens, indptr, strict=False):
            for position in range(0 if window is None else length - window):
                tensor[int(indices[begin + position // block_tokens]), position % block_tokens] = float("nan")
    rows = len(padded_lens)
    q = torch.randn(rows, config.num_heads, config.head_dim, generator=torch.Generator().manual_seed(seed))
    q = q.to(DEVICE, dtype)
    # The reference multiplies what is masked by zero, and so must not meet NaN.
    clean = KVCache(config, num_blocks=num_blocks, block_tokens=block_tokens, dtype=torch.float32, device=DEVICE)
    for target, source in zip(clean.layer(LAYER), cache.layer(LAYER), strict=True):
        target.copy_(source.float().nan_to_num(0.0))
    reference = ReferenceAttention(
        clean, q_indptr=list(range(rows + 1)), kv_lens=padded_lens, kv_indptr=indptr, kv_indices=indices.long()
    )
    by_window = {}
    if window is not None:
        lens = np.array(padded_lens, dtype=np.int32)
        by_window[window] = torch.from_numpy(window_indptr(lens, window, block_tokens)).to(DEVICE)
        indices = indices.clone()
        for length, begin in zip(padded_lens, indptr, strict=False):
            indices[begin : begin + max(length - window, 0) // block_tokens] = int(shuffled[-1])
    batch = DecodeBatch(
        torch.tensor(indptr, dtype=torch.int32, device=DEVICE),
        indices,
        torch.tensor([(n - 1) % block_tokens + 1 for n in padded_lens], dtype=torch.int32, device=DEVICE),
        by_window,
    )
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}[dtype]
    expected = reference.run(LAYER, rows_of(q.float()))
    for combine_rows, few_heads in product((1, rows + 1), (0, 64)):
        lane = lane_of(config, cache, max_rows=rows + 1, num_sms=num_sms)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bullet_graph.kernels.decode_attention._FEW_HEADS", few_heads)
            patch.setattr("bullet_graph.kernels.decode_attention._COMBINE_ROWS", combine_rows)
            plan = lane.plan(batch)
        assert (plan.combination is None) == (combine_rows == 1)
        first = plan.run(LAYER, rows_of(q))
        torch.testing.assert_close(first.float(), expected, rtol=tolerance, atol=tolerance)
        # What is left in the scratch makes no difference, nor who comes last.
        assert not twice or torch.equal(plan.run(LAYER, rows_of(q)), first)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (2, 2, 64, torch.float32),
        (8, 2, 128, torch.float32),
        (14, 2, 128, HALF),
        (8, 1, 64, HALF),
        (16, 8, 128, HALF),
        (3, 3, 64, HALF),
        (40, 40, 16, torch.float32),
        (32, 1, 16, HALF),
    ],
)
def test_any_heads(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    check(model(heads=heads, kv_heads=kv_heads, head_dim=head_dim), [37, 1], dtype=dtype, num_sms=1, padding_rows=1)


@settings(max_examples=8)
@given(
    kv_lens=st.lists(st.integers(1, 120) | st.sampled_from([1, 15, 16, 17, 64]), min_size=1, max_size=3),
    padding_rows=st.integers(0, 2),
    num_sms=st.integers(1, 4),
    window=st.none() | st.integers(1, 128),
    seed=st.integers(0, 99),
)
def test_any_batch(kv_lens: list[int], padding_rows: int, num_sms: int, window: int | None, seed: int) -> None:
    config = model(heads=4, kv_heads=2, head_dim=16, window=window)
    check(config, kv_lens, num_sms=num_sms, padding_rows=padding_rows, seed=seed, twice=True)


def batch_of(rows: list[list[int]], *, last: int = 3) -> tuple[np.ndarray, np.ndarray, DecodeBatch]:
    """Rows of these blocks, the last of which holds ``last`` tokens."""
    indptr = np.array([0, *accumulate(map(len, rows))], dtype=np.int32)
    indices = np.concatenate(rows).astype(np.int32)
    shared = shared_blocks(indptr, indices)
    on_device = None if shared is None else SharedBlocks(*(torch.from_numpy(a).to(DEVICE) for a in shared))
    lasts = torch.full((len(rows),), last, dtype=torch.int32, device=DEVICE)
    tensors = torch.from_numpy(indptr).to(DEVICE), torch.from_numpy(indices).to(DEVICE)
    return indptr, indices, DecodeBatch(*tensors, lasts, shared=on_device)


@settings(max_examples=10)
@given(
    groups=st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 3), min_size=1, max_size=6)), max_size=3),
    num_sms=st.integers(1, 3),
    combine_rows=st.sampled_from([1, 99]),
    group_blocks=st.sampled_from([1, 3]),
)
def test_common_blocks_are_read_once(
    groups: list[tuple[int, list[int]]], num_sms: int, combine_rows: int, group_blocks: int
) -> None:
    """Each group has common blocks, perhaps none, and rows with so many blocks of their own."""
    ids = iter(range(1, 100))
    rows = [[next(ids)], [next(ids)]]
    for num_common, own in groups:
        common = [next(ids) for _ in range(num_common)]
        rows += [common + [next(ids) for _ in range(count)] for count in own]
    config = model(heads=4, head_dim=16)
    cache = filled_cache(config, 100, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bullet_graph.kernels.shared_blocks._LEAST_SHARED_BLOCKS", 1)
        for name, value in (("_COMBINE_ROWS", combine_rows), ("_GROUP_BLOCKS", group_blocks)):
            patch.setattr(decode_attention, name, value)
        indptr, _, batch = batch_of(rows)
        plan = lane_of(config, cache, max_rows=len(rows), num_sms=num_sms).plan(batch)
    assert (batch.shared is not None) == any(num_common and len(own) > 1 for num_common, own in groups)
    lens = (16 * np.diff(indptr) - 13).tolist()
    q = torch.randn(len(rows), 4, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    reference = ReferenceAttention(
        cache, q_indptr=list(range(len(rows) + 1)), kv_lens=lens, kv_indptr=indptr.tolist(), kv_indices=batch.kv_indices
    )
    for _ in range(2):
        torch.testing.assert_close(plan.run(LAYER, rows_of(q)), reference.run(LAYER, rows_of(q)), rtol=1e-5, atol=1e-5)


def test_which_blocks_are_common() -> None:
    common = list(range(1, 101))
    rows = [[*common, 200 + row] for row in range(6)] + [[7], [*common[:50], 300, 301], [8]]
    _, _, batch = batch_of(rows)
    assert batch.shared is not None
    # At most four at a time; the row after the six is another's.
    assert batch.shared.members.tolist() == [0, 4, 4, 2, 0, 0, 0, 0]
    assert batch.shared.group_indptr.tolist() == [0, 100, 200, 200, 200]
    assert torch.diff(batch.shared.own_indptr).tolist() == [1, 1, 1, 1, 1, 1, 1, 52, 1]
    assert batch_of([[*common, 200], [9]])[2].shared is None
    # What all members have in common, whichever pair has the least.
    for lengths in ([20, 60, 90], [90, 60, 20], [60, 20, 90]):
        rows = [[*common[:length], *range(200 + 100 * row, 300 + 100 * row)] for row, length in enumerate(lengths)]
        shared = batch_of(rows)[2].shared
        assert shared is not None
        assert (shared.members.tolist(), shared.group_indptr.tolist()) == ([0, 3], [0, 20])
    # Few in common.
    assert batch_of([[*common[:7], *[200 + row] * 9] for row in range(60)])[2].shared is None
    # A block of this cache is 16 KiB: for 9,000 less to read, a launch does not pay; 500 stay in the L2 cache.
    lane = lane_of(model(), filled_cache(model(), 2, torch.float32), max_rows=8)
    for blocks, rows, enough in ((5000, 4, True), (3000, 4, False), (600, 32, True), (500, 40, False)):
        found = lane.shared_blocks(blocks * np.arange(rows + 1), np.tile(np.arange(blocks), rows))
        assert (found is not None) == enough
    # Other layers' or another format's kernels do not know groups.
    for other in (model(window=9), dataclasses.replace(model(), fp8_kv=True)):
        lane = lane_of(other, filled_cache(other, 2, torch.float32), max_rows=9)
        assert lane.shared_blocks(np.array([0, 9, 18]), np.tile(np.arange(9), 2)) is None
        with pytest.raises(ConfigError, match="without windows"):
            lane.plan(batch)
    # A row's last block is its own, whatever its number.
    assert batch_of([common[:9]] * 90)[2].shared.group_indptr[1] == 8  # type: ignore[union-attr]


def test_one_sequence_over_more_workers_than_are_combined_at_once() -> None:
    check(model(heads=2, kv_heads=1, head_dim=16), [16 * 33], num_sms=18)


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
@pytest.mark.parametrize("window", [None, 20])
def test_any_block_size(block_tokens: int, window: int | None) -> None:
    check(model(window=window), [70, 5], num_sms=1, block_tokens=block_tokens)  # some tiles are before the window


def test_a_window_takes_no_more_work_than_its_blocks() -> None:
    lens = np.array([1000, 1, 17, 16, 33], dtype=np.int32)
    # 1000 tokens: the window begins at 983, in the block of 976 to 991.
    assert window_indptr(lens, 17, 16).tolist() == [0, 2, 3, 5, 6, 8]
    assert window_indptr(lens, 5000, 16).tolist() == [0, *np.cumsum(-(-lens // 16))]


def test_a_plan_reads_its_batch_when_it_runs() -> None:
    """As a replayed graph does: the same plan, other lengths and blocks in the same buffers."""
    config = model(head_dim=16)
    cache = filled_cache(config, 9, torch.float32)
    indptr = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    indices = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    last = torch.tensor([1, 1], dtype=torch.int32, device=DEVICE)
    plan = lane_of(config, cache, num_sms=4).plan(DecodeBatch(indptr, indices, last))
    q = torch.randn(2, config.num_heads, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    plan.run(LAYER, rows_of(q))
    indptr.copy_(torch.tensor([0, 5, 8]))
    indices.copy_(torch.arange(8, 0, -1))
    last.copy_(torch.tensor([3, 16]))
    reference = ReferenceAttention(
        cache, q_indptr=[0, 1, 2], kv_lens=[67, 48], kv_indptr=[0, 5, 8], kv_indices=indices.long()
    )
    torch.testing.assert_close(plan.run(LAYER, rows_of(q)), reference.run(LAYER, rows_of(q)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "rows", "num_sms", "programs"),
    [
        *((HALF, 8, 128, 16, 8, 4), (HALF, 8, 128, 17, 8, 8), (HALF, 8, 128, 16, 6, 8), (HALF, 8, 256, 17, 8, 6)),
        *((torch.float8_e4m3fn, 8, 128, 8, 8, 4), (torch.float8_e4m3fn, 8, 256, 9, 8, 8)),
        *((torch.float32, 8, 256, 1, 8, 3), (HALF, 256, 128, 17, 8, 4)),
    ],
)
def test_programs_of_an_sm(
    dtype: torch.dtype, heads: int, head_dim: int, rows: int, num_sms: int, programs: int
) -> None:
    """Fewer where there are few key heads to read, on all SMs, where heads are large, or many to a key head."""
    config = model(heads=heads, kv_heads=8, head_dim=head_dim)
    lane = lane_of(config, filled_cache(config, 1, dtype), max_rows=17, num_sms=8)
    indptr = torch.arange(rows + 1, dtype=torch.int32)
    plan = lane.plan(DecodeBatch(indptr, indptr[:-1], torch.ones_like(indptr[:-1])), num_sms=num_sms)
    ((grid,),) = plan.attention[None].args  # type: ignore[attr-defined]
    assert grid == programs * num_sms


def test_heads_that_no_kernel_takes() -> None:
    config = model(head_dim=80)
    with pytest.raises(ConfigError, match="head_dim that is a power of two"):
        lane_of(config, filled_cache(config, 2, torch.float32))
    with pytest.raises(ConfigError, match="blocks of a multiple of 16 tokens, got 8"):
        lane_of(model(), filled_cache(model(), 2, torch.float32, block_tokens=8))


def test_bad_plans() -> None:
    config = model()
    lane = lane_of(config, filled_cache(config, 2, torch.float32), num_sms=4)

    def batch(rows: int) -> DecodeBatch:
        return DecodeBatch(
            torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
            torch.zeros(rows, dtype=torch.int32, device=DEVICE),
            torch.ones(rows, dtype=torch.int32, device=DEVICE),
        )

    for rows in (0, 3):
        with pytest.raises(ConfigError, match=f"has {rows} rows"):
            lane.plan(batch(rows))
    for num_sms in (0, 5):
        with pytest.raises(ConfigError, match=f"on {num_sms} SMs"):
            lane.plan(batch(1), num_sms=num_sms)
    q = torch.zeros(2, config.num_heads, config.head_dim, device=DEVICE)
    with pytest.raises(ConfigError, match="1 rows that were planned"):
        lane.plan(batch(1)).run(0, rows_of(q))
    with pytest.raises(ConfigError, match="out must be contiguous"):
        lane.plan(batch(2)).run_into(0, rows_of(q), torch.zeros_like(q).transpose(0, 1).contiguous().transpose(0, 1))


@pytest.mark.parametrize("window", [None, 21])
def test_an_fp8_cache(window: int | None) -> None:
    config = dataclasses.replace(model(window=window), fp8_kv=True)
    check(config, [1, 16, 40], padding_rows=1)
    check(dataclasses.replace(config, num_heads=14, num_kv_heads=1, head_dim=256), [33], dtype=HALF)
