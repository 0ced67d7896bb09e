"""The arithmetic about what binds, worked by hand on invented numbers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from result_files import (
    AUTO,
    CONV,
    PROVENANCE,
    VLLM_512,
    at_load,
    decode,
    make_run,
    search,
    write_offline,
    write_sweep,
)

from bench.reporting.evidence import read_evidence
from bench.reporting.limits import limit_lines, serving_floor, step_floor
from bench.reporting.rates import Rate, Rates, rates_of
from bench.reporting.targets import judge
from bench.reporting.work import ServingWork, StepWork, serving_work, step_work
from bullet_graph.errors import ConfigError
from bullet_graph.workloads import WorkloadRequest

CONV_TOKENS = {"total_input_tokens": 553386, "total_output_tokens": 156892}


@dataclass(frozen=True)
class Shape:
    """Two layers: qkv 2 × 4, o 2 × 2, gate and up 2 × 6, down 3 × 2: 8 + 4 + 12 + 6 weights."""

    vocab_size: int = 5
    hidden_size: int = 2
    intermediate_size: int = 3
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 1
    qkv_bias: bool = False
    qk_norm: bool = False


def section(folder: Path) -> str:
    evidence = read_evidence(folder)
    return "\n".join(limit_lines(judge(evidence), evidence))


def test_the_work_of_a_workload() -> None:
    # Rows: 3 + 2 of the first request, whose third output token nobody reads on, and 4 of the second.
    work = serving_work(Shape(), [WorkloadRequest(3, 3, None), WorkloadRequest(4, 1, None)])
    # First layer 9 × 60; last layer 9 × 16 of qkv and, for the 4 sampled rows, 4 × 44.
    assert work.layer_flops == 540 + 144 + 176
    assert work.head_flops == 4 * 2 * 10
    # Of 6 + 10 pairs in the first layer, and 3 + 4 in the last, 4 × 2 heads × 1.
    assert work.attention_flops == 8 * (16 + 7)
    # Two decode rows read 4 and 5 tokens of 2 layers × (key + value) × 1 × 2 bytes.
    assert work.kv_bytes == (4 + 5) * 8


def test_the_work_of_a_decode_step() -> None:
    work = step_work(Shape(), batch_size=3, context=10)
    # 2 × (2 layers × 30 + 10 of the head) × 3 rows.
    assert work.product_flops == 420
    # 70 weights, norms of 2 layers × 4 and 2, and 3 rows of the embedding, of two bytes.
    assert work.weight_bytes == 2 * (70 + 10 + 6)
    assert work.kv_bytes == 3 * 11 * 8


def rates(layers: float | None = 10.0, kv_reads: float = 5.0) -> Rates:
    return Rates(
        products=Rate(20.0, 400.0, "p"),
        layers=None if layers is None else Rate(layers, 500.0, "l"),
        prompt_attention=Rate(4.0, None, "a"),
        kv_reads=Rate(kv_reads, 300.0, "k"),
        copy=Rate(10.0, None, "c"),
    )


def test_the_floor_of_a_workload() -> None:
    # 100/10 + 20/20 + 8/4 = 13 s of computing, 35/5 = 7 s of reading.
    floor = serving_floor(ServingWork(100.0, 20.0, 8.0, 35.0), rates())
    assert (floor.in_turn_s, floor.overlapped_s) == (20.0, 13.0)
    assert [part.joules for part in floor.parts] == [5000.0, 400.0, None, 2100.0]
    assert floor.verdict(12.9).startswith("**Proven** at these rates: 13.00 s")
    assert floor.verdict(19.9).startswith(
        "**Proven for parts that take turns**: 20.00 s, and the target is 19.90 s"
    )
    assert "**Not proven where they overlap**: 13.00 s" in floor.verdict(19.9)
    assert floor.verdict(25.0).startswith("**Not proven**: in turn, the parts take 20.00 s")
    assert "That leaves 5.00 s (20.0 %)" in floor.verdict(25.0)
    # Where reading takes longer than computing, overlapping cannot beat it.
    assert serving_floor(ServingWork(100.0, 20.0, 8.0, 35.0), rates(kv_reads=1.0)).overlapped_s == 35.0


def test_a_part_of_unknown_rate_proves_nothing() -> None:
    floor = serving_floor(ServingWork(100.0, 20.0, 8.0, 35.0), rates(layers=None))
    assert floor.verdict(0.1) == "**Not proven**: no file has the rate of layers without attention."


@pytest.mark.parametrize(
    ("flops", "in_turn_s", "overlapped_s"),
    # Products 1 s beside weights of 3 s, then 2 s of keys and values; 4 s and 6 s of products.
    [(20.0, 5.0, 5.0), (80.0, 6.0, 5.0), (120.0, 8.0, 6.0)],
)
def test_the_floor_of_a_decode_step(flops: float, in_turn_s: float, overlapped_s: float) -> None:
    floor = step_floor(StepWork(flops, 30.0, 20.0), rates())
    assert (floor.in_turn_s, floor.overlapped_s) == (in_turn_s, overlapped_s)


def write_rates(folder: Path, **changes: Any) -> None:
    """Layers at 500 and products alone at 600 TFLOP/s, decode attention at 4 TB/s."""
    figures = {"rows": 4096, "watts": 690, "mhz": 1450}
    rows = [
        {"name": "engine layer", "tflops": 400.0} | figures,
        {"name": "engine, SwiGLU fused", "tflops": 500.0} | figures,
        {"name": "products alone", "tflops": 600.0} | figures,
        {"name": "products alone", "tflops": 900.0} | figures | {"rows": 512},
        {"name": "split, ns a token-layer", "rows": 4096, "o": 1.0},
        {"name": "engine", "rows": 8192, "skipped": "out of time"},
    ]
    (folder / "prefill_gemm.json").write_text(json.dumps({"device": "NVIDIA H200", "rows": rows} | changes))

    def case(num_sms: int, *gb_per_s: float) -> dict[str, Any]:
        kernels = [{"gb_per_s": rate} for rate in gb_per_s]
        told = {"rows": 256, "context": 1000, "num_sms": num_sms}
        return told | {"flashinfer": kernels[0], "flashinfer_after": kernels[0], "triton": kernels[1:]}

    cases = [case(132, 3900.0, 4000.0, 3800.0), case(64, 9000.0, 9000.0)]
    (folder / "decode_attention.json").write_text(json.dumps({"cases": cases, "provenance": PROVENANCE}))
    points = [
        {"decode_sms": 64, "prefill_sms": None, "device": {"power_w": {"mean": 400.0}}},
        {"decode_sms": 132, "prefill_sms": None, "device": {"power_w": {"mean": 650.0}}},
        {"decode_sms": None, "prefill_sms": 132, "prefill_tokens_per_s": 9e4, "device": {"power_w": None}},
    ]
    scaling = {"backend": "green: 8", "prompt": 512, "seconds": 2.0, "batch_size": 64, "context": 1000}
    (folder / "scaling.json").write_text(json.dumps(scaling | {"points": points, "provenance": PROVENANCE}))


def test_rates_are_the_highest_of_the_files(tmp_path: Path) -> None:
    write_rates(tmp_path)
    write_offline(tmp_path / "offline.json", decode(1, 4.0, copy_gb_per_s=4200.0), decode(8, 5.0))
    found = rates_of(read_evidence(tmp_path))
    assert (found.layers and found.layers.per_s) == 500e12
    assert found.products == Rate(600e12, 690.0, "4,096 rows, 690 W, 1,450 MHz, `prefill_gemm.json`")
    assert (found.copy and found.copy.per_s) == 4200e9
    told = "256 × 1,000 tokens, `decode_attention.json`; 650 W as decode steps of `scaling.json`"
    assert found.kv_reads == Rate(4000e9, 650.0, told)


def test_a_measured_rate_of_prompt_attention_goes_before_the_fitted_one(tmp_path: Path) -> None:
    fitted = rates_of(read_evidence(tmp_path)).prompt_attention
    assert fitted is not None
    assert "fitted" in fitted.source
    rows = [
        {"part": "attention", "prompts": 4, "tokens": 512, "paged_tflops": 300.0, "ragged_tflops": 350.0},
        {"part": "attention", "prompts": 1, "tokens": 8192, "paged_tflops": 340.0, "ragged_tflops": 330.0},
        {"part": "forward", "prompts": 1, "tokens": 8192},
    ]
    report = {"layers": 4, "rows": rows, "provenance": PROVENANCE}
    (tmp_path / "prefill_attention.json").write_text(json.dumps(report))
    found = rates_of(read_evidence(tmp_path)).prompt_attention
    assert found == Rate(350e12, None, "ragged, 4 × 512 tokens, `prefill_attention.json`")


def test_rates_of_the_same_card_go_before_higher_ones(tmp_path: Path) -> None:
    for name, card, rate in (("decode_step.json", "GPU-a", 4000.0), ("offline.json", "GPU-b", 4300.0)):
        one = {"copy_gb_per_s": rate, "command": "x", "provenance": PROVENANCE | {"device_uuid": card}}
        (tmp_path / name).write_text(json.dumps([one] if name == "offline.json" else one))
    evidence = read_evidence(tmp_path)
    copies = [rates_of(evidence, cards).copy for cards in ({"GPU-a"}, {"GPU-b"}, {"GPU-c"}, set())]
    assert [copy.per_s if copy else None for copy in copies] == [4000e9, 4300e9, 4300e9, 4300e9]
    assert copies[0] is not None
    assert copies[0].source.endswith("the same card")
    assert copies[2] is not None
    assert "card" not in copies[2].source


def test_rates_of_another_gpu_do_not_count(tmp_path: Path) -> None:
    write_rates(tmp_path, device="another GPU")
    found = rates_of(read_evidence(tmp_path))
    assert (found.products, found.layers) == (None, None)
    assert found.kv_reads is not None


def test_a_damaged_file_of_rates_is_refused(tmp_path: Path) -> None:
    write_rates(tmp_path, rows=[{"name": "engine", "rows": 4096, "tflops": "fast", "watts": 1, "mhz": 1}])
    with pytest.raises(ConfigError, match=r"prefill_gemm\.json is damaged"):
        rates_of(read_evidence(tmp_path))


def all_at_once(folder: Path, **changes: Any) -> None:
    told: dict[str, Any] = {"duration": 25.0, "energy_joules": 17_000.0} | CONV_TOKENS | changes
    run = make_run(1e4, all_at_once=True, **told)
    write_sweep(folder / "peers_offline.json", at_load({AUTO: [run]}), all_at_once=True)


def test_the_limit_of_a_workload_all_at_once(tmp_path: Path) -> None:
    all_at_once(tmp_path)
    write_rates(tmp_path)
    text = section(tmp_path)
    assert "### conv, first 600, all at once: missed" in text
    # 17,000 J in 25 s is 680 W.
    assert "On average it drew 680 W of the card's 700 W (97.1 %), at 1,700 MHz: it was at the cap" in text
    # 9.693 POP at 500 TFLOP/s, 77.5 % of 25 s, at 690 W; 23.07 TB at 4 TB/s.
    assert (
        "| 500.0 TFLOP/s: 4,096 rows, 690 W, 1,450 MHz, `prefill_gemm.json` | 19.39 s | 77.5 % | 13,376 |"
        in text
    )
    assert (
        "`decode_attention.json`; 650 W as decode steps of `scaling.json` | 5.77 s | 23.1 % | 3,748 |" in text
    )
    # 19.386 + 0.275 + 0.553 + 5.766; without the last 20.213.
    assert "**Proven for parts that take turns**: 25.98 s, and the target is 22.00 s." in text
    assert "**Not proven where they overlap**: 20.21 s" in text
    # 10.0954 POP: 17 kJ are 1.684 pJ each, 22 s × 700 W are 15.4 kJ.
    assert "Energy: 17.00 kJ, 1.684 pJ/FLOP all told." in text
    assert "allows 15.40 kJ, 1.525 pJ/FLOP (-9.4 %)" in text
    # 13,376 + 0.2747 × 690 + 3,748.
    assert "The parts took 17.31 kJ where each was measured alone (without attention of prompts" in text


@pytest.mark.parametrize(
    ("peer_joules", "verdict"),
    [
        # 17 kJ × 0.9 / (0.02 / peer); the parts take 13,376 + 0.2747 × 690 + 3,748 J.
        (0.02, "allows 15.30 kJ. **Proven** at these rates: the parts alone take at least 17.31 kJ"),
        (0.022, "allows 16.83 kJ. **Proven** at these rates: the parts alone take at least 17.31 kJ"),
    ],
)
def test_the_limit_of_energy(tmp_path: Path, peer_joules: float, verdict: str) -> None:
    told: dict[str, Any] = {"duration": 21.0, "energy_joules": 17_000.0} | CONV_TOKENS
    runs = {
        AUTO: [make_run(1e4, all_at_once=True, joules_per_token=0.02, **told)],
        VLLM_512: [make_run(1e4, all_at_once=True, joules_per_token=peer_joules)],
    }
    write_sweep(tmp_path / "peers_offline.json", at_load(runs), all_at_once=True)
    write_rates(tmp_path)
    text = section(tmp_path)
    assert (
        "bullet_graph auto took 17.00 kJ (`peers_offline.json`), 0.0200 J (bullet_graph auto) against" in text
    )
    table_start, table_end = text.index("\n| part"), text.index("**")
    assert verdict in text[:table_start].splitlines()[-1] + " " + text[table_end:]


def test_energy_that_is_within_reach_is_not_proven(tmp_path: Path) -> None:
    told: dict[str, Any] = {"duration": 21.0, "energy_joules": 20_000.0} | CONV_TOKENS
    runs = {
        AUTO: [make_run(1e4, all_at_once=True, joules_per_token=0.02, **told)],
        VLLM_512: [make_run(1e4, all_at_once=True, joules_per_token=0.022)],
    }
    write_sweep(tmp_path / "peers_offline.json", at_load(runs), all_at_once=True)
    write_rates(tmp_path)
    # 20 kJ × 0.9 × 0.022 / 0.02 = 19.8 kJ.
    assert (
        "**Not proven**: the parts take at least 17.31 kJ, where each was measured alone, 87.4 % of"
        in section(tmp_path)
    )


def test_a_run_below_the_cap_is_not_held_back_by_power(tmp_path: Path) -> None:
    all_at_once(tmp_path, energy_joules=16_000.0)
    assert "drew 640 W of the card's 700 W (91.4 %), at 1,700 MHz: power did not hold it back" in section(
        tmp_path
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {},
            "**Not proven**: no file has the rate of layers without attention, output head, keys and values",
        ),
        ({"energy_joules": None}, "What it drew is not known."),
        (
            {"total_output_tokens": 1},
            "had 553386 prompt and 1 output tokens, and the workload has 553386 and 156892",
        ),
    ],
)
def test_what_no_file_tells_is_not_proven(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    all_at_once(tmp_path, **changes)
    text = section(tmp_path)
    assert message in text
    assert "**Not proven**" in text
    assert "**Proven" not in text


def test_the_limit_of_a_decode_step(tmp_path: Path) -> None:
    write_rates(tmp_path)
    write_offline(tmp_path / "offline.json", decode(64, 7.0, copy_gb_per_s=4000.0))
    text = section(tmp_path)
    assert "### decode step, batch 64, context 1,000: missed" in text
    assert "Measured: 7.000 ms (median step, one run, `offline.json`)." in text
    # 960.6 GFLOP at 600 TFLOP/s; 15.01 and 8.40 GB at 4 TB/s: 3.753 + 2.099.
    assert "| matrix products | 960.6 GFLOP | 600.0 TFLOP/s: 4,096 rows" in text
    assert (
        "| weights, read beside them | 15.0 GB | 4.00 TB/s: `offline.json` | 3.75 ms | 53.6 % | – |" in text
    )
    assert "**Not proven**: in turn, the parts take 5.85 ms, and the target is 6.90 ms." in text
    # 23.41 GB in 7 ms are 3,343.9 GB/s, in 6.9 ms 3,392.4.
    assert "at 83.6 % of what a copy reaches (4.00 TB/s, `offline.json`); the target needs 84.8 %." in text


def write_groups(folder: Path, *parts: dict[str, Any], **changes: Any) -> None:
    device = {"power_w": {"mean": 640.0}, "sm_clock_mhz": {"mean": 1900.0}}
    report = {
        "model": "llama-3.1-8b",
        "context": 1000,
        "copy_gb_per_s": 4000.0,
        "cases": [{"rows": 64, "device": device}],
        "breakdowns": parts,
        "provenance": PROVENANCE,
    }
    (folder / "decode_step.json").write_text(json.dumps(report | changes))


def test_the_kernels_of_a_decode_step(tmp_path: Path) -> None:
    write_rates(tmp_path)
    write_offline(tmp_path / "offline.json", decode(64, 7.0))
    groups = [
        # 14 GB at 4 TB/s are 3,500 µs, 0.96 TFLOP at 600 TFLOP/s 1,600.
        {"group": "products", "us": 4500.0, "num_bytes": 14e9, "flops": 0.96e12},
        # 3 TFLOP take 5,000 µs, 4 GB 1,000.
        {"group": "head", "us": 5300.0, "num_bytes": 4e9, "flops": 3e12},
        {"group": "gaps", "us": 200.0, "num_bytes": 0.0, "flops": 0.0},
        {"group": "step", "us": 10_000.0, "num_bytes": 18e9, "flops": 3.96e12},
    ]
    write_groups(tmp_path, {"rows": 256, "failed": "no CUPTI"}, {"rows": 64, "groups": groups})
    text = section(tmp_path)
    assert "By kernel, profiled (`decode_step.json`, 640 W at 1,900 MHz while steps were timed):" in text
    assert "| products | 4,500.0 | 45.0 | 14,000.0 | 3,111 | 3,500.0 | 1,000.0 |" in text
    assert "| head | 5,300.0 | 53.0 | 4,000.0 | 755 | 5,000.0 | 300.0 |" in text
    assert "| gaps | 200.0 | 2.0 | 0.0 | 0 | 0.0 | 200.0 |" in text
    assert "| step | 10,000.0 | 100.0 | 18,000.0 | 1,800 | 8,500.0 | 1,500.0 |" in text
    assert "Most is lost in products: 1,000.0 of 1,500.0 µs beyond the least." in text
    # Its copy is the only one that is told: 23.41 GB in 7 ms.
    assert "at 83.6 % of what a copy reaches (4.00 TB/s, `decode_step.json`)" in text


@pytest.mark.parametrize("changes", [{"context": 2000}, {"model": "qwen3-8b"}, {"breakdowns": []}])
def test_kernels_of_other_steps_do_not_count(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_offline(tmp_path / "offline.json", decode(64, 7.0))
    groups = [{"group": name, "us": 1.0, "num_bytes": 1.0, "flops": 1.0} for name in ("head", "step")]
    write_groups(tmp_path, {"rows": 64, "groups": groups}, **changes)
    assert "By kernel: not measured (`decode_step.json`)." in section(tmp_path)


@pytest.mark.parametrize(
    "row", [{"group": "step"}, {"group": "head", "us": 1.0, "num_bytes": 1.0, "flops": 1.0}]
)
def test_a_damaged_file_of_kernels_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    write_offline(tmp_path / "offline.json", decode(64, 7.0))
    write_groups(tmp_path, {"rows": 64, "groups": [row]})
    with pytest.raises(ConfigError, match=r"decode_step\.json is damaged"):
        section(tmp_path)


def test_other_targets_have_no_arithmetic(tmp_path: Path) -> None:
    cells = [search(AUTO, 23.0, {23.0: 0.95}, CONV), search(VLLM_512, 23.0, {23.0: 0.95, 30.0: 0.1}, CONV)]
    write_sweep(tmp_path / "peers.json", cells)
    assert section(tmp_path) == "**Not proven**, no arithmetic yet: goodput, conv (ttft:500 tpot:15, 90 %)."
    (tmp_path / "peers.json").unlink()
    assert section(tmp_path) == "No target is missed or open."
