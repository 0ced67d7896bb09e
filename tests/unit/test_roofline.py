"""The roofline: near to what an H200 was measured to do, and sound where nothing was."""

import math

import pytest
from fakes import perf_tables
from fakes.perf_tables import LLAMA_8B, Shape
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.hardware import GENERIC, gpu_spec
from bullet_graph.perf.performance import PerformanceModel, attention_pairs
from bullet_graph.perf.roofline import Roofline

SPEC = gpu_spec("NVIDIA H200", 132)
TINY = Shape(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
)


@pytest.fixture(scope="module")
def roofline() -> PerformanceModel:
    return Roofline(SPEC, LLAMA_8B)


@pytest.mark.parametrize("batch_size", [1, 8, 64, 256])
def test_decode_on_an_h200_within_15_percent(roofline: PerformanceModel, batch_size: int) -> None:
    predicted = roofline.decode(batch_size, batch_size * 1000)
    assert predicted.ms == pytest.approx(perf_tables.decode_ms(batch_size, 1000), rel=0.15)
    assert not predicted.measured


@pytest.mark.parametrize("decode_sms", [16, 32, 48, 64, 80, 96, 112])
def test_partitions_of_an_h200_within_30_percent(roofline: PerformanceModel, decode_sms: int) -> None:
    decode_ms, prefill_ms = perf_tables.split_ms(decode_sms, 64, 1000, 2048)
    both = roofline.split(decode_sms, 64, 64_000, 2048, attention_pairs(2048))
    assert both.decode_ms == pytest.approx(decode_ms, rel=0.3)
    assert both.prefill_ms == pytest.approx(prefill_ms, rel=0.3)
    assert not both.measured


def test_prefill_and_mixed_on_an_h200(roofline: PerformanceModel) -> None:
    pairs = attention_pairs(2048)
    assert roofline.prefill(2048, pairs).ms == pytest.approx(perf_tables.prefill_ms(2048), rel=0.1)
    # The rows of decode open another row of tiles, which by the waves costs more than it does.
    mixed = roofline.mixed(2048, pairs, 64, 64_000)
    assert mixed.ms == pytest.approx(perf_tables.mixed_ms(2048, 64, 1000), rel=0.2)


def test_sizes_of_the_decode_lane_leave_prefill_16_sms() -> None:
    assert tuple(Roofline(SPEC, LLAMA_8B).decode_sms) == (16, 32, 48, 64, 80, 96, 112)
    assert Roofline(GENERIC, TINY).decode_sms == (16, 32, 48)
    assert Roofline(gpu_spec("Small GPU", 20), TINY).decode_sms == ()


def test_an_unknown_gpu_has_generic_rates_for_its_sms() -> None:
    spec = gpu_spec("Some GPU", 40)
    assert spec.num_sms == 40
    assert spec.tflops == GENERIC.tflops


def test_chunks_follow_the_waves(roofline: PerformanceModel) -> None:
    assert roofline.wave_chunk_tokens(2000, 96) == 1536
    assert roofline.wave_chunk_tokens(2000, 96) == 1536
    assert roofline.wave_chunk_tokens(10, 96) == 10


def test_every_time_of_a_tiny_model_on_a_generic_gpu() -> None:
    model = Roofline(GENERIC, TINY, dtype_bytes=4)
    assert (model.num_sms, model.num_layers) == (64, 4)
    both = model.split(16, 1, 10, 8, attention_pairs(8))
    times = [model.decode(1, 10).ms, model.prefill(1, 1).ms, model.mixed(8, 36, 1, 10).ms]
    assert all(0 < ms < 10 for ms in (*times, both.decode_ms, both.prefill_ms))


@given(
    st.integers(1, 512),
    st.integers(1, 100_000),
    st.integers(1, 16384),
    st.integers(0, 32768),
    st.integers(2, 130),
)
def test_more_work_never_takes_less_time(
    batch_size: int, kv: int, tokens: int, cached: int, sms: int
) -> None:
    model = Roofline(SPEC, LLAMA_8B)
    pairs, more_pairs = attention_pairs(tokens, cached), attention_pairs(tokens + 1, cached)
    assert model.decode(batch_size, kv, sms).ms <= model.decode(batch_size, kv + 1, sms).ms
    assert model.decode(batch_size, kv, sms).ms <= model.decode(batch_size + 1, kv, sms).ms
    # Within a wave the products cost the same however many rows they have: equal but for rounding.
    almost = 1 + 1e-9
    assert model.prefill(tokens, pairs, sms).ms <= model.prefill(tokens + 1, more_pairs, sms).ms * almost
    assert math.isfinite(model.prefill(tokens, pairs, sms).ms)
    assert model.prefill(tokens, pairs).ms <= model.mixed(tokens, pairs, batch_size, kv).ms * almost
    assert model.decode(batch_size, kv).ms < model.decode(batch_size, kv, sms).ms
