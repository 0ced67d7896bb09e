"""Facts about GPUs that the engine needs before it has measured anything: one ``GpuSpec`` per known GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Sustained rates of a GPU with this engine's kernels, and what a launch costs its host.

    Attributes:
        name: as the driver reports it.
        is_measured: the rates were fitted to measurements of this GPU; else they are estimates.
        tflops: matrix products on all SMs with full waves, in 10¹² operations per second.
        fp8_tflops: those of FP8, likewise.
        attention_tflops: prefill attention, likewise.
        unthrottled: how many times faster one SM computes when so few SMs are busy that power does not limit them.
        bandwidth_gb_s: reads of a decode step on all SMs, in 10⁹ bytes per second.
        half_bandwidth_share: bandwidth saturates with the number of SMs s as s / (s + this share of all SMs).
        layer_overhead_ms: small kernels and gaps of one layer on the device.
        sharing_slowdown: how many times slower each lane is beside the other, as both share power and memory.
        eager_layer_ms: host time to launch one layer kernel by kernel, whatever its rows.
        captured_layer_ms: host time of a layer that is replayed from piecewise CUDA graphs.
        rank_sum_ms: time of a sum of one row over ranks.
        link_gb_s: what a rank sends in larger sums, in 10⁹ bytes per second. The default was measured on two H100s with
            NVLink (bench/results/h100/collectives.json). GPUs without NVLink have PCIe's.
    """

    name: str
    is_measured: bool
    num_sms: int
    memory_bytes: int | None = None
    tflops: float
    fp8_tflops: float
    attention_tflops: float
    unthrottled: float
    bandwidth_gb_s: float
    half_bandwidth_share: float
    layer_overhead_ms: float
    sharing_slowdown: float
    eager_layer_ms: float = 0.2
    captured_layer_ms: float = 0.08
    rank_sum_ms: float = 0.006
    link_gb_s: float = 250.0


GENERIC = GpuSpec(
    name="generic",
    is_measured=False,
    num_sms=64,
    tflops=100.0,
    fp8_tflops=180.0,
    attention_tflops=60.0,
    unthrottled=1.2,
    bandwidth_gb_s=800.0,
    link_gb_s=25.0,
    half_bandwidth_share=0.35,
    layer_overhead_ms=0.01,
    sharing_slowdown=1.3,
)
"""A mid-range GPU, for a device about which nothing is known."""

H200 = GpuSpec(
    name="NVIDIA H200",
    is_measured=True,
    num_sms=132,
    memory_bytes=150_109_880_320,
    tflops=665.0,
    fp8_tflops=1230.0,
    attention_tflops=430.0,
    unthrottled=1.27,
    bandwidth_gb_s=3900.0,
    half_bandwidth_share=0.3,
    layer_overhead_ms=0.01,
    sharing_slowdown=1.27,
)
"""Fitted to Llama-3.1-8B at the 700 W cap: sustained runs (bench/results/h200/), and bandwidth to its table (capture/).
Host times: bench/LOG.md."""


def _by_data_sheet(
    name: str, num_sms: int, memory_gb: float, *, tflops: int, fp8_tflops: int | None, bandwidth_gb_s: int
) -> GpuSpec:
    """An unmeasured GPU, which is taken to reach the same shares of its data sheet's dense rates as the H200."""
    # The H200's own sheet says 989 and 1,979 TFLOPS and 4,800 GB/s. Without FP8, the rate is that of 16 bits.
    share = tflops / 989
    return replace(
        H200,
        name=name,
        is_measured=False,
        num_sms=num_sms,
        memory_bytes=int(memory_gb * 1e9),
        tflops=H200.tflops * share,
        fp8_tflops=H200.fp8_tflops * fp8_tflops / 1979 if fp8_tflops else H200.tflops * share,
        attention_tflops=H200.attention_tflops * share,
        bandwidth_gb_s=H200.bandwidth_gb_s * bandwidth_gb_s / 4800,
    )


H100 = _by_data_sheet("NVIDIA H100 80GB HBM3", 132, 85.017, tflops=989, fp8_tflops=1979, bandwidth_gb_s=3350)
A100 = _by_data_sheet("NVIDIA A100-SXM4-80GB", 108, 85, tflops=312, fp8_tflops=None, bandwidth_gb_s=2039)
L40S = replace(_by_data_sheet("NVIDIA L40S", 142, 48, tflops=362, fp8_tflops=733, bandwidth_gb_s=864), link_gb_s=25.0)
B200 = _by_data_sheet("NVIDIA B200", 148, 180, tflops=2250, fp8_tflops=4500, bandwidth_gb_s=8000)

KNOWN_GPUS: Mapping[str, GpuSpec] = MappingProxyType({gpu.name: gpu for gpu in (H200, H100, B200, A100, L40S, GENERIC)})


def gpu_spec(name: str, num_sms: int) -> GpuSpec:
    """Facts about a GPU by name; an unknown GPU gets the generic rates with its own name and number of SMs."""
    known = KNOWN_GPUS.get(name, GENERIC)
    if known.name == name and known.num_sms == num_sms:
        return known
    return replace(known, name=name, num_sms=num_sms, is_measured=False)
