"""What the addresses in a saved graph's parameters belong to, and moving them to where that memory lies now."""

import dataclasses
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bench.graph_persistence.saved import (
    SavedEmpty,
    SavedGraph,
    SavedKernel,
    SavedMemcpy,
    SavedMemset,
    SavedNode,
)
from bullet_graph.errors import CacheError

WORD_BYTES = 8


@dataclass(frozen=True, slots=True, order=True)
class Allocation:
    """A range of device memory; a name that stands for the same memory in every process."""

    address: int
    num_bytes: int
    name: str


class AllocationTable:
    """Which allocation an address lies in.

    Args:
        allocations: that do not overlap.

    Raises:
        CacheError: two overlap.
    """

    def __init__(self, allocations: Iterable[Allocation]) -> None:
        self.allocations = sorted(allocations)
        self._starts = [one.address for one in self.allocations]
        for one, following in zip(self.allocations, self.allocations[1:], strict=False):
            if one.address + one.num_bytes > following.address:
                raise CacheError(
                    f"allocations {one.name} and {following.name} overlap: give each byte one owner"
                )

    def find(self, address: int) -> Allocation | None:
        """The allocation that holds the address, None for none."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        one = self.allocations[index]
        return one if address < one.address + one.num_bytes else None


def words(data: bytes) -> list[int]:
    """The aligned 64-bit words of an argument buffer: where pointers can be, by the ABI."""
    end = len(data) - len(data) % WORD_BYTES
    return [int.from_bytes(data[i : i + WORD_BYTES], "little") for i in range(0, end, WORD_BYTES)]


def pointers(node: SavedNode, table: AllocationTable) -> list[Allocation]:
    """The allocation of each word of the node's parameters that is an address in one; a guess by value."""
    if isinstance(node, SavedEmpty):
        return []
    if isinstance(node, SavedMemset):
        values = [node.destination]
    else:
        values = words(node.arguments if isinstance(node, SavedKernel) else node.parameters)
    return [found for value in values if (found := table.find(value)) is not None]


def relocate(graph: SavedGraph, old: AllocationTable, new: Mapping[str, int]) -> SavedGraph:
    """The graph with each address inside an allocation moved to where the allocation lies now.

    Args:
        old: the allocations at the time of saving.
        new: addresses now, by the allocations' names.

    Raises:
        CacheError: the graph points into an allocation that has no new address.
    """

    def moved(value: int) -> int:
        found = old.find(value)
        if found is None:
            return value
        if found.name not in new:
            raise CacheError(
                f"the graph points into {found.name}, which has no address in this process: allocate it first"
            )
        return new[found.name] + value - found.address

    def moved_bytes(data: bytes) -> bytes:
        whole = words(data)
        head = b"".join(moved(word).to_bytes(WORD_BYTES, "little") for word in whole)
        return head + data[len(head) :]

    nodes: list[SavedNode] = []
    for node in graph.nodes:
        if isinstance(node, SavedKernel):
            nodes.append(dataclasses.replace(node, arguments=moved_bytes(node.arguments)))
        elif isinstance(node, SavedMemset):
            nodes.append(dataclasses.replace(node, destination=moved(node.destination)))
        elif isinstance(node, SavedMemcpy):
            nodes.append(SavedMemcpy(moved_bytes(node.parameters)))
        else:
            nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))
