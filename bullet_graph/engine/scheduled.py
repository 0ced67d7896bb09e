"""A step that the scheduler has filled, and whose rows it has."""

from dataclasses import dataclass

from bullet_graph.engine.sequence import Sequence
from bullet_graph.partition.masks import Lane
from bullet_graph.runtime.step import Step


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step and whose it is.

    Attributes:
        step: what the executor runs.
        lane: where.
        admitted: sequences that got their slot in this step.
        touched: sequences whose blocks the step reads or writes.
        sampled: sequences that get a token, in the order of the result's rows.
    """

    step: Step
    lane: Lane
    admitted: tuple[Sequence, ...]
    touched: tuple[Sequence, ...]
    sampled: tuple[Sequence, ...]
