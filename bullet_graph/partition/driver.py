"""The CUDA driver API through cuda-python, which is optional and imported at first use."""

import importlib
from contextlib import ExitStack
from typing import Any

from bullet_graph.errors import PartitionError
from bullet_graph.partition.masks import LANES, Lane

_MIN_CUDA_PYTHON = 13


class CudaDriver:
    """The CUDA driver API, by default ``cuda.bindings.driver``, with errors raised as PartitionError."""

    def __init__(self, api: Any = None) -> None:
        self.api = _import_driver() if api is None else api
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call ``name`` and return its results without the status: None, one value, or a tuple."""
        try:
            status, *values = getattr(self.api, name)(*arguments)
        except RuntimeError as error:
            # cuda-python raises this where libcuda or a function of it cannot be found.
            raise PartitionError(
                f"SM partitions need the NVIDIA driver's {name}, but it cannot be called ({error}): "
                "install or update the driver; `bullet-graph doctor` shows what this machine has"
            ) from error
        if status != self.api.CUresult.CUDA_SUCCESS:
            raise PartitionError(
                f"{name} had to succeed but returned {status.name}: "
                "`bullet-graph doctor` shows what works on this machine"
            )
        return values[0] if len(values) == 1 else tuple(values) or None

    def stream_priority(self, *, urgent: bool) -> int:
        """The highest stream priority of the current context, or the lowest."""
        lowest, highest = self.call("cuCtxGetStreamPriorityRange")
        return int(highest if urgent else lowest)

    def create_stream(self, *, urgent: bool = False) -> int:
        """A CUstream in the current context that does not synchronize with the default stream."""
        flags = self.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self.call("cuStreamCreateWithPriority", flags, self.stream_priority(urgent=urgent)))


def create_lane_streams(driver: CudaDriver, undo: ExitStack) -> dict[Lane, int]:
    """A CUstream for each lane, that of decode urgent; ``undo`` destroys them."""
    streams: dict[Lane, int] = {}
    for lane in LANES:
        streams[lane] = driver.create_stream(urgent=lane == "decode")
        undo.callback(driver.call, "cuStreamDestroy", streams[lane])
    return streams


def _import_driver() -> Any:
    try:
        version = importlib.import_module("cuda.bindings").__version__
        driver = importlib.import_module("cuda.bindings.driver")
        problem = None if int(version.split(".")[0]) >= _MIN_CUDA_PYTHON else f"found {version}"
    except ImportError as error:
        problem = f"it cannot be imported ({error})"
    if problem is not None:
        raise PartitionError(
            f"SM partitions need cuda-python {_MIN_CUDA_PYTHON} or later, but {problem}: install bullet-graph[cuda]"
        )
    return driver
