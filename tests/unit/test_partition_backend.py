"""Green contexts, no partitions, and the choice between back ends, on a fake GPU."""

from collections.abc import Callable

import pytest
from fakes.fake_driver import CUresult, FakeDriver
from fakes.mask_backend import MaskBackend, fake_probe

from bullet_graph.errors import PartitionError
from bullet_graph.partition.backend import OPENERS, NoneBackend, PartitionBackend, open_backend, verify
from bullet_graph.partition.green import GreenBackend
from bullet_graph.partition.masks import LANES, WHOLE_GPU, SmPartition, TpcMask, sm_ranges
from bullet_graph.partition.probe import SmidProbe

ALL = frozenset(range(132))
SPLITS = [SmPartition(tpcs, 66 - tpcs) for tpcs in (8, 12, 16, 24, 32, 48)]


@pytest.fixture
def gpu() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def green(gpu: FakeDriver) -> GreenBackend:
    return GreenBackend(fake_probe(gpu))


# Green contexts


def test_green_lanes(gpu: FakeDriver, green: GreenBackend) -> None:
    assert (green.name, green.num_sms, green.granularity_sms) == ("green", 132, 8)
    partition = SmPartition(16, 50)
    decode, prefill = (green.expected_sms(lane, partition) for lane in LANES)
    assert sm_ranges(decode) == "0-7, 16-23, 32-39, 48-55"
    assert prefill == ALL - decode
    verify(green, partition, fake_probe(gpu))


def test_decode_is_urgent(gpu: FakeDriver, green: GreenBackend) -> None:
    for partition in (WHOLE_GPU, SmPartition(16, 50)):
        priorities = [gpu.live[green.stream(lane, partition)].priority for lane in LANES]
        assert priorities == [-5, 0]


@pytest.mark.parametrize("partition", [*SPLITS, WHOLE_GPU, SmPartition(66, None), SmPartition(16, None)])
def test_green_partitions_verify(gpu: FakeDriver, green: GreenBackend, partition: SmPartition) -> None:
    verified = verify(green, partition, fake_probe(gpu))
    assert len(verified.decode_sms) == 2 * (partition.decode_tpcs or 66)
    assert len(verified.prefill_sms) == 2 * (partition.prefill_tpcs or 66)


def test_green_lanes_that_leave_sms_out_or_overlap(gpu: FakeDriver, green: GreenBackend) -> None:
    assert verify(green, SmPartition(8, 50), fake_probe(gpu)).together
    overlapping = verify(green, SmPartition(32, 50), fake_probe(gpu))
    assert len(overlapping.decode_sms & overlapping.prefill_sms) == 32


def test_a_green_stream_is_made_once(gpu: FakeDriver, green: GreenBackend) -> None:
    stream = green.stream("decode", SmPartition(16, 50))
    live = len(gpu.live)
    assert green.stream("decode", SmPartition(16, 50)) == stream
    assert green.stream("decode", SmPartition(16, None)) == stream
    assert len(gpu.live) == live
    assert green.stream("decode", SmPartition(8, 58)) != stream


@pytest.mark.parametrize(
    ("partition", "lane", "nearest"),
    [
        (SmPartition(50, None), "decode", r"96 \(48 TPCs\) or 104 \(52 TPCs\)"),
        (SmPartition(None, 57), "prefill", r"108 \(54 TPCs\) or 116 \(58 TPCs\)"),
        (SmPartition(None, 65), "prefill", r"116 \(58 TPCs\) or 124 \(62 TPCs\)"),
        (SmPartition(0, None), "decode", r"8 \(4 TPCs\) or 16 \(8 TPCs\)"),
        (SmPartition(-4, None), "decode", r"8 \(4 TPCs\) or 16 \(8 TPCs\)"),
        (SmPartition(80, None), "decode", r"120 \(60 TPCs\) or 128 \(64 TPCs\)"),
        (SmPartition(None, 0), "prefill", r"4 \(2 TPCs\) or 12 \(6 TPCs\)"),
    ],
)
def test_a_size_off_the_granularity(
    green: GreenBackend, partition: SmPartition, lane: str, nearest: str
) -> None:
    for ask in (green.stream, green.expected_sms):
        with pytest.raises(PartitionError, match=f"steps of 8, but the {lane} lane.*choose {nearest}"):
            ask("decode" if lane == "decode" else "prefill", partition)


