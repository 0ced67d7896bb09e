"""Byte counts and copy bandwidth against numbers worked by hand."""

from dataclasses import dataclass, replace

import pytest

from bullet_graph.perf.bandwidth import measure_copy_gb_per_s
from bullet_graph.perf.traffic import decode_step_bytes, decode_weight_bytes, kv_cache_bytes_per_token


@dataclass(frozen=True)
class Shape:
    """A decoder small enough to count by hand."""

    vocab_size: int = 100
    hidden_size: int = 8
    intermediate_size: int = 20
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 5
    qkv_bias: bool = False
    qk_norm: bool = False


def test_weight_bytes_by_hand() -> None:
    # A layer: qkv 8×40, o 20×8, gate, up and down 3×8×20, two norms of 8.
    layer = 320 + 160 + 480 + 16
    # The final norm, the output head and the two sequences' embedding rows.
    rest = 8 + 800 + 2 * 8
    assert decode_weight_bytes(Shape(), batch_size=2, dtype_bytes=2) == 2 * (3 * layer + rest)


def test_biases_and_head_norms_are_counted() -> None:
    plain = decode_weight_bytes(Shape(), batch_size=1, dtype_bytes=2)
    biased = decode_weight_bytes(replace(Shape(), qkv_bias=True), batch_size=1, dtype_bytes=2)
    normed = decode_weight_bytes(replace(Shape(), qk_norm=True), batch_size=1, dtype_bytes=2)
    assert biased - plain == 3 * 40 * 2
    assert normed - plain == 3 * 10 * 2


def test_step_bytes_by_hand() -> None:
    # Keys and values, 3 layers, 2 heads of 5, 4 bytes each.
    assert kv_cache_bytes_per_token(Shape(), dtype_bytes=4) == 240
    weights = decode_weight_bytes(Shape(), batch_size=7, dtype_bytes=4)
    # 50 tokens read and one written for each of the 7 sequences.
    step = decode_step_bytes(Shape(), batch_size=7, context_tokens=50, dtype_bytes=4)
    assert step == weights + 7 * 51 * 240


def test_llama_3_1_8b_matches_its_known_size() -> None:
    llama = Shape(128256, 4096, 14336, 32, 32, 8, 128)
    # 8.03e9 parameters, less the embedding table (128256×4096) but for one row.
    parameters = decode_weight_bytes(llama, batch_size=1, dtype_bytes=1)
    assert parameters == 8_030_261_248 - 128256 * 4096 + 4096
    assert kv_cache_bytes_per_token(llama, dtype_bytes=2) == 131_072


def test_copy_bandwidth_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bullet_graph.perf.bandwidth._time_on_cpu_s", lambda *_: 1e-3)
    assert measure_copy_gb_per_s("cpu", num_bytes=1_000_000) == pytest.approx(2.0)


def test_copy_bandwidth_of_this_machine_is_plausible() -> None:
    assert 0.1 < measure_copy_gb_per_s("cpu", num_bytes=16 << 20) < 10_000
