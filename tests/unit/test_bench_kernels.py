"""The kernel benchmarks as far as they go without a GPU: their options, their inputs and their arithmetic."""

import os
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bench.kernels import (
    bare_work,
    decode_attention,
    decode_step,
    prefill_attention,
    prefill_gemm,
)
from bench.kernels.cublaslt import library_path
from bench.kernels.decode_inputs import Cache, lengths, scattered_blocks
from bench.kernels.prefill_layers import LAYERS, SHAPES, flops_of
from bench.kernels.sustained import figures, print_table, relative_error
from bullet_graph.errors import ConfigError
from bullet_graph.models.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "bare_work": bare_work.main,
    "prefill_gemm": prefill_gemm.main,
    "prefill_attention": prefill_attention.main,
    "decode_attention": decode_attention.main,
    "decode_step": decode_step.main,
}


def run(command: click.Command, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_gpu_one_line_says_so(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(COMMANDS[name], "--output-json", tmp_path / "r.json")
    assert result.exit_code == 2
    assert "needs a GPU" in result.output
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_run_as_a_script(name: str, tmp_path: Path) -> None:
    command = [sys.executable, f"bench/kernels/{name}.py", "--output-json", str(tmp_path / "r.json")]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=120)
    assert process.returncode == 2, process.stderr
    assert "needs a GPU" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("rows", ["512,x", "0", "-16", "520", ""])
@pytest.mark.parametrize("option", ["--rows", "--product-rows"])
def test_rows_that_fill_no_blocks(option: str, rows: str) -> None:
    result = run(prefill_gemm.main, option, rows, "--output-json", "r.json")
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


@pytest.mark.parametrize(
    "arguments", [("--part", "elementwise"), ("--seconds", "0.1"), ("--algos", "0"), ("--budget-s", "soon")]
)
def test_bad_options_of_prefill(arguments: tuple[str, str]) -> None:
    result = run(prefill_gemm.main, *arguments, "--output-json", "r.json")
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rows", "2040"),
        ("--decode-rows", "x"),
        ("--way", "alone"),
        ("--seconds", "0.1"),
        ("--budget-s", "soon"),
    ],
)
def test_bad_options_of_bare_work(arguments: tuple[str, str]) -> None:
    result = run(bare_work.main, *arguments, "--output-json", "r.json")
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in result.output


@pytest.mark.parametrize("arguments", [("--layers", "0"), ("--seconds", "0")])
def test_bad_options_of_prefill_attention(arguments: tuple[str, str]) -> None:
    result = run(prefill_attention.main, *arguments, "--output-json", "r.json")
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in result.output


def test_bad_model_of_decode() -> None:
    result = run(decode_attention.main, "--model", "nonesuch", "--output-json", "r.json")
    assert result.exit_code == 2
    assert "Invalid value for '--model'" in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_the_result_needs_a_name(name: str) -> None:
    result = run(COMMANDS[name])
    assert result.exit_code == 2
    assert "--output-json" in result.output


def test_a_result_that_cannot_be_written_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = run(prefill_gemm.main, "--output-json", tmp_path / "none" / "r.json")
    assert result.exit_code == 2
    assert "does not exist" in result.output


def test_rows_are_read() -> None:
    context, option = click.Context(prefill_gemm.main), prefill_gemm.main.params[0]
    assert prefill_gemm.parse_rows(context, option, "512,1024") == (512, 1024)


def test_figures_by_hand() -> None:
    # 8 layers of 1,000 rows in 4 ms at 700 W: 500 µs a layer, 500 ns and 0.35 mJ a token of each.
    assert figures(4.0, 700.2, 1450.4, rows=1000, layers=8, flops=2.4e12) == {
        "us_per_layer": 500.0,
        "ns_per_token_layer": 500.0,
        "tflops": 600.0,
        "watts": 700,
        "mhz": 1450,
        "mj_per_token_layer": 0.3501,
    }


def test_flops_of_a_layer_of_llama_8b() -> None:
    weights = 4096 * (6144 + 4096 + 2 * 14336 + 14336)
    assert flops_of(*SHAPES, rows=10) == 2 * weights * 10 * LAYERS
    assert flops_of("o", rows=1) == 2 * 4096 * 4096 * LAYERS


def test_table_tells_figures_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"part": "layer", "name": "engine", "rows": 512}
    print_table([row | figures(1.0, 700, 1400, rows=512, layers=8, flops=1e12), row | {"failed": "why"}])
    _, measured, failed = capsys.readouterr().out.splitlines()
    assert measured.startswith("layer")
    assert measured.endswith("engine")
    assert "1000.0" in measured
    assert failed == "layer engine rows=512 failed=why"


def test_flops_of_causal_attention() -> None:
    # Two prompts of 3 tokens: 1 + 2 + 3 pairs each, in 32 heads of 128, two multiply-adds an element.
    assert prefill_attention.attention_flops(PRESETS["llama-3.1-8b"], 2, 3) == 2 * 6 * 32 * 128 * 4


