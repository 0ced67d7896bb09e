"""Stand-ins for a GPU, shared by the tests of partitions."""

import pytest
from fakes.fake_driver import FakeDriver, fake_probe
from fakes.fake_streams import FakeLibcuda

from bullet_graph.partition.probe import SmidProbe


@pytest.fixture
def gpu() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def probe(gpu: FakeDriver) -> SmidProbe:
    return fake_probe(gpu)


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> FakeLibcuda:
    return FakeLibcuda(tmp_path_factory.mktemp("libcuda"))
