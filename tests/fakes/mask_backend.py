"""A back end whose masks can be wrong, on the fake GPU."""

from fakes.fake_driver import FakeDriver

from bullet_graph.partition.driver import CudaDriver
from bullet_graph.partition.masks import LANES, SMS_PER_TPC, Lane, SmPartition, lane_masks
from bullet_graph.partition.probe import SmidProbe


class MaskBackend:
    """Binds masks by telling the fake GPU.

    Attributes:
        planted: SMs that a lane's stream is bound to instead of the right ones.
        closed: whether :meth:`close` was called.
    """

    name = "fake"
    granularity_sms = SMS_PER_TPC

    def __init__(self, probe: SmidProbe) -> None:
        self.num_sms = probe.num_sms
        self.planted: dict[Lane, frozenset[int]] = {}
        self.closed = False
        self._probe = probe
        self._streams = {lane: probe.driver.create_stream() for lane in LANES}

    @property
    def gpu(self) -> FakeDriver:
        gpu: FakeDriver = self._probe.driver.api
        return gpu

    def stream(self, lane: Lane, partition: SmPartition) -> int:
        stream = self._streams[lane]
        self.gpu.live[stream].sms = self.planted.get(lane, self.expected_sms(lane, partition))
        return stream

    def expected_sms(self, lane: Lane, partition: SmPartition) -> frozenset[int]:
        return lane_masks(partition, num_tpcs=self.num_sms // SMS_PER_TPC)[lane].sms

    def bound_sms(self, lane: Lane) -> frozenset[int]:
        """What the lane's stream is bound to at this moment."""
        sms: frozenset[int] = self.gpu.live[self._streams[lane]].sms
        return sms

    def share_a_stream(self) -> None:
        self._streams["prefill"] = self._streams["decode"]

    def close(self) -> None:
        for stream in set(self._streams.values()):
            self._probe.driver.call("cuStreamDestroy", stream)
        self._probe.close()
        self.closed = True


def fake_probe(gpu: FakeDriver) -> SmidProbe:
    return SmidProbe(driver=CudaDriver(gpu))