def test_prompts_of_prefill_attention_are_fresh_and_share_no_block() -> None:
    rows = prefill_attention.prompts_of(3, 40, 1 + 9)
    assert rows.num_prefill == 3
    assert rows.num_continued == 0
    assert rows.kv_lens.tolist() == [40, 40, 40]
    assert sorted(rows.kv_indices.tolist()) == list(range(1, 10))
    continued = prefill_attention.prompts_of(1, 40, 1 + 9, cached=100)
    assert continued.num_continued == 1
    assert continued.kv_lens.tolist() == [140]
    assert continued.positions.tolist() == list(range(100, 140))


def test_both_ways_stand_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    config, case = PRESETS["llama-3.1-8b"], (1, 1023)
    times = {"paged": 3.2, "ragged": 1.6}  # of 32 layers: 100 and 50 µs each
    rows = [prefill_attention.figures(config, part, case, times, 1e-3) for part in ("attention", "forward")]
    assert (rows[0]["paged_us_per_layer"], rows[0]["ragged_us_per_layer"]) == (100.0, 50.0)
    assert rows[0]["ragged_tflops"] == pytest.approx(4 * 4096 * 1023 * 512 / 50e-6 / 1e12, abs=0.06)
    assert rows[1]["speedup"] == 2.0
    assert "ragged_tflops" not in rows[1]
    cached = prefill_attention.figures(config, "cached", (1, 2), {"fa3": 6.4, "fa2": 3.2}, 1e-3, 5)
    # Two rows see 6 and 7 tokens, in 200 and 100 µs.
    assert cached["fa2_tflops"] == pytest.approx(4 * 4096 * 13 / 100e-6 / 1e12, abs=0.06)
    prefill_attention.print_table([*rows, cached])
    _, attention, forward, last = capsys.readouterr().out.splitlines()
    assert attention.split()[:9] == ["attention", "1", "x", "1023", "0", "paged", "100.0,", "ragged", "50.0"]
    assert last.split()[:9] == ["cached", "1", "x", "2", "5", "fa3", "200.0,", "fa2", "100.0"]
    assert forward.split()[-1] == "2.000"


def test_relative_error() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(reference.bfloat16(), reference) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert not relative_error(torch.tensor([torch.nan, 4.0]), reference) <= 1


def test_the_fastest_of_each_tile_and_cluster() -> None:
    def entry(ms: float, tile: int, cluster: int) -> tuple[float, dict[str, int], str]:
        return ms, {"tile": tile, "cluster": cluster}, f"{ms}"

    screened = [entry(3.0, 1, 2), entry(1.0, 1, 3), entry(2.0, 1, 2), entry(2.0, 4, 2), entry(1.5, 1, 3)]
    assert [algo for _, _, algo in prefill_gemm.fastest_of_each_tile(screened)] == ["1.0", "2.0", "2.0"]
    assert prefill_gemm.fastest_of_each_tile([]) == []


def test_library_that_is_loaded() -> None:
    line = "7f00-7f01 r-xp 00000000 08:01 42                 /lib/libcublasLt.so.13"
    assert library_path(f"7e00-7e01 r-xp 0 0 0 /lib/libc.so.6\n{line}\n") == "/lib/libcublasLt.so.13"
    with pytest.raises(RuntimeError, match="cublasLt is not loaded"):
        library_path("7e00-7e01 r-xp 0 0 0 /lib/libc.so.6\n")


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=20).map(lambda kv: np.array(kv, dtype=np.int32)),
    st.sampled_from([1, 16, 64]),
    st.integers(0, 5),
)
def test_blocks_are_enough_and_nobody_elses(kv_lens: np.ndarray, block_tokens: int, spare: int) -> None:
    needed = sum(-(-int(n) // block_tokens) for n in kv_lens)
    indptr, indices = scattered_blocks(kv_lens, needed + spare, block_tokens)
    assert indptr.dtype == indices.dtype == np.int32
    assert indptr[0] == 0
    assert indptr[-1] == len(indices) == needed
    held = np.diff(indptr) * block_tokens
    assert (held >= kv_lens).all()
    assert (held - kv_lens < block_tokens).all()
    assert len(set(indices.tolist())) == needed
    assert indices.max() < needed + spare
    with pytest.raises(ConfigError, match=f"needs {needed} blocks, the cache holds {needed - 1}"):
        scattered_blocks(kv_lens, needed - 1, block_tokens)


def test_lengths() -> None:
    assert lengths(3, 1000, False).tolist() == [1000] * 3
    drawn = lengths(256, 1000, True)
    assert drawn.min() >= 1
    assert drawn.max() <= 16384
    assert 900 < drawn.mean() < 1010
    assert len(set(drawn.tolist())) > 100


def test_turned_cache_is_the_same_memory() -> None:
    k, v = torch.zeros(5, 2, 16, 8), torch.zeros(5, 2, 16, 8)
    turned = Cache(16, [(k, v)]).turned().layer(0)
    turned[0][4, 15, 1, 7] = 1.0
    assert turned[0].shape == (5, 16, 2, 8)
    assert k[4, 1, 15, 7] == 1.0


@pytest.mark.parametrize("model", ["llama-3.1-8b", "tiny"])
def test_candidates_are_distinct_layouts_for_the_model(model: str) -> None:
    chosen = decode_attention.candidates(PRESETS[model])
    assert len(set(chosen)) == len(chosen) >= 8
    assert all(PRESETS[model].num_kv_heads % settings.kv_heads == 0 for settings in chosen)
