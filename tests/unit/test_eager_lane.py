"""Forwards of the eager lane on the CPU, with FlashInfer's modules in plain torch, against the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is published for Linux only")

from decoders import new_decoder
from fakes.flashinfer_prefill import Runs, install
from forward_rows import make_rows

from bullet_graph.kernels.ops import TorchOps
from bullet_graph.kernels.sampler import SamplingState, token_logprobs
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import eager_functions
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.roofline import Fp8Weights
from bullet_graph.runtime import eager_lane
from bullet_graph.runtime.eager_lane import EagerLane
from bullet_graph.runtime.rows import Chunk
from bullet_graph.runtime.self_check import reference_logits
from bullet_graph.runtime.step import Scored

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton's interpreter")

CPU = torch.device("cpu")
CONFIG = replace(PRESETS["tiny"], num_layers=2, num_heads=4, num_kv_heads=2, qk_norm=True)
NUM_BLOCKS, BLOCK_TOKENS, MAX_SEQS = 40, 16, 8


@pytest.fixture(params=["torch"])
def runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """What FlashInfer's modules have run, once they are fakes and the GPU has four SMs; rows run in plain torch."""
    if request.param == "torch":
        monkeypatch.setattr(eager_lane, "TritonOps", lambda *_, **__: TorchOps())
    monkeypatch.setattr(eager_lane, "FEW_FRESH_ROWS", 0)
    return install(monkeypatch)


def filled_decoder(config: ModelConfig) -> Decoder:
    return new_decoder(config, num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, random_cache=True)


def assert_near(found: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    """In FP8, what lies on the border of two numbers may be rounded to either: it has an ``error`` above 0."""
    if error:
        assert (found.float() - expected.float()).norm() <= error * expected.float().norm()
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def check_forward(
    config: ModelConfig, chunks: list[Chunk], decode: list[int], *, error: float = 0, cache_error: float = 0
) -> None:
    """Compare a forward with the reference, and what it has cached."""
    decoder, reference = filled_decoder(config), filled_decoder(config)
    lane = EagerLane(decoder, SamplingState(MAX_SEQS, config.vocab_size, CPU), max_num_seqs=MAX_SEQS, max_rows=64)
    rows = make_rows(chunks, decode, num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS)
    logits, _ = lane.run(rows)
    token_ids = np.append(rows.token_ids, np.zeros_like(rows.decode_slots))
    assert_near(logits, reference_logits(reference, eager_functions(TorchOps()), token_ids, rows), error)
    for layer in range(config.num_layers):
        for half, wanted in zip(decoder.cache.layer(layer), reference.cache.layer(layer), strict=True):
            assert_near(half, wanted, cache_error)


# Each batch with the most rows of fresh prompts that share the launch of the others; None: without Hopper's modules,
# where all prompts share one however many their rows.
@pytest.mark.parametrize(
    ("chunks", "decode", "prefill_runs", "few_fresh_rows"),
    [
        ([(0, 20, True), (0, 1, True)], [], [("ragged", 2)], 0),
        ([(0, 3, True), (0, 6, True), (0, 5, False)], [17, 45], [("ragged", 3)], 6),
        ([(0, 3, True), (0, 6, True), (0, 5, False)], [17, 45], [("paged", 3)], None),
        ([(30, 5, True), (0, 6, True), (0, 1, False)], [17], [("paged", 1), ("ragged", 2)], 6),
        ([(0, 2, True), (30, 5, True), (0, 4, True)], [], [("paged", 2), ("ragged", 1)], 0),
        ([(0, 2, True), (30, 5, True), (0, 4, True)], [], [("paged", 3)], 4),
        ([(0, 2, True), (30, 5, True), (0, 4, True)], [], [("paged", 3)], None),
        ([(26, 2, True), (37, 3, False)], [14], [("paged", 2)], 0),
        ([(26, 36, True), (0, 2, False)], [14], [("paged", 1), ("ragged", 1)], 0),
        ([(26, 36, True), (0, 2, False)], [14], [("paged", 2)], 6),
        ([(26, 3, False), (0, 5, True), (0, 4, False), (0, 7, True)], [14, 0], [("paged", 1), ("ragged", 3)], 6),
        ([(26, 3, False), (0, 5, True), (0, 4, False), (0, 7, True)], [14, 0], [("paged", 4)], None),
        ([(0, 4, False)], [], [("ragged", 1)], 6),
        ([], [21, 0, 38], [], 0),
    ],
)
@torch.inference_mode()
def test_forward_equals_the_reference(
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    chunks: list[tuple[int, int, bool]],
    decode: list[int],
    prefill_runs: list[tuple[str, int]],
    few_fresh_rows: int | None,
) -> None:
    hopper = few_fresh_rows is not None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0) if hopper else (8, 0))
    monkeypatch.setattr(eager_lane, "FEW_FRESH_ROWS", few_fresh_rows or 0)
    check_forward(CONFIG, chunks, decode)
    # All layers but the last; there only the sampled rows attend, by the kernels of decode rows.
    assert runs == [("fa3" if hopper else "fa2", kind, count) for kind, count in prefill_runs]


