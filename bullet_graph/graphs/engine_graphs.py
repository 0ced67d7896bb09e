"""Captures an engine's CUDA graphs one by one: some at its start, the others while it serves."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby

import torch

from bullet_graph.config import ReadyName
from bullet_graph.graphs.capture_order import CaptureKey, CaptureProgress, CaptureReport, PieceKey, hot_keys
from bullet_graph.graphs.capture_plan import CapturePlan
from bullet_graph.graphs.decode_graph import DecodeGraphs
from bullet_graph.graphs.piecewise import PiecewiseGraphs
from bullet_graph.models.progress import progress_bar
from bullet_graph.partition.masks import WHOLE_GPU, SmPartition
from bullet_graph.perf.start_report import StartClock


class EngineGraphs(CaptureProgress):
    """Captures a plan's graphs, in the order of :func:`~bullet_graph.graphs.capture_order.capture_order`.

    ``pieces`` are made for the plan's rows, and not captured yet.
    """

    def __init__(self, decode: DecodeGraphs, pieces: PiecewiseGraphs, plan: CapturePlan, *, num_layers: int) -> None:
        super().__init__(plan, num_layers)
        self._decode = decode
        self._pieces = pieces
        self._num_hot = len(hot_keys(plan))

    def capture_first(
        self, ready: ReadyName, bind: Callable[[SmPartition], torch.cuda.Stream], clock: StartClock, *, progress: bool
    ) -> CaptureReport:
        """Compile, and capture the graphs that an engine needs to be ready; waits for its own launches alone.

        ``bind`` binds the decode lane's stream to a partition, and returns it.
        """
        start_s = time.perf_counter()
        free_before, _ = torch.cuda.mem_get_info()
        with clock.phase("kernels"):
            self._decode.compile()
        compiled_s = time.perf_counter()
        keys = self.missing[: self._num_hot if ready == "hot" else None]
        with progress_bar(progress, total=len(keys), desc="Capturing graphs", unit="graph") as advance:
            for kind, of_kind in groupby(keys, type):
                with clock.phase("piecewise graphs" if kind is PieceKey else "decode graphs"):
                    for key in of_kind:
                        self._capture(key, bind(key.partition))
                        advance(1)
        bind(WHOLE_GPU).synchronize()
        free_after, _ = torch.cuda.mem_get_info()
        return CaptureReport(
            num_graphs=len(keys),
            compile_seconds=compiled_s - start_s,
            capture_seconds=time.perf_counter() - compiled_s,
            num_bytes=free_before - free_after,
        )

    @property
    def next_partition(self) -> SmPartition | None:
        """The partition whose stream the next :meth:`prepare_next` needs; None: nothing is left."""
        key = self.next
        if key is not None:
            return key.partition
        return WHOLE_GPU if self._pieces.untimed else None

    def prepare_next(self, stream: torch.cuda.Stream) -> None:
        """Capture the next graph on this stream; once all are captured, time the next size of piecewise graphs."""
        key = self.next
        if key is not None:
            self._capture(key, stream)
            return
        with _beside_nothing(stream):
            self._pieces.time_next()

    def _capture(self, key: CaptureKey, stream: torch.cuda.Stream) -> None:
        with _beside_nothing(stream):
            if isinstance(key, PieceKey):
                self._pieces.capture_piece(key.rows, key.layer)
            else:
                self._decode.capture_one(key, stream)
        self.note(key)


@contextmanager
def _beside_nothing(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work on a stream after all earlier work of the current one, and before all later work: they share buffers."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
