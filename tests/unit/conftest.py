"""Stand-ins for a GPU: of the tests of partitions, and of those whose kernels Triton's interpreter runs."""

from typing import Any

import numpy as np
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


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Triton's interpreter round to FP8 as torch and the GPU do.

    It loses the carry of a number that rounds up to the next power of two.
    """
    # Late, as Triton is published for Linux only, and the process that hands the tests out needs no torch.
    import torch  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.runtime import interpreter  # noqa: PLC0415

    convert = interpreter._convert_float

    def converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if target is not tl.float8e4nv:
            return convert(data, source, target, mode)
        kind = {tl.float32: np.float32, tl.float16: np.float16}[source]
        return torch.from_numpy(np.array(data).view(kind)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)
