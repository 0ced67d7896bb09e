"""Captured decode steps on the GPU: against a float32 reference, and against the same step uncaptured."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from decoders import VARIANTS, new_decoder
from sampling_rows import settings_row

from bullet_graph.graphs.decode_graph import DecodeGraphs, DecodeInputs, Int32Array
from bullet_graph.graphs.key import GraphKey, bucket_for
from bullet_graph.kernels.attention import ReferenceAttention
from bullet_graph.kernels.ops import TorchOps
from bullet_graph.kernels.sampler import USES_BITMASK, SamplingState
from bullet_graph.kernels.sampler import sample as torch_sample
from bullet_graph.kernels.triton_kernels import sample_kernel
from bullet_graph.kernels.triton_ops import sample as triton_sample
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import eager_functions
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import checkpoint_views
from bullet_graph.partition.masks import WHOLE_GPU
from bullet_graph.runtime.rows import adjustments_row
from bullet_graph.runtime.step import Adjustments
from bullet_graph.sampling_params import SamplingParams

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
    params=[
        *("llama-3.1-8b", "qwen3-8b", "llama-3.2-1b", *(f"{name} windowed" for name in WINDOWS), *VARIANTS),
        *("llama-3.1-8b-fp8", "llama-3.1-8b-fp8 with an FP8 cache"),
    ],
)
def setup(request: pytest.FixtureRequest) -> Setup:
    name = request.param.removesuffix(" windowed").removesuffix(" with an FP8 cache")
    windows = WINDOWS[name] if "windowed" in request.param else ()
    config = replace((PRESETS | VARIANTS)[name], num_layers=NUM_LAYERS, layer_windows=windows)
    config = replace(config, fp8_kv="cache" in request.param)
    new = partial(new_decoder, config, num_blocks=NUM_BLOCKS, max_len=MAX_LEN, device="cuda")
    decoder, reference = new(dtype=torch.bfloat16, random_cache=True), new(dtype=torch.float32)
    views = (checkpoint_views(config, one.weights) for one in (reference, decoder))
    for (_, target), (_, source) in zip(*views, strict=True):
        target.copy_(source)
    align_caches(decoder, reference)
    generator = torch.Generator(DEVICE).manual_seed(7)
    state = SamplingState(MAX_BATCH + 1, config.vocab_size, DEVICE)
    state.last_token.random_(0, config.vocab_size, generator=generator)
    graphs = DecodeGraphs(decoder, state, max_batch_size=MAX_BATCH, shares_prefixes=True)
    # A capture runs the step once: before its tokens are drawn, they may be in no vocabulary.
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for rows in reversed(graphs.batch_sizes):
            graphs.capture_one(GraphKey(rows), stream)
    torch.cuda.synchronize()
    return Setup(decoder, reference, graphs, state)


def on_device(array: Int32Array) -> torch.Tensor:
    return torch.from_numpy(array).long().to(DEVICE)


def make_inputs(rows: int, seed: int, common: int = 0) -> DecodeInputs:
    """Rows of any length; but for the first, each half of them has so many blocks in common."""
    rng = np.random.default_rng(seed)
    positions = rng.integers(common * BLOCK_TOKENS, 900, size=rows).astype(np.int32)
    positions[0] = 0
    counts = positions // BLOCK_TOKENS + 1
    blocks = (1 + rng.permutation(NUM_BLOCKS - 1)[: counts.sum()]).astype(np.int32)
    indptr = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    for half in np.array_split(indptr[1:-1], 2):
        for start in half:
            blocks[start : start + common] = blocks[half[0] : half[0] + common]
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
    hidden = setup.reference.run_layers(setup.reference.embed(tokens, functions.ops), *where, attention, functions)
    return setup.reference.logits(hidden, functions.ops)


@pytest.mark.parametrize(("rows", "common"), [(1, 0), (2, 0), (3, 0), (8, 0), (33, 0), (64, 0), (96, 0), (96, 45)])
@torch.inference_mode()
def test_logits_are_close_to_float32_each_time(
    setup: Setup,
    rows: int,
    common: int,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_LAUNCH_BYTES", "_LEAST_COMMON_BYTES"):
        monkeypatch.setattr(f"bullet_graph.kernels.shared_blocks.{name}", 1)
    inputs, attention = make_inputs(rows, seed=rows, common=common), setup.graphs._attention
    shared = attention.shared_blocks(inputs.kv_indptr, inputs.kv_indices)
    assert (shared is not None) == (common > 0 and attention.can_share)
    before = setup.state.last_token.clone()
    align_caches(setup.decoder, setup.reference)
    expected = reference_logits(setup, inputs)
    tokens = setup.graphs.run(inputs).clone()
    logits = setup.graphs.logits(rows).clone()
    # Rounding sends some tokens to another expert than in float32: then all of their row differs. FP8 rounds numbers
    # that are a little apart to neighbours, which differ by 6 to 12 %.
    routes, in_fp8 = setup.decoder.config.num_experts > 0, setup.decoder.config.fp8 is not None
    differences, norms = (x.norm(dim=-1) for x in (logits.float() - expected, expected))
    error = float((differences / norms).median() if routes else differences.norm() / norms.norm())
    record_property("relative_error", error)
    assert error < ((0.35 if routes else 0.2) if in_fp8 else 3e-2 if routes else 2e-2)
    assert torch.equal(tokens.long(), logits.float().argmax(-1))
    # A launch that ran ahead of what it reads would not do so every time alike.
    for _ in range(20):
        setup.state.last_token.copy_(before)
        setup.graphs.logits(rows).fill_(float("nan"))
        setup.graphs.run(inputs)
        assert torch.equal(setup.graphs.logits(rows), logits)


@pytest.mark.parametrize("rows", [1, 8, 64])
@torch.inference_mode()
def test_bitmasks_hold_their_rows_and_leave_the_others(setup: Setup, rows: int) -> None:
    inputs, state = make_inputs(rows, seed=200 + rows), setup.state
    before, settings = state.last_token.clone(), state.settings.clone()
    free = setup.graphs.run(inputs).clone()
    masked = inputs.slots[::2].copy()
    vocab_size = setup.decoder.config.vocab_size
    words = np.zeros((len(masked), -(-vocab_size // 32)), dtype=np.int32)
    allowed = np.random.default_rng(rows).integers(0, vocab_size, size=(len(masked), 50))
    for row, ids in zip(words.view(np.uint32), allowed, strict=True):
        np.bitwise_or.at(row, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    state.last_token.copy_(before)
    state.settings[on_device(masked), 7] = USES_BITMASK
    state.write_bitmasks(masked, words)
    tokens = setup.graphs.run(inputs).clone()
    logits = setup.graphs.logits(rows).float()
    state.settings.copy_(settings)
    state.adjustments.zero_()
    assert torch.equal(tokens[1::2], free[1::2])
    for row, ids in enumerate(allowed):
        among = torch.from_numpy(np.unique(ids)).to(DEVICE)
        assert tokens[2 * row] == among[logits[2 * row, among].argmax()]


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
    assert torch.equal(setup.graphs._run(setup.graphs._prepare(padded, WHOLE_GPU), WHOLE_GPU)[:rows], captured)
    assert torch.equal(setup.graphs.logits(rows), captured_logits)
    assert torch.equal(setup.state.last_token, after)
    assert torch.equal(after[on_device(inputs.slots)], captured), "steps feed their tokens to the next"


def adjustments(vocab_size: int, seed: int) -> Adjustments:
    """Of numbers that float32 adds and divides exactly; every few tokens are in the prompt, biased, or banned."""
    rng = np.random.default_rng(seed)
    biased, last = rng.choice(vocab_size, 300, replace=False).tolist(), rng.integers(0, vocab_size - 1, 200)
    return Adjustments(
        SamplingParams(
            logit_bias=dict.fromkeys(biased, 8.0), repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
        ),
        bad_words=tuple((int(token_id),) for token_id in last) + tuple((int(i), int(i)) for i in last + 1),
        prompt_token_ids=rng.integers(0, vocab_size, 5000).astype(np.int32),
        output_token_ids=rng.integers(0, vocab_size, 50).astype(np.int32),
    )


@torch.inference_mode()
def test_captured_steps_adjust_logits_and_count_without_the_host(setup: Setup) -> None:
    rows, vocab_size = 8, setup.decoder.config.vocab_size
    inputs, state = make_inputs(rows, seed=5), setup.state
    expected_state = SamplingState(MAX_BATCH + 1, vocab_size, DEVICE)
    before = state.settings.clone()
    for slot in inputs.slots[::2].tolist():
        by = adjustments(vocab_size, seed=slot)
        for one in (state, expected_state):
            one.settings[slot] = settings_row(adjustments=by, uses_bitmask=True).to(DEVICE)
            one.write_adjustments(slot, adjustments_row(by, vocab_size))
            one.bitmasks[slot] = 0x7FFFFFFF  # all but each 32nd token
    slots, positions = (on_device(array).int() for array in (inputs.slots, inputs.positions + 1))
    num_changed = 0
    for _ in range(5):
        tokens = setup.graphs.run(inputs).clone()
        logits = setup.graphs.logits(rows).clone()
        assert torch.equal(tokens, torch_sample(logits, slots, positions, expected_state))
        num_changed += int((tokens[::2] != logits[::2].argmax(-1)).sum())
    assert torch.equal(state.adjustments[slots], expected_state.adjustments[slots])
    assert num_changed, "nothing was adjusted"
    state.settings.copy_(before)


@torch.inference_mode()
def test_rows_without_adjustments_do_not_wait_for_them(record_property: Callable[[str, object], None]) -> None:
    """At 64 rows of llama-3.1-8b, whose step takes at least the time to read 16 GB at 4.8 TB/s: 3.3 ms."""
    rows, vocab_size = 64, PRESETS["llama-3.1-8b"].vocab_size
    state = SamplingState(rows, vocab_size, DEVICE)
    logits = torch.randn(rows, vocab_size, device=DEVICE, dtype=torch.bfloat16)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(slots)

    def plain() -> None:
        sample_kernel[(rows,)](
            *(logits, slots, slots, state.settings, state.adjustments, state.last_token, out, vocab_size),
            *(logits.stride(0), state.adjustments.stride(0)),
            BLOCK=4096,
            ADJUSTED=False,
            num_warps=8,
        )

    def microseconds(launch: Callable[[], object]) -> float:
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                launch()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(30):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / 20)
        return sorted(times)[len(times) // 2]

    def both() -> torch.Tensor:
        return triton_sample(logits, slots, slots, state)

    for name, changes in {"greedy": {}, "top_p": {"temperature": 1.0, "top_p": 0.9}}.items():
        for slot in range(rows):
            state.settings[slot] = settings_row(seed=slot, **changes).to(DEVICE)
        alone, together = microseconds(plain), microseconds(both)
        by = adjustments(vocab_size, seed=1)
        for slot in range(rows):
            state.settings[slot] = settings_row(seed=slot, adjustments=by, **changes).to(DEVICE)
            state.write_adjustments(slot, adjustments_row(by, vocab_size))
        record_property(f"{name}_us", {"plain": alone, "both": together, "adjusted": microseconds(both)})
        assert together - alone < 0.005 * 3300
