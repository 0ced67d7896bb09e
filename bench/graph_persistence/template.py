"""Whether a graph of many layers is one layer over and over with other pointers, so that one can be its template."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.graph_persistence.allocations import AllocationTable, words
from bench.graph_persistence.saved import SavedGraph, SavedKernel, SavedNode


@dataclass(frozen=True, slots=True)
class TemplateFit:
    """How the layers of a graph differ from the first.

    Attributes:
        start: first node of the first layer.
        period: nodes of a layer.
        layers: that repeat.
        equal_words: parameter words that are the first layer's.
        moved_words: that are pointers there and here, to other memory.
        other_words: that differ and are not both pointers: these a template must be told.
        other_launches: nodes whose grid, block, shared memory or attributes differ.
    """

    start: int
    period: int
    layers: int
    equal_words: int
    moved_words: int
    other_words: int
    other_launches: int


def find_period(sequence: Sequence[object], repeats: int) -> tuple[int, int] | None:
    """The (start, period) of the shortest piece that stands ``repeats`` times, at least 2, one after another."""
    for period in range(1, len(sequence) // repeats + 1) if repeats > 1 else ():
        run = 0
        for index in range(len(sequence) - period):
            run = run + 1 if sequence[index] == sequence[index + period] else 0
            if run >= period * (repeats - 1):
                return index + 1 - run, period
    return None


def template_fit(graph: SavedGraph, table: AllocationTable, num_layers: int) -> TemplateFit | None:
    """Compare each layer's nodes with the first layer's; None where the graph has no such period.

    Nodes must be in launch order, as those of a captured stream are.
    """
    found = find_period([_kind(node) for node in graph.nodes], num_layers)
    if found is None:
        return None
    start, period = found
    counts: Counter[str] = Counter()
    for layer in range(1, num_layers):
        for index in range(start, start + period):
            counts += _difference(graph.nodes[index], graph.nodes[index + layer * period], table)
    return TemplateFit(
        start,
        period,
        num_layers,
        counts["equal"],
        counts["moved"],
        counts["other"],
        counts["launch"],
    )


def _kind(node: SavedNode) -> object:
    return node.function if isinstance(node, SavedKernel) else type(node)


def _difference(first: SavedNode, other: SavedNode, table: AllocationTable) -> Counter[str]:
    counts: Counter[str] = Counter()
    if not (isinstance(first, SavedKernel) and isinstance(other, SavedKernel)):
        counts["equal" if first == other else "other"] += 1
        return counts
    launches = [(one.grid, one.block, one.shared_bytes, one.attributes) for one in (first, other)]
    counts["launch"] += launches[0] != launches[1]
    for a, b in zip(_padded(first), _padded(other), strict=True):
        if a == b:
            counts["equal"] += 1
        elif table.find(a) is not None and table.find(b) is not None:
            counts["moved"] += 1
        else:
            counts["other"] += 1
    return counts


def _padded(kernel: SavedKernel) -> list[int]:
    """All words; the last may be half a word, as of an int after pointers."""
    return words(kernel.arguments + bytes(-len(kernel.arguments) % 8))
