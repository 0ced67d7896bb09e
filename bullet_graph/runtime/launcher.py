"""Owns the lanes' streams: each is bound to its partition before anything is captured or launched on it."""

import torch

from bullet_graph.partition.backend import PartitionBackend
from bullet_graph.partition.masks import Lane, SmPartition


class Launcher:
    """The lanes' streams, as torch knows them.

    Args:
        backend: opened and verified; this object closes it.
        device: the GPU.
    """

    def __init__(self, backend: PartitionBackend, device: torch.device) -> None:
        self._backend = backend
        self._device = device

    def stream(self, lane: Lane, partition: SmPartition) -> torch.cuda.Stream:
        """The lane's stream, bound to the partition by this call.

        Ask right before a capture or an eager launch: the next call for the lane may bind the same stream to
        other SMs. Captured graphs keep the SMs of their capture, whichever stream replays them.

        Raises:
            PartitionError: the back end cannot make this partition.
        """
        return torch.cuda.ExternalStream(self._backend.stream(lane, partition), device=self._device)

    def close(self) -> None:
        """Free the streams, whose work must have finished."""
        self._backend.close()
