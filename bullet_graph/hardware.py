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


GENERIC = GpuSpec(
    name="generic",
    is_measured=False,
    num_sms=64,
    tflops=100.0,
    fp8_tflops=180.0,
    attention_tflops=60.0,
    unthrottled=1.2,
    bandwidth_gb_s=800.0,
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
    bandwidth_gb_s=3600.0,
    half_bandwidth_share=0.34,
    layer_overhead_ms=0.01,
    sharing_slowdown=1.27,
)
"""Fitted to sustained runs of Llama-3.1-8B at the 700 W cap (bench/results/h200/); host times: bench/LOG.md."""

H100 = replace(
    H200,
    name="NVIDIA H100 80GB HBM3",
    is_measured=False,
    memory_bytes=85_017_493_504,
    bandwidth_gb_s=H200.bandwidth_gb_s * 3.35 / 4.8,
)
"""The H200's rates, since the chip and its power cap are the same, with the bandwidth of the H100's memory."""

KNOWN_GPUS: Mapping[str, GpuSpec] = MappingProxyType({gpu.name: gpu for gpu in (H200, H100, GENERIC)})


def gpu_spec(name: str, num_sms: int) -> GpuSpec:
    """Facts about a GPU by name; an unknown GPU gets the generic rates with its own name and number of SMs."""
    known = KNOWN_GPUS.get(name, GENERIC)
    if known.name == name and known.num_sms == num_sms:
        return known
    return replace(known, name=name, num_sms=num_sms, is_measured=False)