def test_a_driver_without_the_granularity(gpu: FakeDriver) -> None:
    gpu.granularity = 0
    with pytest.raises(PartitionError, match=r"reports their granularity \(CUDA 13.0 or later\)"):
        GreenBackend(fake_probe(gpu))
    assert (gpu.live, gpu.retained) == ({}, 0)


def test_a_green_context_of_another_size(gpu: FakeDriver, green: GreenBackend) -> None:
    gpu.green_extra = (100, 101)
    with pytest.raises(
        PartitionError, match=r"16 SMs was asked for.*one of 16 and its work ran on 18 \(SMs "
    ):
        green.stream("decode", SmPartition(8, 58))
    green.close()
    assert (gpu.live, gpu.retained) == ({}, 0)


def test_the_gpc_layout_follows_the_green_contexts(gpu: FakeDriver, green: GreenBackend) -> None:
    live = len(gpu.live)
    layout = green.gpc_layout()
    assert len(gpu.live) == live
    assert layout[:2] == ((0, 8, 16, 24), (1, 9, 17, 25))
    assert layout[-1] == (64, 65)
    for tpcs in (4, 16, 48, 64):
        mask = TpcMask.in_order(tpcs, layout)
        assert mask.sms == green.expected_sms("decode", SmPartition(tpcs, None))


def test_a_gpc_layout_of_half_tpcs(gpu: FakeDriver, green: GreenBackend) -> None:
    gpu.busy_sms = frozenset({0})
    gpu.green_extra = (131,)
    with pytest.raises(PartitionError, match="whole TPCs to be followed by a mask, but has SMs 1, 16-17"):
        green.gpc_layout()


@pytest.mark.parametrize("name", ["cuDeviceGetDevResource", "cuStreamCreateWithPriority"])
def test_a_driver_without_green_contexts(gpu: FakeDriver, name: str) -> None:
    gpu.fail = {name: CUresult.CUDA_ERROR_INVALID_VALUE}
    with pytest.raises(PartitionError, match=name):
        GreenBackend(fake_probe(gpu))
    assert (gpu.live, gpu.retained) == ({}, 0)


@pytest.mark.parametrize(
    "name",
    [
        "cuDevSmResourceSplitByCount",
        "cuDevResourceGenerateDesc",
        "cuGreenCtxCreate",
        "cuGreenCtxStreamCreate",
    ],
)
def test_a_green_call_that_fails(gpu: FakeDriver, green: GreenBackend, name: str) -> None:
    gpu.fail = {name: CUresult.CUDA_ERROR_INVALID_VALUE}
    with pytest.raises(PartitionError, match=name):
        green.stream("decode", SPLITS[0])
    gpu.fail = {}
    assert verify(green, SPLITS[0], fake_probe(gpu)).together


# No partitions


def test_none_has_the_whole_gpu_only(gpu: FakeDriver) -> None:
    backend = NoneBackend(fake_probe(gpu))
    assert (backend.name, backend.num_sms, backend.granularity_sms) == ("none", 132, 132)
    assert not verify(backend, WHOLE_GPU, fake_probe(gpu)).together
    for ask in (backend.stream, backend.expected_sms):
        with pytest.raises(PartitionError, match=r"none has the whole GPU only.*smctrl, green or auto"):
            ask("decode", SmPartition(16, 50))


@pytest.mark.parametrize("backend_type", [GreenBackend, NoneBackend])
def test_close_frees_everything(
    gpu: FakeDriver, backend_type: Callable[[SmidProbe], PartitionBackend]
) -> None:
    backend = backend_type(fake_probe(gpu))
    backend.stream("decode", WHOLE_GPU)
    if backend.name == "green":
        backend.stream("prefill", SPLITS[0])
    backend.close()
    assert (gpu.live, gpu.retained) == ({}, 0)


# The choice


