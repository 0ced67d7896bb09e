"""Memory that kernels share: the paged KV cache, and pinned host buffers for uploads."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bullet_graph.errors import ConfigError
from bullet_graph.perf.roofline import DecoderShape

_RING_BUFFERS = 4
"""Two steps can be in flight and one in preparation; one more, so that none waits."""


class KVCache:
    """Keys and values of all layers, in ``num_blocks`` blocks, one of them for padding, of ``block_tokens`` tokens."""

    def __init__(
        self,
        shape: DecoderShape,
        *,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_tokens = block_tokens
        # Zeroed: padding rows attend to the padding block, and uninitialised memory may hold NaN.
        self._data = torch.zeros(
            shape.num_layers,
            2,
            num_blocks,
            block_tokens,
            shape.num_kv_heads,
            shape.head_dim,
            dtype=dtype,
            device=device,
        )
        # Views made once: an eager forward asks for them three times a layer, and waits for Python.
        self._layers = [(self._data[index, 0], self._data[index, 1]) for index in range(shape.num_layers)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of a layer, each [num_blocks, block_tokens, num_kv_heads, head_dim]."""
        return self._layers[index]


class PinnedRing:
    """Pinned staging buffers of ``num_bytes`` each, taken in turn; a buffer is reused once its copies have finished."""

    def __init__(self, num_bytes: int) -> None:
        self._buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_RING_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() for _ in range(_RING_BUFFERS)]
        self._next = 0

    @contextmanager
    def buffer(self) -> Iterator[Tensor]:
        """A free buffer, [num_bytes] uint8; inside the block, enqueue its copies on the current stream."""
        index = self._next
        self._next = (index + 1) % _RING_BUFFERS
        self._copied[index].synchronize()
        yield self._buffers[index]
        self._copied[index].record()


class Uploader:
    """Copies int32 arrays to the device as one transfer into a fixed buffer of ``capacity`` values."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity = capacity
        self._ring = PinnedRing(4 * capacity)
        self.device_buffer = torch.zeros(capacity, dtype=torch.int32, device=device)

    def upload(self, *arrays: NDArray[np.int32]) -> list[Tensor]:
        """Enqueue the copy on the current stream; each array starts on a 16-byte boundary of the buffer.

        Returns views of the device buffer, valid until the next upload's copy runs.
        """
        offsets, end = packed_offsets([len(array) for array in arrays])
        if end > self._capacity:
            raise ConfigError(f"a step needs {end} input values, the buffer holds {self._capacity}")
        with self._ring.buffer() as staging:
            host = staging.numpy().view(np.int32)
            for offset, array in zip(offsets, arrays, strict=True):
                host[offset : offset + len(array)] = array
            self.device_buffer[:end].copy_(staging.view(torch.int32)[:end], non_blocking=True)
        return [self.device_buffer[o : o + len(a)] for o, a in zip(offsets, arrays, strict=True)]


def packed_offsets(lengths: list[int]) -> tuple[list[int], int]:
    """Where arrays of these lengths start when each is aligned to 16 bytes, and where the last one ends."""
    offsets, end = [], 0
    for length in lengths:
        offsets.append(end)
        end += -(-length // 4) * 4
    return offsets, end
