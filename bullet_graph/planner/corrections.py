"""A slow correction of predicted times by measured ones."""

from collections.abc import Mapping
from typing import Literal, get_args

from bullet_graph.planner.plan import PolicyName

ForwardKind = Literal["step", "slice"]
"""What a prediction was for: a forward with decode rows in it, or one of prompt rows alone."""

CORRECTION_WEIGHT = 0.05
"""Weight of one measurement in the correction of a policy's predictions."""

CORRECTION_LIMIT = 2.0
"""Corrections stay within a factor of this, and so does what one measurement may ask for."""


class Corrections:
    """Measured over predicted time for each policy and kind of forward: a moving geometric mean, 1 at first."""

    def __init__(self) -> None:
        self._factors: dict[tuple[PolicyName, ForwardKind], float] = {
            (policy, kind): 1.0 for policy in get_args(PolicyName) for kind in get_args(ForwardKind)
        }

    def __getitem__(self, key: tuple[PolicyName, ForwardKind]) -> float:
        return self._factors[key]

    def observe(self, policy: PolicyName, kind: ForwardKind, predicted_ms: float, measured_ms: float) -> None:
        """Take in one measurement of what was predicted with these corrections; times of 0 say nothing."""
        if predicted_ms <= 0 or measured_ms <= 0:
            return
        ratio = _limited(measured_ms / predicted_ms)
        self._factors[policy, kind] = _limited(self._factors[policy, kind] * ratio**CORRECTION_WEIGHT)

    def as_dict(self) -> Mapping[tuple[PolicyName, ForwardKind], float]:
        """A copy of all factors."""
        return dict(self._factors)


def _limited(factor: float) -> float:
    return min(max(factor, 1 / CORRECTION_LIMIT), CORRECTION_LIMIT)
