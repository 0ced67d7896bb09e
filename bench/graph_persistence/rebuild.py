"""Making a graph again from its saved value, with functions of this process."""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.graph_persistence.saved import (
    SavedEmpty,
    SavedFunction,
    SavedGraph,
    SavedKernel,
    SavedMemcpy,
    SavedMemset,
    SavedNode,
)
from bullet_graph.partition.driver import CudaDriver

USE_NODE_PRIORITY = 8
"""``CUgraphInstantiate_flags``: as torch instantiates its graphs."""

# CU_FUNC_ATTRIBUTE_*: a process sets these on its own function, so another must set them again.
_MAX_DYNAMIC_SHARED, _CARVEOUT, _NON_PORTABLE_CLUSTER = 8, 9, 14


def set_attributes(driver: CudaDriver, function: Any, saved: SavedFunction) -> None:
    """Give a function of this process what the saving process had set on its own."""
    wanted = dict(saved.attributes)
    for number, unset in ((_MAX_DYNAMIC_SHARED, 0), (_CARVEOUT, -1), (_NON_PORTABLE_CLUSTER, 0)):
        value = wanted.get(number, unset)
        if value == unset:
            continue
        attribute = driver.api.CUfunction_attribute(number)
        if int(driver.call("cuFuncGetAttribute", attribute, function)) != value:
            driver.call("cuFuncSetAttribute", function, attribute, value)


@dataclass(frozen=True, slots=True)
class KernelParameters:
    """A ``CUDA_KERNEL_NODE_PARAMS`` and the memory that it points into, which must live until it was used."""

    value: Any
    keep: tuple[Any, ...]


def kernel_parameters(
    driver: CudaDriver,
    saved: SavedKernel,
    layout: tuple[tuple[int, int], ...],
    *,
    function: Any = None,
    kernel: Any = None,
    context: Any = None,
) -> KernelParameters:
    """The node parameters of a saved kernel.

    Args:
        layout: of its function.
        function: CUfunction to launch, which belongs to a context.
        kernel: CUkernel to launch instead, in ``context``.
        context: CUcontext, None for the current one.
    """
    value = driver.api.CUDA_KERNEL_NODE_PARAMS()
    if function is not None:
        value.func = function
    if kernel is not None:
        value.kern = kernel
    if context is not None:
        value.ctx = context
    value.gridDimX, value.gridDimY, value.gridDimZ = saved.grid
    value.blockDimX, value.blockDimY, value.blockDimZ = saved.block
    value.sharedMemBytes = saved.shared_bytes
    data = ctypes.create_string_buffer(saved.arguments, max(1, len(saved.arguments)))
    start = ctypes.addressof(data)
    array = (ctypes.c_void_p * max(1, len(layout)))(*(start + offset for offset, _ in layout))
    if layout:
        value.kernelParams = ctypes.addressof(array)
    return KernelParameters(value, (data, array))


def add_kernel(
    driver: CudaDriver, graph: Any, parameters: KernelParameters, attributes: Sequence[tuple[int, bytes]]
) -> Any:
    """A new kernel node without dependencies."""
    node = driver.call("cuGraphAddKernelNode", graph, None, 0, parameters.value)
    for number, raw in attributes:
        value = driver.api.CUkernelNodeAttrValue()
        ctypes.memmove(value.getPtr(), raw, len(raw))
        attribute = driver.api.CUlaunchAttributeID(number)
        driver.call("cuGraphKernelNodeSetAttribute", node, attribute, value)
    return node


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A graph of this process.

    Attributes:
        graph: CUgraph.
        nodes: in the saved order.
        executable: CUgraphExec.
        milliseconds: of adding nodes, adding edges, and instantiating.
    """

    graph: Any
    nodes: tuple[Any, ...]
    executable: Any
    milliseconds: dict[str, float]

    def destroy(self, driver: CudaDriver) -> None:
        """Free both."""
        driver.call("cuGraphExecDestroy", self.executable)
        driver.call("cuGraphDestroy", self.graph)


def rebuild(driver: CudaDriver, saved: SavedGraph, functions: Sequence[Any]) -> Rebuilt:
    """Make the graph and its executable in the current context.

    Args:
        functions: a CUfunction for each of the saved graph's.

    Raises:
        PartitionError: the driver refused.
    """
    call, api = driver.call, driver.api
    start = time.perf_counter()
    graph = call("cuGraphCreate", 0)
    context = call("cuCtxGetCurrent")
    nodes = tuple(_add(driver, graph, node, saved, functions, context) for node in saved.nodes)
    nodes_done = time.perf_counter()
    if saved.edges:
        data = []
        for edge in saved.edges:
            one = api.CUgraphEdgeData()
            one.from_port, one.to_port, one.type = edge.from_port, edge.to_port, edge.kind
            data.append(one)
        sources = [nodes[edge.source] for edge in saved.edges]
        targets = [nodes[edge.target] for edge in saved.edges]
        call("cuGraphAddDependencies", graph, sources, targets, data, len(data))
    edges_done = time.perf_counter()
    executable = call("cuGraphInstantiate", graph, USE_NODE_PRIORITY)
    end = time.perf_counter()
    times = {
        "nodes": nodes_done - start,
        "edges": edges_done - nodes_done,
        "instantiate": end - edges_done,
    }
    return Rebuilt(graph, nodes, executable, {name: round(1e3 * s, 3) for name, s in times.items()})


def _add(
    driver: CudaDriver,
    graph: Any,
    node: SavedNode,
    saved: SavedGraph,
    functions: Sequence[Any],
    context: Any,
) -> Any:
    call, api = driver.call, driver.api
    if isinstance(node, SavedKernel):
        layout = saved.functions[node.function].layout
        parameters = kernel_parameters(driver, node, layout, function=functions[node.function])
        return add_kernel(driver, graph, parameters, node.attributes)
    if isinstance(node, SavedMemset):
        value = api.CUDA_MEMSET_NODE_PARAMS()
        value.dst, value.elementSize, value.value = node.destination, node.element_bytes, node.value
        value.width, value.height, value.pitch = node.width, node.height, node.pitch
        return call("cuGraphAddMemsetNode", graph, None, 0, value, context)
    if isinstance(node, SavedMemcpy):
        value = api.CUDA_MEMCPY3D()
        ctypes.memmove(value.getPtr(), node.parameters, len(node.parameters))
        return call("cuGraphAddMemcpyNode", graph, None, 0, value, context)
    assert isinstance(node, SavedEmpty)
    return call("cuGraphAddEmptyNode", graph, None, 0)
