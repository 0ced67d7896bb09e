"""The kernel benchmarks as far as they go without a GPU: inputs, arithmetic, and what they write."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bench import record
from bench.kernels import decode_attention, decode_step, experts, harness, layer_products, partitions, sustained
from bench.kernels.decode_step import (
    GROUPS,
    Kernel,
    Work,
    breakdown,
    group_of,
    split_steps,
    time_by_group,
    work_by_group,
)
from bench.kernels.harness import blocks_for, lengths, scattered_blocks
from bullet_graph.errors import ConfigError
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.energy import DeviceMonitor, DeviceReport, SampleRange
from bullet_graph.perf.profile_plan import ProfileLimits, ProfilePoint
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.perf.roofline import PROJECTIONS, decode_step_bytes
from bullet_graph.workloads import WorkloadRequest

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
    Kernel("one_row_kernel", 40, 45),
    Kernel("sample_kernel", 46, 48),
]


def run(command: click.Command, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.mark.parametrize("module", [decode_attention, decode_step, experts, layer_products, partitions, sustained])
def test_without_a_gpu_one_line_says_so(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(module.main, "--output-json", tmp_path / "r.json")
    assert (result.exit_code, "needs a GPU" in result.output) == (2, True)


# ---- inputs and operations ----


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=20).map(lambda kv: np.array(kv, dtype=np.int32)),
    st.integers(0, 5),
)
def test_blocks_are_enough_and_nobody_elses(kv_lens: np.ndarray, spare: int) -> None:
    needed = blocks_for(kv_lens)
    indptr, indices = scattered_blocks(kv_lens, needed + spare)
    assert indptr.dtype == indices.dtype == np.int32
    assert indptr[-1] == len(indices) == needed == len(set(indices.tolist()))
    held = np.diff(indptr) * 16
    assert (held >= kv_lens).all()
    assert (held - kv_lens < 16).all()
    assert indices.max() < needed + spare
    with pytest.raises(ConfigError, match=f"needs {needed} blocks, the cache holds {needed - 1}"):
        scattered_blocks(kv_lens, needed - 1)


def test_lengths() -> None:
    assert lengths(3, 1000, False).tolist() == [1000] * 3
    drawn = lengths(256, 1000, True)
    assert 1 <= drawn.min() <= drawn.max() <= 16384
    assert 900 < drawn.mean() < 1010
    assert len(set(drawn.tolist())) > 100


def test_operations_by_hand() -> None:
    weights = 4096 * (6144 + 4096 + 2 * 14336 + 14336)
    assert layer_products.product_flops(LLAMA, 10, *PROJECTIONS) == 2 * weights * 10
    assert layer_products.product_flops(LLAMA, 1, "o") == 2 * 4096 * 4096


@given(
    st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 800)), min_size=1, max_size=30),
    st.sampled_from([512, 1024, 2048]),
)
def test_average_forward(pairs: list[tuple[int, int]], rows: int) -> None:
    forward = sustained.average_forward([WorkloadRequest(prompt, output, None) for prompt, output in pairs], rows)
    assert forward.rows * forward.repeats == pytest.approx(sum(prompt + output - 1 for prompt, output in pairs))
    assert 0 <= forward.decode_rows < rows
    assert 1 <= forward.context <= max(prompt + output for prompt, output in pairs)
    assert 0 <= forward.cached <= max(prompt for prompt, _ in pairs)


# ---- a decode step by group of kernels ----


def test_kernels_by_name() -> None:
    groups = "other norms products rope attention attention products swiglu products norms products sampling"
    assert [group_of(kernel.name) for kernel in STEP] == groups.split()
    fp8 = {"add_rms_norm_quantize_kernel": "norms", "matmul_kernel": "products"}
    of_experts = {"route_kernel": "experts", "combine_kernel": "experts", "combine_partials_kernel": "attention"}
    assert {name: group_of(name) for name in fp8 | of_experts} == fp8 | of_experts


def test_times_add_up_to_the_span() -> None:
    times = time_by_group(STEP)
    by_hand = {"other": 2, "norms": 4, "products": 13, "rope": 1, "attention": 12, "swiglu": 1, "head": 5}
    assert times == by_hand | {"experts": 0, "sampling": 2, "gaps": 8}
    assert sum(times.values()) == 48
    assert set(times) == {*GROUPS, "gaps"}


def test_steps_end_with_sampling() -> None:
    later = [Kernel(kernel.name, kernel.start + 100, kernel.end + 100) for kernel in STEP]
    unfinished = [Kernel("one_row_kernel", 300, 301)]
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
    activations = 32 * (2 * 4096 + 6144 + 4096 + 3 * 14336 + 4096) + 32 * 2 * 4096 + 65 * 4 * 4096 + 32 * 2 * 6144
    activations += 32 * 3 * 14336 + 4096 + 2 * 128_256 + 3 * 4096
    counted = decode_step_bytes(LLAMA, batch_size=rows, context_tokens=context - 1, dtype_bytes=2)
    # Without the rows of the embedding.
    assert sum(w.num_bytes for w in work.values()) - 2 * rows * activations == counted - rows * 4096 * 2


def test_rows_of_the_breakdown() -> None:
    times = {"products": 100.0, "rope": 0.0, "head": 300.0, "gaps": 100.0}
    work = {"products": Work(4e8, 1e9), "rope": Work(1e3, 0.0), "head": Work(6e8, 3e9)}
    head, products, gaps, rope, step = breakdown(times, work, 4000.0)
    assert [row["group"] for row in (head, products, gaps, rope)] == ["head", "products", "gaps", "rope"]
    assert head["share_of_step"] == 0.6
    assert (products["gb_per_s"], products["share_of_copy"]) == (4000.0, 1.0)
    assert head["tflops"] == 10.0
    assert gaps["num_bytes"] == rope["gb_per_s"] == 0
    assert (step["us"], step["num_bytes"], step["gb_per_s"]) == (500.0, 1_000_001_000.0, 2000.0)


# ---- whole commands, with a bench of known times in the GPU's place ----

DEVICE_REPORT = DeviceReport(
    num_samples=1,
    sm_clock_mhz=SampleRange(1500.0, 1500.0, 1500.0),
    power_w=SampleRange(690.0, 690.0, 690.0),
    temperature_c=None,
    energy_joules=None,
)


class FakeBench:
    """Steps whose time is their number of rows in ms; prefill beside decode takes twice as long."""

    def measure(self, point: ProfilePoint, _: float) -> tuple[float, ...]:
        times = {"decode": (1.0 * point.batch_size,), "prefill": (1.0 * point.tokens,)}
        times["mixed"] = (1.0 * (point.batch_size + point.tokens),)
        return times.get(point.kind, (2.0 * point.batch_size, 2.0 * point.tokens))


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def fake_bench(_: str, points: Sequence[ProfilePoint], **__: Any) -> Iterator[tuple[FakeBench, str]]:
        assert points
        yield FakeBench(), "fake: for a test"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="u", multi_processor_count=132)
    )
    monkeypatch.setattr(DeviceMonitor, "report", DEVICE_REPORT)
    for module in (decode_step, partitions, sustained):
        monkeypatch.setattr(module, "open_bench", fake_bench)
        monkeypatch.setattr(module, "watch_gpu", lambda: DeviceMonitor(None))
    monkeypatch.setattr(sustained, "product_ceiling_tflops", lambda: 600.0)
    monkeypatch.setattr(decode_step, "measure_copy_gb_per_s", lambda _: 4000.0)
    monkeypatch.setattr(decode_step, "profile", lambda _: time_by_group(STEP))
    provenance = collect_provenance("cpu")
    monkeypatch.setattr(record, "collect_provenance", lambda _: provenance)


def written(command: click.Command, path: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    result = run(command, *arguments, "--output-json", path)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(path.read_text())
    assert {"argv", "provenance"} <= report.keys()
    return report, result.output


@pytest.mark.usefixtures("no_gpu_needed")
def test_decode_steps_beside_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, output = written(decode_step.main, tmp_path / "r.json", "--rows", "1,64", "--profiled-rows", "64")
    assert [(case["rows"], case["step_ms"], case["joules"]) for case in report["cases"]] == [
        (64, 64, None),
        (1, 1, None),
    ]
    monkeypatch.setattr(DeviceMonitor, "report", replace(DEVICE_REPORT, energy_joules=80.0))
    report, more = written(decode_step.main, tmp_path / "j.json", "--rows", "1,64", "--profiled-rows", "64")
    assert all(0 < case["joules"] < 1e9 for case in report["cases"])
    assert "– J" not in more
    assert report["breakdowns"][0]["groups"][-1]["us"] == 48
    assert "% of a copy's 4000, – J, 690 W 1500 MHz" in output


@pytest.mark.usefixtures("no_gpu_needed")
def test_partitions_add_their_shares(tmp_path: Path) -> None:
    plot = tmp_path / "p.svg"
    report, output = written(partitions.main, tmp_path / "r.json", "--decode-sms", "32,64", "--plot", plot)
    assert [(p["decode_sms"], p["prefill_sms"]) for p in report["points"]] == [
        *((132, None), (None, 132), (32, None), (None, 100), (32, 100)),
        *((64, None), (None, 68), (64, 68)),
    ]
    assert report["points"][-1]["prefill_tokens_per_s"] == 500.0
    assert output.count("shares add up to 1.00") == 2
    assert plot.read_text().startswith("<?xml")


@pytest.mark.usefixtures("no_gpu_needed")
def test_a_workload_takes_its_forwards(tmp_path: Path) -> None:
    report, output = written(sustained.main, tmp_path / "r.json", "--rows", "1024")
    conv, code = report["cases"]
    assert conv["workload"] == "azure:conv=600"
    # A forward takes a millisecond per row here, so a workload takes one per token.
    assert conv["seconds"] == pytest.approx(conv["repeats"] * 1.024, rel=1e-3)
    assert code["step_ms"] == 1024.0
    assert "(600 in a bf16 product), 690 W" in output


def test_heat_comes_before_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench captures what the points need, and runs until clocks are sustained, before it is handed out."""
    calls: list[str] = []
    bench = SimpleNamespace(capture=lambda *_, **__: calls.append("capture"), measure=lambda *_: calls.append("heat"))
    limits = ProfileLimits(max_batch_size=64, max_tokens=2048, max_model_len=4096, kv_tokens=4096)

    @contextmanager
    def opened(prepared: Any, *, progress: bool) -> Iterator[tuple[Any, str]]:  # noqa: ARG001
        assert (prepared.config.max_num_seqs, prepared.config.max_num_batched_tokens) == (64, 2048)
        yield bench, "none"

    monkeypatch.setattr(harness, "prepare_profile", lambda config: SimpleNamespace(config=config, limits=limits))
    monkeypatch.setattr(harness, "open_workbench", opened)
    points = [ProfilePoint("decode", batch_size=64, context_tokens=64), ProfilePoint("prefill", tokens=2048)]
    with harness.open_bench("tiny", points):
        assert calls == ["capture", "heat"]
    with (
        pytest.raises(ConfigError, match=r"64 rows of context 65 .* KV cache's 4,096 tokens"),
        harness.open_bench("tiny", [ProfilePoint("decode", batch_size=64, context_tokens=65)]),
    ):
        pass
