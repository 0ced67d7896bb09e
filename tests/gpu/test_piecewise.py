"""Short forwards in captured pieces on the GPU: against the same forward launched kernel by kernel."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from decoders import VARIANTS, new_decoder
from forward_rows import make_rows

from bullet_graph.graphs.key import row_buckets
from bullet_graph.graphs.piecewise import PiecewiseGraphs
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.presets import PRESETS
from bullet_graph.runtime.eager_lane import EagerLane
from bullet_graph.runtime.rows import Rows

DEVICE = torch.device("cuda")
NUM_BLOCKS, BLOCK_TOKENS, MAX_ROWS, MAX_SEQS = 2000, 16, 1700, 64


@dataclass(frozen=True)
class Setup:
    """Two lanes of one decoder: forwards of the second are launched kernel by kernel."""

    decoder: Decoder
    state: SamplingState
    captured: EagerLane
    eager: EagerLane


@pytest.fixture(scope="module", params=["llama-3.1-8b", "qwen3-8b", "qwen3-0.6b", *VARIANTS])
def setup(request: pytest.FixtureRequest) -> Setup:
    config = replace((PRESETS | VARIANTS)[request.param], num_layers=3)
    decoder = new_decoder(
        config, num_blocks=NUM_BLOCKS, max_len=8192, dtype=torch.bfloat16, device="cuda", random_cache=True
    )
    with torch.inference_mode():
        buckets = row_buckets(MAX_ROWS, config)
        graphs = PiecewiseGraphs(decoder, TritonOps(Gpu.of(DEVICE)), buckets=buckets)
        state = SamplingState(MAX_SEQS + 1, config.vocab_size, DEVICE)
        captured, eager = (
            EagerLane(decoder, state, max_num_seqs=MAX_SEQS, max_rows=MAX_ROWS, graphs=of_lane)
            for of_lane in (graphs, None)
        )
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graphs.capture(progress=False)
        torch.cuda.synchronize()
    assert set(graphs.buckets) <= set(buckets)
    assert all(graphs.bucket(rows) == rows for rows in graphs.buckets)
    return Setup(decoder, state, captured, eager)


def rows_of(chunks: list[tuple[int, int, bool]], decode_rows: int) -> Rows:
    """Chunks as (start, tokens, whether it ends the prompt), and decode rows of random contexts; a case's own data."""
    rng = np.random.default_rng(len(chunks) + decode_rows)
    blocks = 1 + rng.permutation(NUM_BLOCKS - 1)
    token_ids = rng.integers(0, 500, sum(tokens for _, tokens, _ in chunks))
    return make_rows(
        chunks,
        rng.integers(0, 400, decode_rows).tolist(),
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        blocks=blocks,
        token_ids=token_ids,
    )


@pytest.mark.parametrize(
    ("chunks", "decode_rows"),
    [
        ([(0, 16, True)], 0),
        ([(0, 100, True)], 20),
        ([(37, 129, False)], 33),
        ([(0, 7, True), (1000, 300, False), (64, 30, True)], 50),
        ([(0, 500, True), (0, 30, True)], 8),
        ([(0, 1000, True), (64, 500, True)], 8),  # in pieces for the small models alone
    ],
)
@torch.inference_mode()
def test_pieces_equal_the_eager_forward(setup: Setup, chunks: list[tuple[int, int, bool]], decode_rows: int) -> None:
    rows = rows_of(chunks, decode_rows)
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
    # Padding may change a matrix product's tiles, and so its rounding, which may send a row to another expert.
    routes = setup.decoder.config.num_experts > 0
    differences, norms = (x.norm(dim=-1) for x in (logits.float() - expected.float(), expected.float()))
    error = (differences / norms).median() if routes else differences.norm() / norms.norm()
    # By the roundings of three layers, two computations differ by 8.7e-3 (runtime/self_check.py); another one by 1.
    assert error < 1.5e-2
    for layer in range(3):
        for half, eager, old in zip(cache.layer(layer), after[layer], before[layer], strict=True):
            difference = torch.linalg.norm(half[1:].float() - eager[1:].float())
            assert difference < 1e-2 * torch.linalg.norm(eager[1:].float())
            written = (half != old).flatten(1).any(1)
            # No block but those of the step, and the padding block.
            assert torch.equal(written[1:], (eager != old).flatten(1).any(1)[1:])


@torch.inference_mode()
def test_long_forwards_and_parts_of_the_gpu_are_launched_kernel_by_kernel(setup: Setup) -> None:
    assert setup.captured.begin(rows_of([(0, 100, True)], 0), whole_gpu=False).bucket is None
    forward = setup.captured.begin(rows_of([(0, 1699, True)], 0))
    assert forward.bucket is None
    logits, _ = setup.captured.finish(setup.captured.run_layers(forward))
    assert torch.isfinite(logits).all()


@torch.inference_mode()
def test_pieces_can_stop_between_layers(setup: Setup) -> None:
    rows = rows_of([(0, 100, True)], 20)
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
