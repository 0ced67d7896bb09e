"""Captured decode steps on the GPU: against a float32 reference, and against the same step uncaptured."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from decoders import new_decoder

from bullet_graph.graphs.decode_graph import DecodeGraphs, DecodeInputs, Int32Array
from bullet_graph.graphs.key import GraphKey, bucket_for
from bullet_graph.kernels.attention import ReferenceAttention
from bullet_graph.kernels.ops import TorchOps
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import eager_functions
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import checkpoint_views
from bullet_graph.partition.masks import WHOLE_GPU

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
NUM_LAYERS, NUM_BLOCKS, BLOCK_TOKENS, MAX_BATCH, MAX_LEN = 4, 6000, 16, 96, 4096


@dataclass(frozen=True)
class Setup:
    decoder: Decoder
    reference: Decoder
    graphs: DecodeGraphs
    state: SamplingState


def align_caches(decoder: Decoder, reference: Decoder) -> None:
    """Give the reference what is cached: steps that it did not take have written there."""
    for index in range(NUM_LAYERS):
        for cache, target in zip(decoder.cache.layer(index), reference.cache.layer(index), strict=True):
            target.copy_(cache)


WINDOWS = {"llama-3.2-1b": (50, None, 300, 50), "qwen3-8b": (128,) * NUM_LAYERS}


@pytest.fixture(
    scope="module",
    params=["llama-3.1-8b", "qwen3-8b", "llama-3.2-1b", *(f"{name} windowed" for name in WINDOWS)],
)
def setup(request: pytest.FixtureRequest) -> Setup:
    name, _, windowed = request.param.partition(" ")
    windows = WINDOWS[name] if windowed else ()
    config = replace(PRESETS[name], num_layers=NUM_LAYERS, layer_windows=windows)
    new = partial(new_decoder, config, num_blocks=NUM_BLOCKS, max_len=MAX_LEN, device="cuda")
    decoder, reference = new(dtype=torch.bfloat16, random_cache=True), new(dtype=torch.float32)
    views = (checkpoint_views(config, one.weights) for one in (reference, decoder))
    for (_, target), (_, source) in zip(*views, strict=True):
        target.copy_(source)
    align_caches(decoder, reference)
    generator = torch.Generator(DEVICE).manual_seed(7)
    state = SamplingState(MAX_BATCH + 1, config.vocab_size, DEVICE)
    state.last_token.random_(0, config.vocab_size, generator=generator)
    graphs = DecodeGraphs(decoder, state, max_batch_size=MAX_BATCH)
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for rows in reversed(graphs.batch_sizes):
            graphs.capture_one(GraphKey(rows), stream)
    torch.cuda.synchronize()
    return Setup(decoder, reference, graphs, state)


def on_device(array: Int32Array) -> torch.Tensor:
    return torch.from_numpy(array).long().to(DEVICE)


def make_inputs(rows: int, seed: int) -> DecodeInputs:
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, 900, size=rows).astype(np.int32)
    positions[0] = 0
    counts = positions // BLOCK_TOKENS + 1
    blocks = (1 + rng.permutation(NUM_BLOCKS - 1)[: counts.sum()]).astype(np.int32)
    indptr = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    kv_slots = blocks[indptr[1:] - 1] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    slots = rng.permutation(MAX_BATCH)[:rows].astype(np.int32)
    return DecodeInputs(slots, positions, positions + 1, kv_slots.astype(np.int32), indptr, blocks)


def reference_logits(setup: Setup, inputs: DecodeInputs) -> torch.Tensor:
    rows = len(inputs.slots)
    attention = ReferenceAttention(
        setup.reference.cache,
        q_indptr=list(range(rows + 1)),
        kv_lens=(inputs.positions + 1).tolist(),
        kv_indptr=inputs.kv_indptr.tolist(),
        kv_indices=on_device(inputs.kv_indices),
    )
    tokens = setup.state.last_token[on_device(inputs.slots)]
    functions = eager_functions(TorchOps())
    where = on_device(inputs.positions), on_device(inputs.kv_slots)
    hidden = setup.reference.run_layers(setup.reference.embed(tokens), *where, attention, functions)
    return setup.reference.logits(hidden, functions.ops)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33, 64, 96])
@torch.inference_mode()
def test_logits_are_close_to_float32_each_time(
    setup: Setup, rows: int, record_property: Callable[[str, object], None]
) -> None:
    inputs = make_inputs(rows, seed=rows)
    before = setup.state.last_token.clone()
    align_caches(setup.decoder, setup.reference)
    expected = reference_logits(setup, inputs)
    tokens = setup.graphs.run(inputs).clone()
    logits = setup.graphs.logits(rows).clone()
    error = float((logits.float() - expected).norm() / expected.norm())
    record_property("relative_error", error)
    assert error < 2e-2
    assert torch.equal(tokens.long(), logits.float().argmax(-1))
    # A launch that ran ahead of what it reads would not do so every time alike.
    for _ in range(20):
        setup.state.last_token.copy_(before)
        setup.graphs.logits(rows).fill_(float("nan"))
        setup.graphs.run(inputs)
        assert torch.equal(setup.graphs.logits(rows), logits)


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 64, 96])
@torch.inference_mode()
def test_captured_step_equals_uncaptured(setup: Setup, rows: int) -> None:
    inputs = make_inputs(rows, seed=100 + rows)
    before = setup.state.last_token.clone()
    captured = setup.graphs.run(inputs).clone()
    captured_logits = setup.graphs.logits(rows).clone()
    after = setup.state.last_token.clone()
    setup.state.last_token.copy_(before)
    setup.graphs.logits(rows).fill_(float("nan"))
    padded = setup.graphs._pad(inputs, bucket_for(rows, setup.graphs.batch_sizes))
    uncaptured = setup.graphs._run(setup.graphs._prepare(padded, WHOLE_GPU), WHOLE_GPU)[:rows]
    assert torch.equal(uncaptured, captured)
    assert torch.equal(setup.graphs.logits(rows), captured_logits)
    assert torch.equal(setup.state.last_token, after)
    assert torch.equal(after[on_device(inputs.slots)], captured), "steps feed their tokens to the next"