class Openers:
    """The real back ends, but for stream masks a fake one, on one fake GPU."""

    def __init__(self, gpu: FakeDriver) -> None:
        self.gpu = gpu
        self.made: list[MaskBackend] = []
        self.planted: frozenset[int] | None = None
        self.broken = False

    def open(self, name: str, *partitions: SmPartition) -> tuple[PartitionBackend, str]:
        openers = {"smctrl": self._smctrl, "green": GreenBackend, "none": NoneBackend}
        return open_backend(name, partitions, openers=openers, make_probe=lambda _: fake_probe(self.gpu))

    def _smctrl(self, probe: SmidProbe) -> PartitionBackend:
        if self.broken:
            probe.close()
            raise PartitionError("there is no offset for this driver")
        self.made.append(MaskBackend(probe))
        if self.planted is not None:
            self.made[0].planted["decode"] = self.planted
        return self.made[0]


@pytest.fixture
def openers(gpu: FakeDriver) -> Openers:
    return Openers(gpu)


def test_the_names_of_the_back_ends() -> None:
    assert list(OPENERS) == ["smctrl", "green", "none"]


def test_auto_takes_the_first_that_verifies(gpu: FakeDriver, openers: Openers) -> None:
    backend, why = openers.open("auto", *SPLITS, WHOLE_GPU)
    assert backend is openers.made[0]
    assert why == "smctrl: 7 partitions verified"
    assert backend.stream("decode", SPLITS[0])
    backend.close()
    assert (gpu.live, gpu.retained) == ({}, 0)


def test_auto_passes_over_one_that_cannot_be_opened(gpu: FakeDriver, openers: Openers) -> None:
    openers.broken = True
    backend, why = openers.open("auto", *SPLITS)
    assert why == "green: 6 partitions verified; smctrl refused: there is no offset for this driver"
    verify(backend, SPLITS[0], fake_probe(gpu))


def test_auto_passes_over_one_that_does_not_hold(openers: Openers) -> None:
    openers.planted = frozenset(range(20))
    backend, why = openers.open("auto", SmPartition(8, 58))
    assert backend.name == "green"
    assert "smctrl refused: the decode lane of SmPartition(decode_tpcs=8, prefill_tpcs=58)" in why
    assert openers.made[0].closed


def test_auto_gives_up_with_every_reason(gpu: FakeDriver, openers: Openers) -> None:
    openers.broken = True
    with pytest.raises(PartitionError) as caught:
        openers.open("auto", SmPartition(7, 59))
    message = str(caught.value)
    assert (
        "auto has to hold SmPartition(decode_tpcs=7, prefill_tpcs=59), but smctrl refused: there" in message
    )
    assert "green refused: green contexts split this GPU's 132 SMs in steps of 8" in message
    assert "none refused: partition back end none has the whole GPU only" in message
    assert (gpu.live, gpu.retained) == ({}, 0)


@pytest.mark.parametrize("partitions", [(), (WHOLE_GPU,)])
def test_auto_opens_no_masks_for_the_whole_gpu(openers: Openers, partitions: tuple[SmPartition, ...]) -> None:
    assert openers.open("auto", *partitions)[0].name == "none"
    assert not openers.made


@pytest.mark.parametrize("name", ["smctrl", "green", "none"])
def test_a_named_back_end(openers: Openers, name: str) -> None:
    partitions = (WHOLE_GPU,) if name == "none" else SPLITS
    backend, why = openers.open(name, *partitions)
    assert why == f"{name}: {len(partitions)} partitions verified"
    assert backend.name == ("fake" if name == "smctrl" else name)


def test_a_named_back_end_is_not_replaced(gpu: FakeDriver, openers: Openers) -> None:
    openers.broken = True
    for name, why in (("smctrl", "there is no offset"), ("none", "has the whole GPU only")):
        with pytest.raises(
            PartitionError, match=f"--partition-backend {name} has to hold .*, but {name} refused.*{why}"
        ):
            openers.open(name, *SPLITS)
    assert (gpu.live, gpu.retained) == ({}, 0)


def test_an_unknown_back_end(openers: Openers) -> None:
    with pytest.raises(PartitionError, match="one of auto, smctrl, green, none, but found 'mps'"):
        openers.open("mps", WHOLE_GPU)


def test_a_failure_that_is_no_refusal_still_closes(
    gpu: FakeDriver, openers: Openers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bullet_graph.partition.backend.verify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        openers.open("auto", *SPLITS)
    assert (gpu.live, gpu.retained) == ({}, 0)
