"""The decode step of the experiment: the product's own, built in an arena, captured, launched and compared."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.graph_persistence.allocations import Allocation
from bench.graph_persistence.arena import Arena
from bench.kernels.step_lab import Bench, inputs_for
from bullet_graph.graphs.decode_graph import DecodeGraphs
from bullet_graph.graphs.halves import DEFAULT_HALVES
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.triton_ops import TritonOps
from bullet_graph.partition.spec import WHOLE_GPU

MODEL = "llama-3.1-8b"
MAX_ROWS = 64
CONTEXT_TOKENS = 256
TRITON_NODES = 8


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph that is kept as cudaGraph_t besides its executable.

    Attributes:
        graph: torch's.
        outputs: tensors that the graph writes; they hold its memory.
        capture_ms: between begin and end of the capture.
        instantiate_ms: of the executable.
    """

    graph: torch.cuda.CUDAGraph
    outputs: Any
    capture_ms: float
    instantiate_ms: float


def capture(run: Callable[[], Any]) -> Captured:
    """Capture on the current stream, on which ``run`` has run before."""
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    start = time.perf_counter()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        outputs = run()
    finally:
        graph.capture_end()
    captured = time.perf_counter()
    graph.instantiate()
    end = time.perf_counter()
    return Captured(graph, outputs, round(1e3 * (captured - start), 3), round(1e3 * (end - captured), 3))


class Step:
    """A decoder of so many layers and its steps; made alike in every process, so that its memory lies alike.

    Args:
        num_layers: of the model's shape, with random weights of a fixed seed.
    """

    @torch.inference_mode()
    def __init__(self, num_layers: int) -> None:
        torch.manual_seed(0)
        config = dataclasses.replace(PRESETS[MODEL], num_layers=num_layers)
        self.bench = Bench(config, (DEFAULT_HALVES,), MAX_ROWS, CONTEXT_TOKENS)
        self.graphs = self.bench.graphs[DEFAULT_HALVES]
        self.decoder: Decoder = self.graphs._decoder
        shape = (MAX_ROWS, config.hidden_size)
        self.triton_inputs = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        torch.cuda.synchronize()

    def run_triton(self) -> tuple[Tensor, Tensor]:
        """Launch a chain of Triton kernels; returns their last outputs."""
        x, residual = self.triton_inputs
        norm = self.decoder.weights.final_norm
        for _ in range(TRITON_NODES):
            x, residual = TritonOps.add_rms_norm(x, residual, norm, 1e-5)
        return x, residual

    @contextmanager
    def on_stream(self) -> Iterator[int]:
        """Make the step's stream current; gives its CUstream."""
        with torch.inference_mode(), torch.cuda.stream(self.bench.stream):
            yield int(self.bench.stream.cuda_stream)

    def upload(self, rows: int, graphs: DecodeGraphs | None = None) -> Any:
        """Put a step's inputs where its graph reads them; returns what :meth:`run` takes."""
        graphs = graphs or self.graphs
        inputs = inputs_for(rows, CONTEXT_TOKENS, self.bench.num_blocks)
        return graphs._prepare(graphs._pad(inputs, rows), WHOLE_GPU)

    def capture(self, rows: int, graphs: DecodeGraphs | None = None) -> Captured:
        """Compile if need be, run once, capture."""
        graphs = graphs or self.graphs
        with self.on_stream():
            prepared = self.upload(rows, graphs)
            graphs._run(prepared, WHOLE_GPU)
            return capture(lambda: graphs._run(prepared, WHOLE_GPU))

    def outcome(self, rows: int, launch: Callable[[int], Any]) -> str:
        """Hash of logits and next tokens of a step that ``launch`` enqueues on a CUstream, from the same state."""
        with self.on_stream() as stream:
            self.bench.state.last_token.copy_(self.bench.tokens)
            self.graphs._logits.zero_()
            self.upload(rows)
            launch(stream)
            torch.cuda.synchronize()
            logits = self.graphs.logits(rows).view(torch.uint8).cpu().numpy().tobytes()
            tokens = self.bench.state.last_token.cpu().numpy().tobytes()
        return hashlib.sha256(logits + tokens).hexdigest()

    def eager_one_layer(self) -> DecodeGraphs:
        """Steps of the first layer alone without torch.compile: they launch each kernel of the libraries once."""
        decoder = self.decoder
        config = dataclasses.replace(decoder.config, num_layers=1)
        weights = dataclasses.replace(decoder.weights, layers=decoder.weights.layers[:1])
        return DecodeGraphs(
            Decoder(config, weights, decoder.cache, decoder.cos_sin),
            self.bench.state,
            max_batch_size=MAX_ROWS,
            num_kv_blocks=self.bench.num_blocks,
            padding_slot=MAX_ROWS,
            halves="eager",
        )

    def allocations(self, arena: Arena, state_end: int) -> list[Allocation]:
        """The arena's allocations by what they are: named state, other state, and what came after it."""
        names = dict(self._named())
        found = []
        for index, (address, num_bytes) in enumerate(arena.log):
            other = f"state.{index}" if address < state_end else f"scratch.{index}"
            found.append(Allocation(address, num_bytes, names.get(address, other)))
        return found

    def _named(self) -> Iterator[tuple[int, str]]:
        weights = self.decoder.weights
        for index, layer in enumerate(weights.layers):
            for name in (one.name for one in dataclasses.fields(layer)):
                if (tensor := getattr(layer, name)) is not None:
                    yield tensor.data_ptr(), f"weights.{index}.{name}"
        for name in ("embed", "final_norm", "lm_head"):
            yield getattr(weights, name).data_ptr(), f"weights.{name}"
        yield self.decoder.cache.layer(0)[0].data_ptr(), "kv_cache"
        yield self.decoder.cos_sin.data_ptr(), "cos_sin"
        yield self.graphs._logits.data_ptr(), "logits"
        yield self.graphs._uploader.device_buffer.data_ptr(), "inputs"
        yield self.bench.state.last_token.data_ptr(), "last_token"


def arena_bytes(num_layers: int) -> int:
    """Enough for weights, cache and every temporary of the experiment: 20 GiB and one more a layer."""
    return (20 + num_layers) << 30
