"""The stream-mask back end over a fake libcuda."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from fakes.fake_driver import CUresult, FakeDriver, fake_probe
from fakes.fake_streams import OBJECT_BYTES, RELEASE, FakeLibcuda, object_bytes

from bullet_graph import _smctrl
from bullet_graph.errors import PartitionError
from bullet_graph.partition import offsets, smctrl
from bullet_graph.partition.backend import verify
from bullet_graph.partition.masks import LANES, WHOLE_GPU, GpcLayout, SmPartition
from bullet_graph.partition.offsets import DriverId, remember
from bullet_graph.partition.probe import SmidProbe
from bullet_graph.partition.smctrl import SmctrlBackend, identify_driver

DRIVER = DriverId(13000, RELEASE, "x86_64")
PARTITION = SmPartition(decode_tpcs=16, prefill_tpcs=50)
LAYOUT: GpcLayout = (*((gpc, gpc + 22, gpc + 44) for gpc in range(22)),)
EMPTY = bytes(OBJECT_BYTES)
Open = Callable[..., SmctrlBackend]


@pytest.fixture(autouse=True)
def on_x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bullet_graph.partition.smctrl.machine", lambda: "x86_64")


@pytest.fixture
def gpu(libcuda: FakeLibcuda) -> FakeDriver:
    libcuda.answer(13000)
    return FakeDriver(libcuda=libcuda)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "offsets.json"


@pytest.fixture
def opened(gpu: FakeDriver, libcuda: FakeLibcuda, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.setattr(smctrl, "identify_driver", partial(identify_driver, libcuda.path))
    monkeypatch.setattr(offsets, "cache_file", lambda: cache)

    def open_backend(layout: GpcLayout | None = None) -> SmctrlBackend:
        return SmctrlBackend(fake_probe(gpu), layout=layout)

    return open_backend


def test_each_lane_runs_on_its_own_tpcs(gpu: FakeDriver, probe: SmidProbe, opened: Open) -> None:
    backend = opened()
    assert (backend.name, backend.num_sms, backend.granularity_sms) == ("smctrl", 132, 2)
    assert backend.offset == 0x51C
    decode, prefill = (backend.stream(lane, PARTITION) for lane in LANES)
    assert probe.run(decode) == backend.expected_sms("decode", PARTITION) == frozenset(range(32))
    assert probe.run(prefill) == backend.expected_sms("prefill", PARTITION) == frozenset(range(32, 132))
    assert [gpu.streams[stream].priority for stream in (decode, prefill)] == [-5, 0], "decode is urgent"
    assert verify(backend, PARTITION, probe)["decode"] == frozenset(range(32))


def test_a_lane_keeps_its_stream_and_changes_its_mask(probe: SmidProbe, opened: Open) -> None:
    backend = opened()
    prefill = backend.stream("prefill", PARTITION)
    untouched = object_bytes(prefill)
    stream = backend.stream("decode", PARTITION)
    assert backend.stream("decode", SmPartition(4, 62)) == stream
    assert probe.run(stream) == frozenset(range(8))
    assert backend.stream("decode", WHOLE_GPU) == stream
    assert probe.run(stream) == backend.expected_sms("decode", WHOLE_GPU) == frozenset(range(132))
    assert object_bytes(stream) == EMPTY
    assert object_bytes(prefill) == untouched


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (SmPartition(2, 64), "the decode lane's SMs .* no whole group of 6 SMs"),
        (SmPartition(64, 2), "the prefill lane's SMs .* no whole group of 6 SMs"),
        (SmPartition(0, 66), "1 to 66 TPCs"),
        (SmPartition(1, 67), "1 to 66 TPCs"),
    ],
)
def test_masks_that_follow_the_gpcs_and_a_partition_that_cannot_be_made(
    probe: SmidProbe, opened: Open, partition: SmPartition, message: str
) -> None:
    backend = opened(LAYOUT)
    assert probe.run(backend.stream("decode", SmPartition(4, 62))) == {0, 1, 44, 45, 88, 89, 2, 3}
    for ask in (backend.stream, backend.expected_sms):
        with pytest.raises(PartitionError, match=message):
            ask("decode", partition)


def test_closing_clears_the_masks_and_gives_everything_back(gpu: FakeDriver, opened: Open) -> None:
    """The driver makes new streams of old ones: whoever gets them next would be confined without knowing it."""
    backend = opened()
    streams = [backend.stream(lane, PARTITION) for lane in LANES]
    assert all(object_bytes(stream) != EMPTY for stream in streams)
    backend.close()
    assert all(object_bytes(stream) == EMPTY for stream in streams)
    assert (gpu.live, gpu.retained) == ({}, 0)


@pytest.mark.parametrize(
    "calibrated", [None, DriverId(13990, "999.12.35", "x86_64"), DriverId(13990, RELEASE, "aarch64")]
)
def test_an_unknown_driver_is_refused_before_anything_is_written(
    gpu: FakeDriver, libcuda: FakeLibcuda, cache: Path, opened: Open, calibrated: DriverId | None
) -> None:
    gpu.fail["cuStreamCreateWithPriority"] = CUresult.CUDA_ERROR_INVALID_VALUE
    libcuda.answer(13990)
    if calibrated is not None:
        remember(calibrated, 0x600, cache)
    with pytest.raises(PartitionError, match=rf"{RELEASE} .*13990.*`bullet-graph doctor --calibrate`"):
        opened()
    assert (gpu.live, gpu.retained) == ({}, 0)


def test_a_calibrated_driver_is_trusted(
    gpu: FakeDriver, probe: SmidProbe, libcuda: FakeLibcuda, cache: Path, opened: Open
) -> None:
    remember(DRIVER, 0x604, cache)
    backend = opened()
    assert backend.offset == 0x604, "a calibration goes before the table"
    with pytest.raises(PartitionError, match=r"exactly SMs 0-31, but .* ran on SMs"):
        verify(backend, PARTITION, probe)
    libcuda.answer(13990)
    gpu.mask_offset = 0x600
    remember(DriverId(13990, RELEASE, "x86_64"), 0x600, cache)
    assert probe.run(opened().stream("decode", PARTITION)) == frozenset(range(32))


def test_streams_of_one_mask_are_refused(gpu: FakeDriver, probe: SmidProbe, libcuda: FakeLibcuda, opened: Open) -> None:
    gpu.shared = libcuda.stream()
    with closing(opened()) as backend, pytest.raises(PartitionError, match=r"the decode lane .* must run on exactly"):
        verify(backend, PARTITION, probe)
    # Left as found, and given back.
    probe.close()
    assert object_bytes(gpu.shared) == EMPTY
    assert (gpu.live, gpu.retained) == ({}, 0)


def test_a_mask_too_short_for_the_gpu_or_that_does_not_stay_as_written(
    gpu: FakeDriver, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened()
    monkeypatch.setattr(_smctrl, "get_mask", lambda *_: (1, 0, 0))
    expected = r"enabled=1, disable_low=18446744073709486080, .* but .*disable_low=0, .* was read back"
    with pytest.raises(PartitionError, match=expected):
        backend.stream("decode", PARTITION)
    gpu.num_sms = 2 * 129
    with pytest.raises(PartitionError, match="mask has 128 bits, but the GPU has 129 TPCs"):
        opened().stream("decode", WHOLE_GPU)


# Which driver


def test_the_release_is_in_the_kernels_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "version"
    monkeypatch.setattr("bullet_graph.partition.smctrl._KERNEL_MODULE", module)
    libcuda = FakeLibcuda(tmp_path, release="1.1")
    with pytest.raises(PartitionError, match=r"the driver's release, which .*libcuda\.so\.1\.1 and"):
        identify_driver(libcuda.path)
    for text in (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  999.12.34  Release Build  (x)  Wed Jan 1 2025\n",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  999.12.34  Tue\nGCC version:  gcc version 12.2.0\n",
    ):
        module.write_text(text)
        assert identify_driver(libcuda.path) == DRIVER


def test_the_release_is_in_the_librarys_name(libcuda: FakeLibcuda, tmp_path: Path) -> None:
    libcuda.answer(13000)
    link = tmp_path / "libcuda.so.1"
    link.symlink_to(libcuda.path)
    assert identify_driver(link) == DRIVER
    with pytest.raises(PartitionError, match=r"need an NVIDIA driver, but found no driver: .*none"):
        identify_driver(tmp_path / "none.so")
    libcuda.answer(0, result=100)
    with pytest.raises(PartitionError, match="CUDA error 100"):
        identify_driver(libcuda.path)
