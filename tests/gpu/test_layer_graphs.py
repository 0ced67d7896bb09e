"""Short forwards in captured pieces on the GPU: against the same forward launched kernel by kernel."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from bullet_graph.graphs.key import row_buckets
from bullet_graph.graphs.piecewise import PiecewiseGraphs
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.memory import KVCache
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.decoder import Decoder, cos_sin_table
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import dummy_weights
from bullet_graph.runtime.eager_lane import EagerLane
from bullet_graph.runtime.rows import lay_out
from bullet_graph.runtime.step import DecodeBatch, PrefillBatch

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
NUM_BLOCKS, BLOCK_TOKENS, MAX_ROWS, MAX_SEQS = 2000, 16, 1700, 64


@dataclass(frozen=True)
class Setup:
    """Two lanes of one decoder: forwards of the second are launched kernel by kernel."""

    decoder: Decoder
    state: SamplingState
    captured: EagerLane
    eager: EagerLane


@pytest.fixture(scope="module", params=["llama-3.1-8b", "qwen3-8b", "qwen3-0.6b"])
def setup(request: pytest.FixtureRequest) -> Setup:
    config = replace(PRESETS[request.param], num_layers=3)
    weights = dummy_weights(config, dtype=torch.bfloat16, device=DEVICE, seed=11)
    cache = KVCache(
        config, num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, dtype=torch.bfloat16, device=DEVICE
    )
    for layer in range(config.num_layers):
        for half in cache.layer(layer):
            half.normal_()
    decoder = Decoder(config, weights, cache, cos_sin_table(config, 8192, DEVICE))
    with torch.inference_mode():
        buckets = row_buckets(MAX_ROWS, config)
        graphs = PiecewiseGraphs(decoder, TritonOps(Gpu.of(DEVICE)), buckets=buckets)
        state = SamplingState(MAX_SEQS + 1, DEVICE)
        captured, eager = (
            EagerLane(
                decoder,
                state,
                max_num_seqs=MAX_SEQS,
                max_rows=MAX_ROWS,
                num_kv_blocks=NUM_BLOCKS,
                graphs=lane_graphs,
            )
            for lane_graphs in (graphs, None)
        )
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graphs.capture(progress=False)
        torch.cuda.synchronize()
    assert set(graphs.buckets) <= set(buckets)
    assert all(graphs.bucket(rows) == rows for rows in graphs.buckets)
    return Setup(decoder, state, captured, eager)


def make_step(
    chunks: list[tuple[int, int, bool]], decode_rows: int, seed: int
) -> tuple[PrefillBatch, DecodeBatch]:
    """Chunks as (start, tokens, whether it ends the prompt), and decode rows of random contexts."""
    rng = np.random.default_rng(seed)
    blocks = (1 + rng.permutation(NUM_BLOCKS - 1)).astype(np.int32)

    def take(ends: list[int]) -> tuple[np.ndarray, np.ndarray]:
        nonlocal blocks
        counts = [-(-end // BLOCK_TOKENS) for end in ends]
        taken, blocks = blocks[: sum(counts)], blocks[sum(counts) :]
        return np.concatenate(([0], np.cumsum(counts))).astype(np.int32), taken

    lengths = [tokens for _, tokens, _ in chunks]
    kv_indptr, kv_indices = take([start + tokens for start, tokens, _ in chunks])
    prefill = PrefillBatch(
        slots=np.arange(len(chunks), dtype=np.int32),
        token_ids=rng.integers(0, 1000, sum(lengths)).astype(np.int32),
        q_indptr=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        starts=np.array([start for start, _, _ in chunks], dtype=np.int32),
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        samples=np.array([samples for _, _, samples in chunks]),
    )
    positions = rng.integers(0, 400, decode_rows).astype(np.int32)
    kv_indptr, kv_indices = take([int(position) + 1 for position in positions])
    slots = np.arange(len(chunks), len(chunks) + decode_rows, dtype=np.int32)
    return prefill, DecodeBatch(slots, positions, kv_indptr, kv_indices)


@pytest.mark.parametrize(
    ("chunks", "decode_rows"),
    [
        ([(0, 16, True)], 0),
        ([(0, 100, True)], 20),
        ([(37, 129, False)], 33),
        ([(0, 7, True), (1000, 300, False), (64, 30, True)], 50),
        ([(0, 500, True), (0, 30, True)], 8),
        ([(0, 1000, True), (64, 500, True)], 8),  # in pieces for the small model alone
    ],
)
@torch.inference_mode()
def test_pieces_equal_the_eager_forward(
    setup: Setup, chunks: list[tuple[int, int, bool]], decode_rows: int
) -> None:
    prefill, decode = make_step(chunks, decode_rows, seed=len(chunks) + decode_rows)
    rows = lay_out(prefill, decode if decode_rows else None, BLOCK_TOKENS)
    cache = setup.decoder.cache
    before = [tuple(half.clone() for half in cache.layer(i)) for i in range(3)]
    last_tokens = setup.state.last_token.clone()
    expected, _ = setup.eager.run(rows)
    after = [tuple(half.clone() for half in cache.layer(i)) for i in range(3)]
    for layer, halves in enumerate(before):
        for half, old in zip(cache.layer(layer), halves, strict=True):
            half.copy_(old)
    setup.state.last_token.copy_(last_tokens)
    longest = 1024 if setup.decoder.config.hidden_size > 1024 else 1664
    assert (setup.captured.begin(rows).bucket is not None) == (len(rows.positions) <= longest)
    logits, _ = setup.captured.run(rows)
    # Padding may change a matrix product's tiles, and so its rounding.
    error = torch.linalg.norm(logits.float() - expected.float()) / torch.linalg.norm(expected.float())
    assert error < 1e-2
    for layer in range(3):
        for half, eager, old in zip(cache.layer(layer), after[layer], before[layer], strict=True):
            difference = torch.linalg.norm(half[1:].float() - eager[1:].float())
            assert difference < 1e-2 * torch.linalg.norm(eager[1:].float())
            written = (half != old).flatten(1).any(1)
            # No block but those of the step, and the padding block.
            assert torch.equal(written[1:], (eager != old).flatten(1).any(1)[1:])


@torch.inference_mode()
def test_a_forward_too_long_for_any_bucket_is_launched_kernel_by_kernel(setup: Setup) -> None:
    prefill, _ = make_step([(0, 1699, True)], 0, seed=1)
    forward = setup.captured.begin(lay_out(prefill, None, BLOCK_TOKENS))
    assert forward.bucket is None
    logits, _ = setup.captured.finish(setup.captured.run_layers(forward))
    assert torch.isfinite(logits).all()


@torch.inference_mode()
def test_pieces_are_for_the_whole_gpu(setup: Setup) -> None:
    prefill, _ = make_step([(0, 100, True)], 0, seed=2)
    rows = lay_out(prefill, None, BLOCK_TOKENS)
    assert setup.captured.begin(rows).bucket is not None
    assert setup.captured.begin(rows, whole_gpu=False).bucket is None


@torch.inference_mode()
def test_pieces_can_stop_between_layers(setup: Setup) -> None:
    prefill, decode = make_step([(0, 100, True)], 20, seed=3)
    rows = lay_out(prefill, decode, BLOCK_TOKENS)
    lane = setup.captured
    last_tokens = setup.state.last_token.clone()
    whole, _ = lane.run(rows)
    whole = whole.clone()
    setup.state.last_token.copy_(last_tokens)
    forward = lane.begin(rows)
    assert forward.bucket is not None
    forward = lane.run_layers(forward, 0, 2)
    forward = lane.run_layers(forward, 2, None)
    logits, _ = lane.finish(forward)
    assert torch.equal(logits, whole)
