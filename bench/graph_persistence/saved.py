"""A CUDA graph as a frozen value: nodes, edges and the functions they launch, with no handle of any process in it.

What a process must add to make it a graph again: a handle for each function, and memory at the addresses that the
arguments hold, or a table of where those allocations lie now (``allocations.relocate``).
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from bullet_graph.errors import CacheError

FORMAT = 1
Dims: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SavedFunction:
    """A kernel function, by what another process can find it again.

    Attributes:
        name: as the driver gives it, mangled.
        image: SHA-256 of the cubin that holds it, "" where none is known.
        layout: (offset, bytes) of each parameter.
        attributes: by ``CUfunction_attribute``; those that can be set belong to the process and must be set again.
    """

    name: str
    image: str
    layout: tuple[tuple[int, int], ...]
    attributes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SavedKernel:
    """A kernel node.

    Attributes:
        function: index into the graph's functions.
        grid: blocks.
        block: threads.
        shared_bytes: dynamic shared memory.
        arguments: all parameters at the offsets of the function's layout.
        attributes: (``CUlaunchAttributeID``, its 64 bytes) of those that a fresh node would not have.
    """

    function: int
    grid: Dims
    block: Dims
    shared_bytes: int
    arguments: bytes
    attributes: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class SavedMemset:
    """A memset node; the fields of ``CUDA_MEMSET_NODE_PARAMS``."""

    destination: int
    element_bytes: int
    value: int
    width: int
    height: int
    pitch: int


@dataclass(frozen=True, slots=True)
class SavedMemcpy:
    """A copy node: the bytes of its ``CUDA_MEMCPY3D``."""

    parameters: bytes


@dataclass(frozen=True, slots=True)
class SavedEmpty:
    """A node that only joins others."""


SavedNode: TypeAlias = SavedKernel | SavedMemset | SavedMemcpy | SavedEmpty
_KINDS: Mapping[str, type[Any]] = {
    "kernel": SavedKernel,
    "memset": SavedMemset,
    "memcpy": SavedMemcpy,
    "empty": SavedEmpty,
}


@dataclass(frozen=True, slots=True)
class SavedEdge:
    """A dependency; ports and kind are those of ``CUgraphEdgeData``: a programmatic launch is kind 1 from port 1."""

    source: int
    target: int
    from_port: int = 0
    to_port: int = 0
    kind: int = 0


@dataclass(frozen=True, slots=True)
class SavedGraph:
    """A whole graph; nodes are in the order in which they were made."""

    functions: tuple[SavedFunction, ...]
    nodes: tuple[SavedNode, ...]
    edges: tuple[SavedEdge, ...]

    def __post_init__(self) -> None:
        for node in self.nodes:
            if isinstance(node, SavedKernel) and not 0 <= node.function < len(self.functions):
                raise CacheError(
                    f"a kernel node names function {node.function}, the graph has {len(self.functions)}: save it again"
                )
        for edge in self.edges:
            if not (0 <= edge.source < len(self.nodes) and 0 <= edge.target < len(self.nodes)):
                raise CacheError(
                    f"an edge joins nodes {edge.source} and {edge.target}, the graph has {len(self.nodes)}: "
                    "save it again"
                )

    def kernels(self) -> list[SavedKernel]:
        """The kernel nodes, in order."""
        return [node for node in self.nodes if isinstance(node, SavedKernel)]

    def to_json(self) -> str:
        """As JSON text, bytes in hexadecimal."""
        names = {kind: name for name, kind in _KINDS.items()}
        value = {
            "format": FORMAT,
            "functions": [dataclasses.asdict(function) for function in self.functions],
            "nodes": [{"kind": names[type(node)], **_plain(node)} for node in self.nodes],
            "edges": [dataclasses.astuple(edge) for edge in self.edges],
        }
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "SavedGraph":
        """The graph of :meth:`to_json`.

        Raises:
            CacheError: it is not one, or of another format.
        """
        try:
            value = json.loads(text)
            if value["format"] != FORMAT:
                raise CacheError(
                    f"a saved graph must have format {FORMAT}, found {value['format']}: save it again"
                )
            return cls(
                tuple(
                    SavedFunction(one["name"], one["image"], _pairs(one["layout"]), _pairs(one["attributes"]))
                    for one in value["functions"]
                ),
                tuple(_node(dict(one)) for one in value["nodes"]),
                tuple(SavedEdge(*map(int, edge)) for edge in value["edges"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CacheError):
                raise
            raise CacheError(f"this is no saved graph ({error!r}): save it again") from error


def match_functions(
    wanted: Sequence[SavedFunction], available: Sequence[tuple[SavedFunction, Any]]
) -> list[Any | None]:
    """A handle for each wanted function: the one of that name, layout and code size; None where none or several fit.

    Args:
        available: what this process has, each with its handle; compared by name, then layout, then the attributes
            that belong to the code.
    """
    by_name: dict[str, list[tuple[SavedFunction, Any]]] = {}
    for function, handle in available:
        by_name.setdefault(function.name, []).append((function, handle))
    found: list[Any | None] = []
    for function in wanted:
        fitting = [
            handle
            for one, handle in by_name.get(function.name, [])
            if one.layout == function.layout and of_code(one) == of_code(function)
        ]
        found.append(fitting[0] if len(fitting) == 1 else None)
    return found


# CU_FUNC_ATTRIBUTE_*: static shared, constant and local bytes, registers, PTX and binary version.
_OF_CODE = (1, 2, 3, 4, 5, 6)


def of_code(function: SavedFunction) -> tuple[tuple[int, int], ...]:
    """Those attributes that the code has, whoever loads it."""
    return tuple((key, value) for key, value in function.attributes if key in _OF_CODE)


def _plain(node: SavedNode) -> dict[str, Any]:
    plain = dataclasses.asdict(node)
    for name, value in plain.items():
        if isinstance(value, bytes):
            plain[name] = value.hex()
    if isinstance(node, SavedKernel):
        plain["attributes"] = [(key, value.hex()) for key, value in node.attributes]
    return plain


def _node(plain: dict[str, Any]) -> SavedNode:
    kind = _KINDS[plain.pop("kind")]
    if kind is SavedKernel:
        plain["arguments"] = bytes.fromhex(plain["arguments"])
        plain["attributes"] = tuple((int(key), bytes.fromhex(value)) for key, value in plain["attributes"])
        plain["grid"], plain["block"] = tuple(plain["grid"]), tuple(plain["block"])
    elif kind is SavedMemcpy:
        plain["parameters"] = bytes.fromhex(plain["parameters"])
    node: SavedNode = kind(**plain)
    return node


def _pairs(value: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((int(first), int(second)) for first, second in value)
