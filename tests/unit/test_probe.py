"""The probe and the driver calls under it, against a fake driver."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.fake_driver import PRIMARY_CONTEXT, CUresult, FakeDriver, Stream

from bullet_graph.errors import PartitionError
from bullet_graph.partition.driver import CudaDriver
from bullet_graph.partition.probe import MAX_TOGETHER, PTX, THREADS_PER_BLOCK, SmidProbe


def make_stream(gpu: FakeDriver, probe: SmidProbe, *sms: int) -> int:
    """A stream confined to these SMs, or to none in particular."""
    stream = probe.driver.create_stream()
    if sms:
        gpu.live[stream].sms = frozenset(sms)
    return stream


def test_a_launch_shows_its_streams_sms_and_a_graph_those_of_its_capture(gpu: FakeDriver, probe: SmidProbe) -> None:
    masked, unmasked = make_stream(gpu, probe, 6, 7), make_stream(gpu, probe)
    assert (probe.run(masked), probe.run(unmasked)) == ({6, 7}, frozenset(range(132)))
    assert probe.run_captured(masked) == probe.run_captured(masked, unmasked) == {6, 7}
    assert probe.run_captured(unmasked, masked) == frozenset(range(132))
    gpu.graphs_ignore_masks = True
    assert probe.run_captured(masked, unmasked) == frozenset(range(132)), "it obeys its launch stream"


def test_launches_on_several_streams(gpu: FakeDriver, probe: SmidProbe) -> None:
    sets = [{2 * i, 2 * i + 1} for i in range(MAX_TOGETHER)]
    assert probe.run_together([make_stream(gpu, probe, *sms) for sms in sets]) == sets


def test_launches_that_do_not_overlap_in_time(gpu: FakeDriver, probe: SmidProbe) -> None:
    gpu.serial = True
    streams = [make_stream(gpu, probe, 0, 1), make_stream(gpu, probe, 2, 3)]
    with pytest.raises(PartitionError, match=r"at the same time.*100 ms in vain"):
        probe.run_together(streams)
    assert probe.run(streams[0]) == {0, 1}


@pytest.mark.parametrize("count", [0, 2, MAX_TOGETHER + 1])
def test_streams_must_differ_and_be_few(gpu: FakeDriver, probe: SmidProbe, count: int) -> None:
    streams = [make_stream(gpu, probe) for _ in range(count)]
    if count == 2:
        streams[1] = streams[0]
    with pytest.raises(PartitionError, match=r"1 to 8 different streams.*a stream of its own"):
        probe.run_together(streams)


def test_a_block_without_a_record(gpu: FakeDriver, probe: SmidProbe) -> None:
    stream = make_stream(gpu, probe)
    probe.run(stream)
    for lost in (3, 528):  # records of an earlier run do not count
        gpu.lost_blocks = lost
        for run in (probe.run, probe.run_captured):
            with pytest.raises(PartitionError, match=rf"all 528 blocks.*but {lost} left no record"):
                run(stream)


def test_close_frees_everything(gpu: FakeDriver, probe: SmidProbe) -> None:
    assert (gpu.retained, gpu.current_context) == (1, PRIMARY_CONTEXT)
    stream = make_stream(gpu, probe)
    probe.run_captured(stream)
    gpu.cuStreamDestroy(stream)
    probe.close()
    probe.close()
    assert (gpu.retained, gpu.live) == (0, {})


def test_a_context_that_is_current(gpu: FakeDriver, probe: SmidProbe) -> None:
    other = SmidProbe(driver=probe.driver)
    probe.close()
    stream = make_stream(gpu, other)
    assert other.run(stream) == frozenset(range(132)), "it outlives the first"
    gpu.cuStreamDestroy(stream)
    other.close()
    gpu.current_context = 0xABC
    SmidProbe(driver=CudaDriver(gpu)).close()
    assert (gpu.current_context, gpu.retained) == (0xABC, 0)
    gpu.current_device = 1
    with pytest.raises(PartitionError, match=r"GPU 0 needs that GPU's context, but .* one is of GPU 1"):
        SmidProbe(0, driver=CudaDriver(gpu))
    assert gpu.retained == 0


@pytest.mark.parametrize(
    "name", ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuLibraryLoadData", "cuLibraryGetKernel", "cuMemAlloc"]
)
def test_a_call_that_fails_when_the_probe_is_made(gpu: FakeDriver, name: str) -> None:
    gpu.fail = {name: CUresult.CUDA_ERROR_INVALID_VALUE}
    with pytest.raises(PartitionError, match=f"{name} had to succeed but returned CUDA_ERROR_INVALID_VALUE"):
        SmidProbe(driver=CudaDriver(gpu))
    assert (gpu.retained, gpu.live) == (0, {})


@pytest.mark.parametrize(
    "name",
    [
        *("cuMemsetD32Async", "cuStreamBeginCapture", "cuLaunchKernel", "cuStreamEndCapture"),
        *("cuGraphInstantiate", "cuGraphLaunch", "cuMemcpyDtoHAsync", "cuStreamSynchronize"),
    ],
)
def test_a_call_that_fails_in_a_run(gpu: FakeDriver, probe: SmidProbe, name: str) -> None:
    stream = make_stream(gpu, probe)
    gpu.fail = {name: CUresult.CUDA_ERROR_INVALID_VALUE}
    with pytest.raises(PartitionError, match=f"{name} had to succeed"):
        probe.run_captured(stream)
    gpu.fail = {}
    # Its code, its memory, the stream: no graph is left.
    kinds = [type(thing) for thing in gpu.live.values()]
    assert (kinds.count(Stream), len(kinds)) == (1, 3)


def test_no_gpu_no_libcuda_or_an_old_one(gpu: FakeDriver) -> None:
    gpu.fail = {"cuInit": CUresult.CUDA_ERROR_NO_DEVICE}
    with pytest.raises(PartitionError, match=r"cuInit .*CUDA_ERROR_NO_DEVICE.*bullet-graph doctor"):
        CudaDriver(gpu)
    gpu.missing = {"cuInit"}
    with pytest.raises(PartitionError, match=r"cuInit, but it cannot be called \(Function .* not found\)"):
        CudaDriver(gpu)


def fake_bindings(monkeypatch: pytest.MonkeyPatch, version: str, driver: FakeDriver | None) -> None:
    package = SimpleNamespace(__version__=version, __path__=[])
    for name, module in (("", package), (".bindings", package), (".bindings.driver", driver)):
        monkeypatch.setitem(sys.modules, f"cuda{name}", module)  # type: ignore[arg-type]


def test_cuda_python(monkeypatch: pytest.MonkeyPatch, gpu: FakeDriver) -> None:
    fake_bindings(monkeypatch, "13.0.3", gpu)
    assert CudaDriver().api is gpu
    for version, driver, message in (
        ("13.0.3", None, r"cannot be imported.*install bullet-graph\[cuda\]"),
        ("12.9.4", gpu, "13 or later, but found 12.9.4"),
    ):
        fake_bindings(monkeypatch, version, driver)
        with pytest.raises(PartitionError, match=message):
            CudaDriver()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_the_kernel_assembles(tmp_path: Path, arch: str) -> None:
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        pytest.skip("Triton, whose package has an assembler, is not installed")
    ptxas = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    source = tmp_path / "probe.ptx"
    source.write_bytes(PTX.rstrip(b"\0"))
    subprocess.run([ptxas, f"-arch={arch}", source, "-o", tmp_path / "probe.cubin"], check=True)
    assert f".maxntid {THREADS_PER_BLOCK}, 1, 1".encode() in PTX
