"""Reading a captured graph through the driver: what each node is, and what its functions are."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.graph_persistence.saved import (
    SavedEdge,
    SavedEmpty,
    SavedFunction,
    SavedGraph,
    SavedKernel,
    SavedMemcpy,
    SavedMemset,
    SavedNode,
)
from bullet_graph.errors import CacheError, PartitionError
from bullet_graph.partition.driver import CudaDriver

LAUNCH_ATTRIBUTES = (1, 2, 4, 5, 8, 9, 10, 11, 14)
"""``CUlaunchAttributeID`` of what nodes keep; 13 (updatable from the device) holds a handle of its process."""
ATTRIBUTE_BYTES = 64
MEMCPY_BYTES = 200
_FUNCTION_ATTRIBUTES = range(16)
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2
_MOST_PARAMETERS = 1024


def _succeeds(driver: CudaDriver, name: str, *arguments: Any) -> Any:
    """As ``driver.call``, but None where the driver refuses: for questions whose answer may be no."""
    try:
        return driver.call(name, *arguments)
    except PartitionError:
        return None


def name_of(driver: CudaDriver, function: Any) -> str:
    """The (mangled) name of a CUfunction, "" where the driver does not tell."""
    found = _succeeds(driver, "cuFuncGetName", function)
    if found is None:
        # The handle may be a CUkernel's: the runtime's launches take either.
        found = _succeeds(driver, "cuKernelGetName", driver.api.CUkernel(int(function)))
    return "" if found is None else str(found.decode())


def layout_of(driver: CudaDriver, function: Any) -> tuple[tuple[int, int], ...]:
    """(offset, bytes) of each parameter of a CUfunction; empty too where the driver does not tell."""
    layout: list[tuple[int, int]] = []
    for index in range(_MOST_PARAMETERS):
        found = _succeeds(driver, "cuFuncGetParamInfo", function, index)
        if found is None and not layout:
            found = _succeeds(driver, "cuKernelGetParamInfo", driver.api.CUkernel(int(function)), index)
        if found is None:
            break
        layout.append((int(found[0]), int(found[1])))
    return tuple(layout)


def describe(driver: CudaDriver, function: Any, image: str = "") -> SavedFunction:
    """What of a CUfunction can be saved."""
    attributes = []
    for number in _FUNCTION_ATTRIBUTES:
        value = _succeeds(driver, "cuFuncGetAttribute", driver.api.CUfunction_attribute(number), function)
        if value is not None:
            attributes.append((number, int(value)))
    return SavedFunction(name_of(driver, function), image, layout_of(driver, function), tuple(attributes))


def siblings(driver: CudaDriver, function: Any) -> list[Any]:
    """All functions of the module that holds this one, as CUfunctions."""
    module = driver.call("cuFuncGetModule", function)
    count = int(driver.call("cuModuleGetFunctionCount", module))
    return list(driver.call("cuModuleEnumerateFunctions", count, module))


@dataclass
class Walk:
    """A graph as it was read, with what cannot be saved beside it.

    Attributes:
        graph: the value.
        functions: the CUfunction of each saved function.
        contexts: each kernel node's CUcontext, by number of nodes.
        from_buffer: kernels whose parameters were given as one buffer (``extra``).
        kernel_handles: nodes that name a CUkernel and no CUfunction.
        node_types: by name.
    """

    graph: SavedGraph
    functions: list[Any]
    contexts: dict[int, int] = field(default_factory=dict)
    from_buffer: int = 0
    kernel_handles: int = 0
    node_types: dict[str, int] = field(default_factory=dict)


class Walker:
    """Reads graphs of the current context.

    Args:
        driver: the driver API.
        image_of: SHA-256 of the cubin that holds a function, "" where unknown.
    """

    def __init__(self, driver: CudaDriver, image_of: Callable[[Any], str] = lambda _: "") -> None:
        self._driver = driver
        self._image_of = image_of
        self._index: dict[int, int] = {}
        self._functions: list[SavedFunction] = []
        self._handles: list[Any] = []
        self._defaults: dict[int, dict[int, bytes]] = {}

    def read(self, raw_graph: int) -> Walk:
        """The graph of a CUgraph handle; functions are numbered anew for each graph.

        Raises:
            CacheError: it has a node that cannot be saved.
            PartitionError: the driver refused.
        """
        call, api = self._driver.call, self._driver.api
        self._index, self._functions, self._handles, self._defaults = {}, [], [], {}
        graph = api.CUgraph(raw_graph)
        _, count = call("cuGraphGetNodes", graph)
        handles, _ = call("cuGraphGetNodes", graph, count)
        walk = Walk(SavedGraph((), (), ()), self._handles)
        nodes = [self._node(handle, walk) for handle in handles]
        numbers = {int(handle): index for index, handle in enumerate(handles)}
        *_, num_edges = call("cuGraphGetEdges", graph)
        sources, targets, data, _ = call("cuGraphGetEdges", graph, num_edges)
        edges = [
            SavedEdge(numbers[int(a)], numbers[int(b)], int(d.from_port), int(d.to_port), int(d.type))
            for a, b, d in zip(sources, targets, data, strict=True)
        ]
        walk.graph = SavedGraph(tuple(self._functions), tuple(nodes), tuple(edges))
        return walk

    def _node(self, handle: Any, walk: Walk) -> SavedNode:
        call, types = self._driver.call, self._driver.api.CUgraphNodeType
        kind = types(int(call("cuGraphNodeGetType", handle)))
        name = kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
        walk.node_types[name] = walk.node_types.get(name, 0) + 1
        if kind == types.CU_GRAPH_NODE_TYPE_KERNEL:
            return self._kernel(handle, walk)
        if kind == types.CU_GRAPH_NODE_TYPE_MEMSET:
            found = call("cuGraphMemsetNodeGetParams", handle)
            return SavedMemset(
                int(found.dst),
                int(found.elementSize),
                int(found.value),
                int(found.width),
                int(found.height),
                int(found.pitch),
            )
        if kind == types.CU_GRAPH_NODE_TYPE_MEMCPY:
            found = call("cuGraphMemcpyNodeGetParams", handle)
            return SavedMemcpy(ctypes.string_at(found.getPtr(), MEMCPY_BYTES))
        if kind == types.CU_GRAPH_NODE_TYPE_EMPTY:
            return SavedEmpty()
        raise CacheError(f"a node of type {kind.name} cannot be saved: capture without it")

    def _kernel(self, handle: Any, walk: Walk) -> SavedKernel:
        call = self._driver.call
        found = call("cuGraphKernelNodeGetParams", handle)
        # A handle of its own: what the bindings lend is a view of the parameters, which are gone after this call.
        function = self._driver.api.CUfunction(int(found.func))
        if not int(function):
            walk.kernel_handles += 1
            function = call("cuKernelGetFunction", found.kern)
        walk.from_buffer += not int(found.kernelParams or 0) and bool(int(found.extra or 0))
        walk.contexts[int(found.ctx)] = walk.contexts.get(int(found.ctx), 0) + 1
        number = self._number(function)
        if number not in self._defaults:
            self._defaults[number] = self._fresh_attributes(found)
        attributes = tuple(
            (key, value)
            for key, value in self._attributes(handle).items()
            if value != self._defaults[number].get(key, bytes(ATTRIBUTE_BYTES))
        )
        return SavedKernel(
            number,
            (int(found.gridDimX), int(found.gridDimY), int(found.gridDimZ)),
            (int(found.blockDimX), int(found.blockDimY), int(found.blockDimZ)),
            int(found.sharedMemBytes),
            _arguments(found, self._functions[number]),
            attributes,
        )

    def _number(self, function: Any) -> int:
        key = int(function)
        if key not in self._index:
            self._index[key] = len(self._functions)
            self._functions.append(describe(self._driver, function, self._image_of(function)))
            self._handles.append(function)
        return self._index[key]

    def _attributes(self, handle: Any) -> dict[int, bytes]:
        found = {}
        for number in LAUNCH_ATTRIBUTES:
            value = _succeeds(
                self._driver,
                "cuGraphKernelNodeGetAttribute",
                handle,
                self._driver.api.CUlaunchAttributeID(number),
            )
            if value is not None:
                found[number] = ctypes.string_at(value.getPtr(), ATTRIBUTE_BYTES)
        return found

    def _fresh_attributes(self, parameters: Any) -> dict[int, bytes]:
        """Those of a node that was just made with these parameters: they need not be saved."""
        graph = self._driver.call("cuGraphCreate", 0)
        try:
            node = _succeeds(self._driver, "cuGraphAddKernelNode", graph, None, 0, parameters)
            return {} if node is None else self._attributes(node)
        finally:
            self._driver.call("cuGraphDestroy", graph)


def _arguments(parameters: Any, function: SavedFunction) -> bytes:
    size = max((offset + num_bytes for offset, num_bytes in function.layout), default=0)
    array, extra = int(parameters.kernelParams or 0), int(parameters.extra or 0)
    if array and not size:
        raise CacheError(
            f"{function.name} was launched with parameters, but the driver tells no layout: it cannot be saved"
        )
    if array:
        data = bytearray(size)
        pointers = (ctypes.c_void_p * len(function.layout)).from_address(array)
        for pointer, (offset, num_bytes) in zip(pointers, function.layout, strict=True):
            data[offset : offset + num_bytes] = ctypes.string_at(pointer, num_bytes)
        return bytes(data)
    if extra:
        settings = dict(_pairs(extra))
        given = ctypes.c_size_t.from_address(settings[_BUFFER_SIZE]).value
        data = bytearray(ctypes.string_at(settings[_BUFFER_POINTER], given))
        return bytes(data.ljust(size, b"\0"))
    if size:
        raise CacheError(f"{function.name} takes {size} bytes of parameters, but its node holds none")
    return b""


def _pairs(address: int) -> list[tuple[int, int]]:
    """The (name, value) pairs of an ``extra`` list, which ends with a zero."""
    found = []
    while key := ctypes.c_size_t.from_address(address).value:
        found.append((key, ctypes.c_size_t.from_address(address + 8).value))
        address += 16
    return found