@pytest.mark.parametrize(
    ("capability", "layer_windows"),
    [((9, 0), (12, 12)), ((9, 0), (25, None)), ((9, 0), (None, 20)), ((9, 0), (9, 28)), ((8, 0), (9, 28))],
    ids=str,
)
@pytest.mark.usefixtures("runs")
@torch.inference_mode()
def test_each_layer_attends_to_its_window(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], layer_windows: tuple[int | None, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    chunks = [(37, 8, True), (30, 5, False), (0, 20, True), (0, 1, False)]
    check_forward(replace(CONFIG, layer_windows=layer_windows), chunks, [45, 0, 26])


@pytest.mark.parametrize("runs", ["triton"], indirect=True)
@torch.inference_mode()
def test_rows_go_through_triton_s_kernels(runs: Runs) -> None:
    check_forward(CONFIG, [(26, 3, False), (0, 4, True)], [14])
    assert len(runs) == 2


@pytest.mark.usefixtures("runs")
@torch.inference_mode()
def test_rows_may_share_more_blocks_than_the_cache_has() -> None:
    decoder = new_decoder(CONFIG, num_blocks=200, block_tokens=BLOCK_TOKENS, max_len=199 * BLOCK_TOKENS)
    lane = EagerLane(decoder, SamplingState(MAX_SEQS, CONFIG.vocab_size, CPU), max_num_seqs=MAX_SEQS, max_rows=8)
    blocks = np.tile(np.arange(1, 200), MAX_SEQS)
    rows = make_rows([], [199 * BLOCK_TOKENS - 1] * MAX_SEQS, num_blocks=200, block_tokens=BLOCK_TOKENS, blocks=blocks)
    assert len(rows.kv_indices) == MAX_SEQS * 199
    lane.begin(rows)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("runs", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("fp8", "fp8_kv", "chunks", "decode", "prefill_runs"),
    [
        *(
            (fp8, fp8_kv, [(20, 2, True), (0, 3, True), (0, 1, False)], [17], [("paged", 1), ("ragged", 2)])
            for fp8, fp8_kv in ((None, True), (Fp8Weights(), False), (Fp8Weights(blocks=True), True))
        ),
        (Fp8Weights(), True, [(0, 4, False), (0, 2, True)], [], [("ragged", 2)]),
        (Fp8Weights(blocks=True), True, [], [21, 0, 38], []),
    ],
)
@torch.inference_mode()
def test_forward_in_fp8_equals_the_reference(
    runs: Runs,
    chunks: list[Chunk],
    decode: list[int],
    prefill_runs: list[tuple[str, int]],
    fp8: Fp8Weights | None,
    fp8_kv: bool,
) -> None:
    # Over a cache in FP8, queries are rounded, too.
    config = replace(CONFIG, fp8=fp8, fp8_kv=fp8_kv)
    check_forward(config, chunks, decode, error=0.06 if fp8_kv else 0.02, cache_error=0.02)
    assert runs == [("fa3", kind, count) for kind, count in prefill_runs]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("layer_windows", [None, (20, 11)], ids=str)
@pytest.mark.parametrize("scored_rows", [[0], [1, 2, 3, 8, 9, 12]])
@torch.inference_mode()
def test_scored_rows_equal_the_reference_beside_sampled_ones(
    monkeypatch: pytest.MonkeyPatch, scored_rows: list[int], layer_windows: tuple[int, ...] | None
) -> None:
    monkeypatch.setattr("bullet_graph.models.decoder.SCORED_ROWS", 4)  # in slices
    config = CONFIG if layer_windows is None else replace(CONFIG, layer_windows=layer_windows)
    decoder, reference = filled_decoder(config), filled_decoder(config)
    lane = EagerLane(decoder, SamplingState(MAX_SEQS, CONFIG.vocab_size, CPU), max_num_seqs=MAX_SEQS, max_rows=64)
    rows = make_rows([(30, 5, False), (0, 20, True)], [17], num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS)
    all_rows = replace(rows, sample_rows=np.arange(26, dtype=np.int32))
    ids = np.array([i * 31 % CONFIG.vocab_size for i in scored_rows], dtype=np.int32)
    rows = replace(rows, scored=Scored(np.array(scored_rows, dtype=np.int32), ids, 3))
    forward = lane.run_layers(lane.run_layers(lane.begin(rows), 0, 1), 1)
    scores = lane.score(forward)
    assert scores is not None
    logits, _ = lane.finish(forward)
    token_ids = np.append(rows.token_ids, np.zeros_like(rows.decode_slots))
    expected = reference_logits(reference, eager_functions(TorchOps()), token_ids, all_rows)
    torch.testing.assert_close(logits, expected[rows.sample_rows.tolist()], rtol=1e-4, atol=1e-4)
    for found, exact in zip(scores, token_logprobs(expected[scored_rows], torch.from_numpy(ids), 3), strict=True):
        torch.testing.assert_close(found[: len(ids)], exact, rtol=1e-4, atol=1e-4)
