"""Stand-ins for a GPU, shared by the tests of partitions."""

import pytest
from fakes.fake_driver import FakeDriver
from fakes.fake_streams import FakeLibcuda


@pytest.fixture
def gpu() -> FakeDriver:
    return FakeDriver()


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> FakeLibcuda:
    return FakeLibcuda(tmp_path_factory.mktemp("libcuda"))
