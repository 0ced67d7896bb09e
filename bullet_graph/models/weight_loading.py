"""Weights are filled in a thread of their own, while others use their addresses."""

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

import torch

from bullet_graph.models.weights import ModelWeights


class WeightLoading:
    """Fills weights in a thread, on a stream of its own on a GPU; as a context it ends the thread, whatever happens.

    What a capture needs is where the weights are, not what they are: they are made beforehand, and are zero or partly
    filled until :meth:`join` returns.

    The thread calls nothing that a CUDA graph forbids which another thread captures at the same time, in the mode
    ``thread_local``: it waits for its own stream and events, and never for the device or the default stream.

    Args:
        weights: to be filled, made on the current stream.
        fill: fills them on the current stream, and yields the bytes of each piece. It is run in the thread.
        advance: told these bytes, in the thread.

    Attributes:
        started_s: when the thread began, on the clock of ``time.perf_counter``.
        ended_s: when the last weight was on the device; None before, and where it failed.
    """

    def __init__(
        self, weights: ModelWeights, fill: Iterator[int], advance: Callable[[float], object] = lambda _: None
    ) -> None:
        self._device = weights.embed.device
        self._fill = fill
        self._advance = advance
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._made = None
        if self._device.type == "cuda":
            self._made = torch.cuda.Event()
            self._made.record()
        self.started_s = time.perf_counter()
        self.ended_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="bullet-graph-weights")
        self._thread.start()

    def join(self) -> None:
        """Wait until all weights are there, for every stream.

        Raises:
            BaseException: what filling them raised, with its own type and message.
        """
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            # Its frames would keep the weights for as long as the caller keeps the error.
            traceback.clear_frames(error.__traceback__)
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._error = None

    def _run(self) -> None:
        try:
            # Of a thread's own: weights made in this mode may be changed in it alone, and others in it as well.
            with torch.inference_mode(), self._own_stream():
                for num_bytes in self._fill:
                    self._advance(num_bytes)
                    if self._stopped.is_set():
                        return
            self.ended_s = time.perf_counter()
        except BaseException as error:
            self._error = error
        finally:
            del self._fill  # and what it holds

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        if self._made is None:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self._device))
            stream = torch.cuda.Stream(self._device)
            stream.wait_event(self._made)
            stack.enter_context(torch.cuda.stream(stream))
            stack.callback(stream.synchronize)
            yield
