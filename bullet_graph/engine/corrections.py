"""A slow correction of predicted times by measured ones."""

from collections.abc import Mapping
from typing import Literal, get_args

from bullet_graph.engine.plan import ArmName

ForwardKind = Literal["step", "slice"]
"""What a prediction was for: a forward with decode rows in it, or one of prompt rows alone."""

CORRECTION_WEIGHT = 0.05
"""Weight of one measurement in the correction of an arm's predictions."""

CORRECTION_LIMIT = 2.0
"""Corrections stay within a factor of this, and so does what one measurement may ask for."""


class Corrections:
    """Measured over predicted time for each arm and kind of forward: a moving geometric mean, 1 at first."""

    def __init__(self) -> None:
        self._factors: dict[tuple[ArmName, ForwardKind], float] = {
            (arm, kind): 1.0 for arm in get_args(ArmName) for kind in get_args(ForwardKind)
        }

    def __getitem__(self, key: tuple[ArmName, ForwardKind]) -> float:
        return self._factors[key]

    def observe(self, arm: ArmName, kind: ForwardKind, predicted_ms: float, measured_ms: float) -> None:
        """Take in one measurement of what was predicted with these corrections; times of 0 say nothing."""
        if predicted_ms <= 0 or measured_ms <= 0:
            return
        ratio = _limited(measured_ms / predicted_ms)
        self._factors[arm, kind] = _limited(self._factors[arm, kind] * ratio**CORRECTION_WEIGHT)

    def as_dict(self) -> Mapping[tuple[ArmName, ForwardKind], float]:
        """A copy of all factors."""
        return dict(self._factors)


def _limited(factor: float) -> float:
    return min(max(factor, 1 / CORRECTION_LIMIT), CORRECTION_LIMIT)
