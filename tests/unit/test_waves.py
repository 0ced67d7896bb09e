"""Wave quantization: arithmetic that can be done by hand, and what must hold for any shape."""

import pytest
from fakes.perf_tables import LLAMA_8B, Shape
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.perf.waves import layer_matrices, num_waves, wave_chunk_tokens, wave_efficiency

SMALL = Shape(hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8, num_layers=28)


def test_layer_matrices_of_llama_8b() -> None:
    assert layer_matrices(LLAMA_8B) == ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


@pytest.mark.parametrize(
    ("rows", "columns", "sms", "waves"),
    [(1536, 6144, 96, 3), (1537, 6144, 96, 4), (1, 256, 132, 1), (128, 257, 1, 2), (2048, 6144, 132, 3)],
)
def test_num_waves_by_hand(rows: int, columns: int, sms: int, waves: int) -> None:
    assert num_waves(rows, columns, sms) == waves


def test_two_blocks_on_an_sm_halve_the_waves() -> None:
    assert num_waves(1536, 28672, 96, blocks_per_sm=2) == 7


@pytest.mark.parametrize("sms", [16, 80, 96, 104, 128])
def test_16_rows_an_sm_fill_every_wave_of_llama_8b(sms: int) -> None:
    assert wave_efficiency(16 * sms, sms, LLAMA_8B) == 1
    assert wave_chunk_tokens(16 * sms + 60, sms, LLAMA_8B) == 16 * sms
    # One row more opens another row of tiles, and so a wave that is nearly empty.
    assert wave_efficiency(16 * sms + 1, sms, LLAMA_8B) < 1


def test_fewer_rows_than_a_step_are_a_chunk_as_they_are() -> None:
    assert wave_chunk_tokens(63, 96, LLAMA_8B) == 63
    assert wave_chunk_tokens(64, 96, LLAMA_8B) == 64


def test_of_equally_good_chunks_the_largest_is_taken() -> None:
    assert wave_chunk_tokens(3 * 1536, 96, LLAMA_8B) == 3 * 1536


@given(st.integers(64, 4096), st.integers(1, 132), st.sampled_from([LLAMA_8B, SMALL]))
def test_no_other_chunk_has_a_higher_rate(max_tokens: int, sms: int, shape: Shape) -> None:
    best = wave_chunk_tokens(max_tokens, sms, shape)
    assert best <= max_tokens
    assert best % 64 == 0
    assert 0 < wave_efficiency(best, sms, shape) <= 1
    assert all(
        wave_efficiency(tokens, sms, shape) <= wave_efficiency(best, sms, shape)
        for tokens in range(64, max_tokens + 1, 64)
    )
