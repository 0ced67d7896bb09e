"""What the engine loop may ask of a device."""

from typing import Protocol

from bullet_graph.runtime.step import Step, StepResult


class Executor(Protocol):
    """Carries steps out in the order they are launched.

    A decode row takes the token that an earlier step sampled for its slot, so a step may be launched before
    the tokens of the one before it have reached the host.
    """

    @property
    def max_in_flight(self) -> int:
        """Most steps worth launching ahead: 1 where a launch already runs to its end."""

    def launch(self, step: Step) -> int:
        """Enqueue a step and return its ticket; does not wait for the device."""

    def done(self, ticket: int) -> bool:
        """Whether the step has finished, without waiting."""

    def wait(self, ticket: int) -> StepResult:
        """Wait for a step and read its tokens; each ticket can be read once."""

    def now(self) -> float:
        """Seconds on the clock that request metrics use (virtual in a simulation)."""

    def shutdown(self) -> None:
        """Give back the device memory; nothing may be launched afterwards."""
