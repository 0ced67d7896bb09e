"""The benchmark of decode steps as far as it goes without a GPU: variants, groups of kernels, and its report."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bench.kernels import decode_step, random_decoder, step_lab
from bench.kernels.step_breakdown import (
    GROUPS,
    Kernel,
    Work,
    breakdown_rows,
    group_of,
    split_steps,
    time_by_group,
    work_by_group,
)
from bench.kernels.step_lab import VARIANTS, Agreement, distinct, inputs_for
from bullet_graph.errors import DeviceError
from bullet_graph.graphs.halves import DEFAULT_HALVES, Halves, halves_for
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.energy import DeviceMonitor
from bullet_graph.perf.traffic import decode_step_bytes

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
LLAMA = PRESETS["llama-3.1-8b"]
STEP = [
    Kernel("void at::native::vectorized_gather_kernel<16, long>", 0, 2),
    Kernel("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", 3, 5),
    Kernel("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 6, 16),
    Kernel("rope_and_cache_kernel", 17, 18),
    Kernel("decode_attention_kernel", 19, 29),
    Kernel("combine_partials_kernel", 20, 31),  # begins while its predecessor runs
    Kernel("void cublasLt::splitKreduce_kernel<32, 16>", 31, 32),
    Kernel("triton_poi_fused_mul_silu_1", 33, 34),
    Kernel("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", 34, 36),
    Kernel("add_rms_norm_kernel", 37, 39),
    Kernel("gemv_kernel", 40, 45),
    Kernel("sample_kernel", 46, 48),
]


def test_kernels_by_name() -> None:
    groups = "other norms products rope attention attention products swiglu products norms products sampling"
    assert [group_of(kernel.name) for kernel in STEP] == groups.split()


def test_times_add_up_to_the_span() -> None:
    times = time_by_group(STEP)
    assert times == {
        "other": 2,
        "norms": 4,
        "products": 13,
        "rope": 1,
        "attention": 12,
        "swiglu": 1,
        "head": 5,
        "sampling": 2,
        "gaps": 8,
    }
    assert sum(times.values()) == 48
    assert set(times) == {*GROUPS, "gaps"}


def test_steps_end_with_sampling() -> None:
    later = [Kernel(kernel.name, kernel.start + 100, kernel.end + 100) for kernel in STEP]
    unfinished = [Kernel("gemv_kernel", 300, 301)]
    assert split_steps([*unfinished, *later, *STEP]) == [STEP, later]
    assert split_steps(unfinished) == []


def test_what_a_step_must_move() -> None:
    rows, context = 64, 1000
    work = work_by_group(LLAMA, rows, context)
    assert set(work) == set(GROUPS)
    # By hand: K and V of 8 heads of 128 in 32 layers; q in and out.
    assert work["attention"].num_bytes == rows * (context * 131_072 + 32 * 2 * 2 * 4096)
    assert work["head"].num_bytes == 2 * (4096 * 128_256 + rows * (4096 + 128_256))
    assert work["head"].flops == 2 * rows * 4096 * 128_256
    assert work["products"].flops == 2 * rows * 32 * 4096 * (6144 + 4096 + 3 * 14336)
    # Without the activations that go from kernel to kernel, it is what the package counts.
    activations = (
        32 * (2 * 4096 + 6144 + 4096 + 3 * 14336 + 4096) + 32 * 2 * 4096 + 65 * 4 * 4096 + 32 * 2 * 6144
    )
    activations += 32 * 3 * 14336 + 4096 + 2 * 128_256 + 3 * 4096
    counted = decode_step_bytes(LLAMA, batch_size=rows, context_tokens=context - 1, dtype_bytes=2)
    embedding = rows * 4096 * 2
    assert sum(w.num_bytes for w in work.values()) - 2 * rows * activations == counted - embedding


def test_rows_of_the_breakdown() -> None:
    times = {"products": 100.0, "rope": 0.0, "head": 300.0, "gaps": 100.0}
    work = {"products": Work(4e8, 1e9), "rope": Work(1e3, 0.0), "head": Work(6e8, 3e9)}
    head, products, gaps, rope, step = breakdown_rows(times, work, 4000.0)
    assert [row["group"] for row in (head, products, gaps, rope)] == ["head", "products", "gaps", "rope"]
    assert head["share_of_step"] == 0.6
    assert products["gb_per_s"] == 4000.0
    assert products["share_of_copy"] == 1.0
    assert head["tflops"] == 10.0
    assert gaps["num_bytes"] == rope["gb_per_s"] == 0
    assert (step["us"], step["num_bytes"], step["gb_per_s"]) == (500.0, 1_000_001_000.0, 2000.0)


def test_variants_by_rows() -> None:
    assert sorted(VARIANTS) == sorted(get_args(Halves))
    assert VARIANTS[0] == halves_for(2) == DEFAULT_HALVES
    assert distinct(VARIANTS, 2) == {name: name for name in VARIANTS}
    # One row is computed eagerly, whatever the halves of more are.
    assert distinct(VARIANTS, 1) == dict.fromkeys(VARIANTS, DEFAULT_HALVES)
    assert {halves_for(1, name) for name in VARIANTS} == {"eager"}


def test_inputs_of_a_step() -> None:
    inputs = inputs_for(3, 33, 1 + 3 * 3)
    assert inputs.kv_indptr.tolist() == [0, 3, 6, 9]
    assert sorted(inputs.kv_indices.tolist()) == list(range(1, 10))
    assert inputs.positions.tolist() == [32] * 3
    assert inputs.kv_slots.tolist() == [16 * block for block in inputs.kv_indices[2::3]]
    assert all(
        a.dtype == np.int32 for a in (inputs.kv_slots, inputs.kv_indices, inputs.positions, inputs.slots)
    )


def test_agreement() -> None:
    logits, tokens = torch.eye(8), torch.arange(8)
    assert Agreement.of(logits, tokens, logits, tokens) == Agreement(0.0, 1.0)
    other = tokens.clone()
    other[0] = 7
    assert Agreement.of(logits, other, logits, tokens).same_tokens == 7 / 8
    assert Agreement(0.01, 1 / 2).holds(2)
    assert not Agreement(0.01, 1 / 2).holds(8)
    assert not Agreement(0.1, 1.0).holds(8)
    assert not Agreement(float("nan"), 1.0).holds(8)


@dataclass
class FakeGraphs:
    """In the place of DecodeGraphs: steps whose logits depend on the variant where ``wrong`` says so."""

    halves: str
    batch_sizes: tuple[int, ...] = (1, 2, 4)

    def capture_one(self, *_: object) -> None:
        pass

    def run(self, inputs: object) -> torch.Tensor:
        return torch.zeros(len(inputs.slots), dtype=torch.int32)  # type: ignore[attr-defined]

    def logits(self, rows: int) -> torch.Tensor:
        return torch.ones(rows, 4) * (2.0 if self.halves == FakeGraphs.wrong else 1.0)

    wrong = ""


class FakeEvent:
    """Every step takes a millisecond more than the one before."""

    count = 0

    def __init__(self, **_: object) -> None:
        self.ms = 0

    def record(self) -> None:
        FakeEvent.count += 1
        self.ms = FakeEvent.count

    def elapsed_time(self, other: "FakeEvent") -> float:
        return float(other.ms - self.ms)


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "is_available": lambda: True,
        "Stream": lambda: None,
        "Event": FakeEvent,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda _: SimpleNamespace(uuid="none", name="none"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for module in (step_lab, random_decoder):
        monkeypatch.setattr(module, "DEVICE", CPU)
    monkeypatch.setattr(step_lab, "TURN_S", 1e-9)
    monkeypatch.setattr(step_lab, "ROWS_WARM_UP_S", 1e-9)
    monkeypatch.setattr(step_lab, "DecodeGraphs", lambda *_, halves, **__: FakeGraphs(halves))
    monkeypatch.setattr(step_lab.DeviceMonitor, "for_gpu", lambda _: DeviceMonitor(None))
    monkeypatch.setattr(decode_step, "WARM_UP_S", 1e-9)
    monkeypatch.setattr(decode_step, "BREAKDOWN_ROWS", (2, 4))
    monkeypatch.setattr(decode_step, "measure_copy_gb_per_s", lambda _: 4000.0)
    monkeypatch.setattr(decode_step, "profile", lambda _: time_by_group(STEP))
    monkeypatch.setattr(decode_step, "collect_provenance", lambda _: Agreement(0.0, 1.0))
    monkeypatch.setattr(FakeGraphs, "wrong", "")


def run(path: Path, *arguments: str) -> Result:
    options = ["--model", "tiny", "--context", "40", "--output-json", str(path), *arguments]
    return CliRunner().invoke(decode_step.main, options)


@pytest.mark.usefixtures("no_gpu_needed")
def test_the_command_writes_and_shows_what_it_measured(tmp_path: Path) -> None:
    result = run(tmp_path / "r.json", "--rows", "1,2,4", "--rounds", "2")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert [case["rows"] for case in report["cases"]] == [1, 2, 4]
    one = {entry["name"]: entry for entry in report["cases"][0]["variants"]}
    assert list(one) == list(VARIANTS)
    assert one["eager"]["same_launches_as"] == DEFAULT_HALVES
    assert one[DEFAULT_HALVES]["step_ms"] == 1.0
    assert one[DEFAULT_HALVES]["num_steps"] == 6
    assert all(entry["agrees"] for case in report["cases"] for entry in case["variants"])
    assert [part["rows"] for part in report["breakdowns"]] == [2, 4]
    assert report["breakdowns"][0]["groups"][-1]["us"] == 48
    assert "provenance" in report
    lines = result.output.splitlines()
    assert lines[-1].split()[0] == "step"
    assert any(line.startswith("4 rows x 40 tokens") for line in lines)
    assert sum(line.split()[0] == "compiled" for line in lines) == 2


@pytest.mark.usefixtures("no_gpu_needed")
def test_another_s_logits_are_shown_and_exit_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FakeGraphs, "wrong", "compiled")
    result = run(tmp_path / "r.json", "--rows", "4", "--variant", "compiled", "--variant", "eager")
    assert result.exit_code == 1
    assert "DISAGREES" in result.output
    (case,) = json.loads((tmp_path / "r.json").read_text())["cases"]
    agrees = {entry["name"]: entry["agrees"] for entry in case["variants"]}
    assert agrees == {DEFAULT_HALVES: True, "compiled": False, "eager": True}


@pytest.mark.usefixtures("no_gpu_needed")
def test_a_profiler_that_fails_loses_no_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(_: object) -> None:
        raise DeviceError("no CUPTI")

    monkeypatch.setattr(decode_step, "profile", failing)
    result = run(tmp_path / "r.json", "--rows", "4")
    assert result.exit_code == 0, result.output
    assert "no CUPTI" in result.output
    assert len(json.loads((tmp_path / "r.json").read_text())["cases"]) == 1


@pytest.mark.usefixtures("no_gpu_needed")
@pytest.mark.parametrize("rows", ["", "0", "x", "3,64", "-1"])
def test_rows_that_no_step_is_captured_for(tmp_path: Path, rows: str) -> None:
    result = run(tmp_path / "r.json", "--rows", rows)
    assert result.exit_code == 2
    assert "Invalid value for '--rows'" in result.output


def test_it_needs_no_flashinfer() -> None:
    """Decode takes Triton's kernels alone, on a machine that may have no others."""
    code = "import sys; sys.modules['flashinfer'] = None; import bench.kernels.decode_step"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
