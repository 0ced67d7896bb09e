"""What a partition back end offers."""

from typing import Protocol

from bullet_graph.partition.masks import Lane
from bullet_graph.partition.spec import SmPartition


class PartitionBackend(Protocol):
    """Gives each lane a stream whose work stays on the lane's SMs.

    Attributes:
        name: as ``--partition-backend`` takes it.
        num_sms: SMs of the GPU.
        granularity_sms: step of a lane's size.
    """

    name: str
    num_sms: int
    granularity_sms: int

    def stream(self, lane: Lane, partition: SmPartition) -> int:
        """The CUstream on which the lane's work for this partition must be captured or launched.

        Good until the next call for the same lane, which may bind the same stream to other SMs; graphs that
        were captured keep theirs. :data:`~bullet_graph.partition.spec.WHOLE_GPU` gives the lane all SMs.

        Raises:
            PartitionError: the back end cannot make this partition.
        """
        ...

    def expected_sms(self, lane: Lane, partition: SmPartition) -> frozenset[int]:
        """The SMs, as ``%smid`` names them, on which that work must run.

        Raises:
            PartitionError: the back end cannot make this partition.
        """
        ...

    def close(self) -> None:
        """Free the streams, whose work must have finished."""
        ...
