"""The best sizes to capture when there is room for so many: a dynamic program. No torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bullet_graph.graphs.key import smallest_holding


@dataclass(frozen=True, slots=True)
class Demand:
    """Steps of one size.

    Attributes:
        size: their rows.
        num_steps: how many were seen; 0 for a size that only may come up.
        padded_ms: time lost, all of them together, when padded to a size that holds them.
        unserved_ms: the same when no captured size holds them; infinite where that may not be.
    """

    size: int
    num_steps: int
    padded_ms: Callable[[int], float]
    unserved_ms: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Sizes to capture.

    Attributes:
        sizes: rising.
        lost_ms: time lost by the steps that were seen; infinite where some must be served and are not.
    """

    sizes: tuple[int, ...]
    lost_ms: float


def lost_ms(demands: Sequence[Demand], sizes: Sequence[int]) -> float:
    """Time lost with these sizes captured, rising."""
    return math.fsum(_lost(demand, smallest_holding(demand.size, sizes)) for demand in demands)


def best_choices(candidates: Sequence[int], demands: Sequence[Demand], *, most: int) -> tuple[Choice, ...]:
    """For each number of sizes from 0 to ``most``, the choice of so many or fewer that loses the least time.

    Steps between two sizes that are captured are padded to the larger one, so the best choice of k sizes whose largest
    is the j-th candidate is the best of k − 1 sizes below it, and that one: O(most · candidates²).

    Args:
        candidates: sizes to choose from, rising.
        demands: the steps, in any order.
    """
    n = len(candidates)
    segment = _segment_losses(candidates, demands)
    beyond = [
        math.fsum(demand.unserved_ms for demand in demands if demand.size > last) for last in (0, *candidates)
    ]
    best = Choice((), beyond[0])
    choices = [best]
    # least[j]: time lost by steps of up to the j-th candidate (0: none), with the j-th the last of those captured.
    least = [0.0] + [math.inf] * n
    origins: list[list[int]] = []
    for _ in range(min(most, n)):
        origin = [
            min(range(j), key=lambda i, j=j: least[i] + segment[i][j], default=0)  # type: ignore[misc]
            for j in range(n + 1)
        ]
        least = [math.inf] + [least[origin[j]] + segment[origin[j]][j] for j in range(1, n + 1)]
        origins.append(origin)
        last = min(range(n + 1), key=lambda j: least[j] + beyond[j])
        lost = least[last] + beyond[last]
        # One more graph must be worth more than what rounding makes of a sum.
        if lost < best.lost_ms * (1 - 1e-12) or math.isinf(best.lost_ms):
            best = Choice(_trace_back(candidates, origins, last), lost)
        choices.append(best)
    choices += [best] * (most + 1 - len(choices))
    return tuple(choices)


def _segment_losses(candidates: Sequence[int], demands: Sequence[Demand]) -> list[list[float]]:
    """[i][j]: time lost by the steps above the i-th candidate (0: all) that are padded to the j-th; j from 1 on."""
    rows = (0, *candidates)
    ordered = sorted(demands, key=lambda demand: demand.size)
    segment = [[0.0] * len(rows) for _ in rows]
    for j in range(1, len(rows)):
        held = [demand for demand in ordered if demand.size <= rows[j]]
        lost = 0.0
        for i in range(j - 1, -1, -1):
            while held and held[-1].size > rows[i]:
                lost += held.pop().padded_ms(rows[j])
            segment[i][j] = lost
    return segment


def _trace_back(candidates: Sequence[int], origins: Sequence[Sequence[int]], last: int) -> tuple[int, ...]:
    sizes: list[int] = []
    for origin in reversed(origins):
        if not last:
            break
        sizes.append(candidates[last - 1])
        last = origin[last]
    return tuple(sizes[::-1])


def _lost(demand: Demand, size: int | None) -> float:
    return demand.unserved_ms if size is None else demand.padded_ms(size)
