"""Reading a captured graph, over a driver that lends its handles as cuda-bindings does."""

import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bench.graph_persistence.walk import Walker
from bullet_graph.partition.driver import CudaDriver

FUNCTIONS = (0x1100, 0x2200, 0x1100)


class Status(enum.Enum):
    """What the driver answers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class NodeType(enum.IntEnum):
    """The only kind of node here."""

    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_EMPTY = 5


class Handle:
    """A handle of its own, or a view of memory that is another's."""

    def __init__(self, value: int | Callable[[], int]) -> None:
        self._value = value

    def __int__(self) -> int:
        return self._value if isinstance(self._value, int) else self._value()


class Driver:
    """A graph of three kernel nodes without parameters, two of them of one function.

    A node's parameters lie in memory that the next call takes again, and so does the function handle in them.
    """

    CUresult, CUgraphNodeType = Status, NodeType
    CUgraph = CUkernel = CUfunction = Handle

    def __init__(self) -> None:
        self.lent = 0

    @staticmethod
    def CUlaunchAttributeID(number: int) -> int:  # noqa: N802 - the driver's name
        return number

    @staticmethod
    def CUfunction_attribute(number: int) -> int:  # noqa: N802 - the driver's name
        return number

    def cuGraphKernelNodeGetParams(self, node: Handle) -> tuple[Status, Any]:  # noqa: N802 - the driver's name
        self.lent = FUNCTIONS[int(node)]
        ones = {
            f"{what}Dim{axis}": 1
            for what, axis in [(a, b) for a in ("grid", "block") for b in ("X", "Y", "Z")]
        }
        return Status.CUDA_SUCCESS, SimpleNamespace(
            func=Handle(lambda: self.lent), kern=0, ctx=7, kernelParams=0, extra=0, sharedMemBytes=0, **ones
        )

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        answers: dict[str, tuple[Any, ...]] = {
            "cuInit": (),
            "cuGraphGetNodes": ([Handle(i) for i in range(len(FUNCTIONS))], len(FUNCTIONS)),
            "cuGraphNodeGetType": (0,),
            "cuGraphGetEdges": ([], [], [], 0),
            "cuGraphCreate": (Handle(1),),
            "cuGraphDestroy": (),
        }

        def answer(*arguments: Any) -> tuple[Any, ...]:
            if name == "cuFuncGetName":
                return Status.CUDA_SUCCESS, f"f{int(arguments[0]):x}".encode()
            if name not in answers:
                return (Status.CUDA_ERROR_INVALID_VALUE,)
            return Status.CUDA_SUCCESS, *answers[name]

        return answer


def test_handles_outlive_the_parameters_they_came_in() -> None:
    walk = Walker(CudaDriver(Driver())).read(5)
    assert [function.name for function in walk.graph.functions] == ["f1100", "f2200"]
    assert [int(function) for function in walk.functions] == [0x1100, 0x2200]
