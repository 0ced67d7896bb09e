"""Memory that kernels share: the paged KV cache, and pinned host buffers for uploads."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bullet_graph.errors import ConfigError
from bullet_graph.kernels.fp8 import FP8
from bullet_graph.perf.roofline import DecoderShape

_RING_BUFFERS = 4
"""Two steps can be in flight and one in preparation; one more, so that none waits."""


class KVCache:
    """Keys and values of all layers, in ``num_blocks`` blocks, one of them for padding, of ``block_tokens`` tokens.

    ``windows``, by layer, are those of attention to them: see :attr:`~bullet_graph.perf.roofline.DecoderShape.windows`.
    They are in ``dtype``, or in FP8 where the shape says so.
    """

    def __init__(
        self, shape: DecoderShape, *, num_blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.windows = shape.windows
        self.distinct_windows = tuple(dict.fromkeys(w for w in shape.windows if w is not None))
        # Zeroed: padding rows attend to the padding block, and uninitialised memory may hold NaN.
        sizes = (shape.num_layers, 2, num_blocks, block_tokens, shape.num_kv_heads, shape.head_dim)
        self._data = torch.zeros(sizes, dtype=FP8 if shape.fp8_kv else dtype, device=device)
        # Views made once: an eager forward asks for them three times a layer, and waits for Python.
        self._layers = [(self._data[index, 0], self._data[index, 1]) for index in range(shape.num_layers)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of a layer, each [num_blocks, block_tokens, num_kv_heads, head_dim]."""
        return self._layers[index]


class PinnedRing:
    """Pinned staging buffers of ``num_bytes`` each, taken in turn; a buffer is reused once its copies have finished."""

    def __init__(self, num_bytes: int) -> None:
        self._buffers = cycle(
            [
                (torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
                for _ in range(_RING_BUFFERS)
            ]
        )

    @contextmanager
    def buffer(self) -> Iterator[Tensor]:
        """A free buffer, [num_bytes] uint8; inside the block, enqueue its copies on the current stream."""
        buffer, copied = next(self._buffers)
        copied.synchronize()
        yield buffer
        copied.record()


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
        ends = list(accumulate(-(-len(array) // 4) * 4 for array in arrays))
        offsets, end = [0, *ends[:-1]], ends[-1]
        if end > self._capacity:
            raise ConfigError(f"a step needs {end} input values, the buffer holds {self._capacity}")
        with self._ring.buffer() as staging:
            host = staging.numpy().view(np.int32)
            for offset, array in zip(offsets, arrays, strict=True):
                host[offset : offset + len(array)] = array
            self.device_buffer[:end].copy_(staging.view(torch.int32)[:end], non_blocking=True)
        return [self.device_buffer[o : o + len(a)] for o, a in zip(offsets, arrays, strict=True)]
