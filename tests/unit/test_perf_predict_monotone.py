"""The table's model never falls when work grows, whatever was measured, and is always finite."""

import math
import random
from dataclasses import replace

from fakes.perf_tables import LLAMA_8B, h200_table
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet_graph.perf.performance import attention_pairs
from bullet_graph.perf.predict import TableModel
from bullet_graph.perf.table import Points

H200 = h200_table()


def noisy_sparse_model(seed: int) -> TableModel:
    """A table with large errors of measurement and most points missing."""
    rng = random.Random(seed)
    share = (0.03, 0.1, 0.3, 0.7)[seed % 4]
    points = h200_table(noise=0.3, seed=seed).points
    kept = {
        kind: tuple(point for point in getattr(points, kind) if rng.random() < share)
        for kind in ("decode", "prefill", "mixed", "split")
    }
    return TableModel(replace(H200, points=Points(**kept)), LLAMA_8B)


MODELS = st.sampled_from([TableModel(H200, LLAMA_8B), *(noisy_sparse_model(seed) for seed in range(8))])
SMS = st.sampled_from([None, 4, 16, 20, 32, 40, 84, 100, 120])


@settings(deadline=None)
@given(MODELS, st.integers(1, 1024), st.integers(1, 2_000_000), st.integers(0, 2_000_000), SMS)
def test_decode_never_falls(model: TableModel, batch_size: int, kv: int, more: int, sms: int | None) -> None:
    ms = model.decode(batch_size, kv, sms).ms
    assert 0 < ms < math.inf
    assert ms <= model.decode(batch_size, kv + more, sms).ms * (1 + 1e-9)
    # One row more, at the same context.
    context = kv // batch_size
    assert model.decode(batch_size, batch_size * context, sms).ms <= model.decode(
        batch_size + 1, (batch_size + 1) * context, sms
    ).ms * (1 + 1e-9)


@settings(deadline=None)
@given(MODELS, st.integers(1, 16384), st.integers(0, 4096), st.integers(0, 100_000), SMS)
def test_prefill_never_falls(model: TableModel, tokens: int, more: int, cached: int, sms: int | None) -> None:
    ms = model.prefill(tokens, attention_pairs(tokens, cached), sms).ms
    assert 0 < ms < math.inf
    longer = model.prefill(tokens + more, attention_pairs(tokens + more, cached), sms).ms
    deeper = model.prefill(tokens, attention_pairs(tokens, cached + more), sms).ms
    assert ms <= longer * (1 + 1e-9)
    assert ms <= deeper * (1 + 1e-9)


@settings(deadline=None)
@given(MODELS, st.integers(1, 8192), st.integers(0, 50_000), st.integers(1, 512), st.integers(1, 8000))
def test_mixed_never_falls(
    model: TableModel, tokens: int, cached: int, batch_size: int, context: int
) -> None:
    kv = batch_size * context
    pairs = attention_pairs(tokens, cached)
    ms = model.mixed(tokens, pairs, batch_size, kv).ms
    assert 0 < ms < math.inf
    for more in (
        model.mixed(tokens + 64, attention_pairs(tokens + 64, cached), batch_size, kv),
        model.mixed(tokens, 2 * pairs, batch_size, kv),
        model.mixed(tokens, pairs, batch_size, 2 * kv),
    ):
        assert ms <= more.ms * (1 + 1e-9)


@settings(deadline=None)
@given(
    MODELS,
    st.sampled_from([16, 32, 64, 70, 112]),
    st.integers(1, 512),
    st.integers(1, 8000),
    st.integers(1, 8192),
    st.integers(0, 8192),
)
def test_split_never_falls(
    model: TableModel, sms: int, batch_size: int, context: int, tokens: int, more: int
) -> None:
    kv = batch_size * context
    both = model.split(sms, batch_size, kv, tokens, attention_pairs(tokens))
    assert 0 < both.decode_ms < math.inf
    assert 0 < both.prefill_ms < math.inf
    if sms not in model.decode_sms and model.decode_sms:
        return  # Products of three predictions: each is monotone, their product need not be.
    longer = model.split(sms, batch_size, kv + more, tokens, attention_pairs(tokens))
    assert both.decode_ms <= longer.decode_ms * (1 + 1e-9)
    larger = model.split(sms, batch_size, kv, tokens + more, attention_pairs(tokens + more))
    assert both.prefill_ms <= larger.prefill_ms * (1 + 1e-9)
