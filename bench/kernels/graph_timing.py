"""Time of launches in a captured graph."""

import itertools
from collections.abc import Callable

import numpy as np
import torch

_MEASURED_US = 12_000.0
"""Of each measurement's replays."""


def us_per_layer(run_layer: Callable[[int], None], num_layers: int, stream: torch.cuda.Stream) -> float:
    """Median over replays of a graph of all layers, which ``run_layer`` launches by their index."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_layer(0)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for layer in range(num_layers):
                run_layer(layer)
        finally:
            graph.capture_end()

        def replays_us(count: int) -> list[float]:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            torch.cuda.synchronize()
            return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]

        estimate = min(replays_us(3))
        return float(np.median(replays_us(max(5, int(_MEASURED_US / estimate))))) / num_layers
