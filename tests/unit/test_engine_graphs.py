"""What a CUDA executor captures at its start and afterwards, on fakes of streams, graphs and lanes."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import capture_plans
import pytest
import torch
from capture_plans import NARROW

from bullet_graph.config import EngineConfig, Policy
from bullet_graph.graphs.capture_plan import DecodeSizes, PieceKey, capture_order, hot_keys
from bullet_graph.graphs.decode_graph import DecodeGraphs
from bullet_graph.graphs.key import GraphKey
from bullet_graph.graphs.piecewise import PiecewiseGraphs
from bullet_graph.kernels.gpu import captured
from bullet_graph.partition.masks import WHOLE_GPU, SmPartition
from bullet_graph.perf.start_report import StartClock
from bullet_graph.runtime import cuda

LAYERS = 3
SIZES = (DecodeSizes(None, (1, 2, 12, 64)), DecodeSizes(32, (4, 16)))
PLAN = replace(capture_plans.PLAN, decode=SIZES, piecewise_rows=(16, 128, 256))


@dataclass
class FakeGpu:
    """Streams, and a log of (what was done, on which stream)."""

    log: list[tuple[object, object]] = field(default_factory=list)
    busy: bool = False
    current: Any = None

    def stream(self, lane: str, partition: SmPartition) -> Any:
        return FakeStream(self, (lane, partition))


@dataclass
class FakeStream:
    gpu: FakeGpu = field(compare=False)
    name: object

    def wait_stream(self, other: "FakeStream") -> None:
        if other != self:
            self.gpu.log.append((("waits for", other.name), self.name))

    def wait_event(self, event: "FakeEvent") -> None:
        self.gpu.log.append((("waits for", event.stream), self.name))

    def synchronize(self) -> None:
        pass


@dataclass
class FakeEvent:
    gpu: FakeGpu
    stream: object = None

    def record(self) -> None:
        self.stream = self.gpu.current.name

    def query(self) -> bool:
        return not self.gpu.busy


class FakeDecode:
    gpu: FakeGpu

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def compile(self) -> None:
        self.gpu.log.append(("compile", None))

    def capture_one(self, key: GraphKey, stream: FakeStream) -> None:
        assert self.gpu.current == stream
        self.gpu.log.append((key, stream.name))


class FakePieces:
    gpu: FakeGpu

    def __init__(self, *_: object, buckets: tuple[int, ...], are_tuned: bool) -> None:
        self.untimed = [] if are_tuned else list(buckets)
        self.pieces = SimpleNamespace(clear=lambda: self.gpu.log.append(("clear", None)))

    def capture_piece(self, rows: int, layer: int) -> None:
        self.gpu.log.append((PieceKey(rows, layer), self.gpu.current.name))

    def time_next(self) -> None:
        self.gpu.log.append((("time", self.untimed.pop(0)), self.gpu.current.name))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()

    @contextmanager
    def entered(stream: FakeStream) -> Iterator[None]:
        before, gpu.current = gpu.current, stream
        yield
        gpu.current = before

    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    for name, value in {
        "get_device_properties": lambda _: properties,
        "synchronize": lambda *_: None,
        "ExternalStream": lambda stream, device: stream,  # noqa: ARG005
        "default_stream": lambda _: SimpleNamespace(synchronize=lambda: None),
        "mem_get_info": lambda: (0, 0),
        "stream": entered,
        "current_stream": lambda: gpu.current,
        "Event": lambda **_: FakeEvent(gpu),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return gpu


Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> Make:
    """Makes an executor whose parts are faked."""
    state = SimpleNamespace(settings=torch.empty(1, 8))
    for name, value in (("SamplingState", state), ("EagerLane", None), ("Uploader", None)):
        monkeypatch.setattr(cuda, name, lambda *_, value=value, **__: value)
    for name, fake in (("DecodeGraphs", FakeDecode), ("PiecewiseGraphs", FakePieces)):
        monkeypatch.setattr(cuda, name, fake)
        monkeypatch.setattr(fake, "gpu", gpu, raising=False)
    decoder = SimpleNamespace(
        cos_sin=torch.empty(1), config=SimpleNamespace(num_layers=LAYERS, vocab_size=8, num_experts=0), weights=None
    )

    def make(clock: StartClock | None = None, num_experts: int = 0, plan: Any = PLAN, **settings: Any) -> Any:
        decoder.config.num_experts = num_experts
        return cuda.CudaExecutor(
            decoder,
            EngineConfig(**({"model": "tiny", "max_num_seqs": 64, "policy": Policy("split")} | settings)),
            backend=gpu,
            plan=plan,
            join_weights=lambda: gpu.log.append(("join", None)),
            clock=clock or StartClock(),
            progress=False,
        )

    return make


def done(gpu: FakeGpu) -> list[object]:
    return [what for what, _ in gpu.log if not (isinstance(what, tuple) and what[0] == "waits for")]


ORDER, HOT = capture_order(PLAN, LAYERS), hot_keys(PLAN)
TIMINGS = [("time", rows) for rows in PLAN.piecewise_rows]


def test_all_is_captured_before_the_weights_are_there_and_timed_after(make: Make, gpu: FakeGpu) -> None:
    clock = StartClock()
    executor = make(clock=clock)
    assert done(gpu) == ["compile", *ORDER, "join", "clear", *TIMINGS]
    assert executor.num_missing_graphs == 0
    assert not executor.prepare_next()
    assert executor.capture.num_graphs == len(ORDER)
    assert executor.partitions == (WHOLE_GPU, NARROW)
    assert (executor.max_batch_size(WHOLE_GPU), executor.max_batch_size(NARROW)) == (64, 16)
    assert executor.lone_rows == 2
    assert {phase.name for phase in clock.report().phases} == {"kernels", "decode graphs", "piecewise graphs"}


def test_each_graph_is_captured_on_the_stream_of_its_partition(make: Make, gpu: FakeGpu) -> None:
    make()
    for what, stream in gpu.log:
        if isinstance(what, GraphKey):
            assert stream == ("decode", what.partition)
        elif isinstance(what, PieceKey):
            assert stream == ("decode", WHOLE_GPU)
    # Graphs share buffers: on another stream, each waits for those before it and is waited for.
    at = gpu.log.index((GraphKey(16, NARROW), ("decode", NARROW)))
    assert gpu.log[at - 1] == (("waits for", ("decode", WHOLE_GPU)), ("decode", NARROW))
    assert gpu.log[at + 1] == (("waits for", ("decode", NARROW)), ("decode", WHOLE_GPU))


def test_hot_graphs_are_enough_to_be_ready(make: Make, gpu: FakeGpu) -> None:
    executor = make(ready="hot")
    assert done(gpu) == ["compile", *HOT, "join", "clear"]
    assert executor.capture.num_graphs == len(HOT)
    assert executor.num_missing_graphs == len(ORDER) - len(HOT)
    assert (executor.max_batch_size(WHOLE_GPU), executor.max_batch_size(NARROW)) == (64, 0)
    gpu.log.clear()
    sizes = []
    while executor.prepare_next():
        sizes.append(executor.max_batch_size(NARROW))
    assert done(gpu) == [*ORDER[len(HOT) :], *TIMINGS]
    assert executor.num_missing_graphs == 0
    assert sorted(set(sizes)) == [0, 16], "its largest comes first, and alone it is not enough"


def test_times_are_taken_on_a_quiet_gpu_only(make: Make, gpu: FakeGpu) -> None:
    executor = make(ready="hot")
    for _ in range(executor.num_missing_graphs):
        gpu.busy = True  # captures do not mind
        assert executor.prepare_next()
    gpu.log.clear()
    assert executor.prepare_next(), "there is something left"
    assert done(gpu) == []
    gpu.busy = False
    assert executor.prepare_next()
    assert done(gpu) == TIMINGS[:1]


def test_a_capture_takes_turns_with_the_other_lane(make: Make, gpu: FakeGpu) -> None:
    executor = make(ready="hot")
    executor._lanes["prefill"].last = FakeEvent(gpu, "a slice")
    gpu.log.clear()
    assert executor.prepare_next()
    assert gpu.log[0] == (("waits for", "a slice"), ("decode", WHOLE_GPU))
    assert executor._lanes["decode"].last.stream == ("decode", WHOLE_GPU), "later slices can wait for it"


def test_nothing_is_captured_without_graphs(make: Make, gpu: FakeGpu) -> None:
    assert make(num_experts=8).lone_rows == 1, "padding reads experts"
    for sizes in ((1,), (1, 8)):
        plan = replace(PLAN, max_num_seqs=sizes[-1], decode=(DecodeSizes(None, sizes),))
        assert make(plan=plan, max_num_seqs=sizes[-1]).lone_rows == 1, "there is no graph for padding"
    gpu.log.clear()
    executor = make(cuda_graphs=False, ready="hot")
    assert done(gpu) == ["join"]
    assert (executor.capture, executor.lone_rows) == (None, 1)
    assert executor.max_batch_size(NARROW) is None, "nothing is captured, so nothing limits a batch"
    assert executor.num_missing_graphs == 0
    assert not executor.prepare_next()


# ---- single graphs ----


class FakeGraph:
    """Notes when it is captured."""

    log: list[str]

    def capture_begin(self, **_: object) -> None:
        assert not gc.isenabled(), "a collection may unload a kernel, which ends the capture"
        self.log.append("begin")

    def capture_end(self) -> None:
        self.log.append("end")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(FakeGraph, "log", log, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    return log


def piece_graphs(log: list[str]) -> PiecewiseGraphs:
    graphs = object.__new__(PiecewiseGraphs)
    graphs._graphs, graphs._pool, graphs._num_layers, graphs.buckets = {}, None, LAYERS, (16, 128)  # type: ignore[assignment]
    graphs.untimed, graphs._times_ms = [16, 128], {}
    graphs.pieces = SimpleNamespace(  # type: ignore[assignment]
        run=lambda layer, rows: log.append(f"{layer} of {rows}"), clear=lambda: log.append("clear")
    )
    return graphs


def test_kernels_of_pieces_are_loaded_before_the_first_layer_is_captured(log: list[str]) -> None:
    graphs = piece_graphs(log)
    for layer in range(LAYERS):
        graphs.capture_piece(16, layer)
    captured = [entry for layer in range(LAYERS) for entry in ("begin", f"{layer} of 16", "end")]
    assert log == ["clear", "1 of 16", *captured]
    assert gc.isenabled()


def test_a_short_forward_runs_in_pieces_once_its_size_is_there(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    graphs, times_ms = piece_graphs(log), [2.0, 1.0]

    def buckets() -> list[int | None]:
        return [graphs.bucket(rows) for rows in (1, 16, 17, 128, 129)]

    assert buckets() == [None] * 5
    for layer in range(LAYERS):
        assert graphs.bucket(100) is None, "some layers are missing"
        graphs.capture_piece(128, layer)
    # Not padded to a larger size than planned: its time grows with its rows.
    assert buckets() == [None, None, 128, 128, None]
    for layer in range(LAYERS):
        graphs.capture_piece(16, layer)
    assert buckets() == [16, 16, 128, 128, None]
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Mock(elapsed_time=lambda _: times_ms[0]))
    monkeypatch.setattr(graphs, "replay", lambda *_: None)
    for _ in range(2):
        graphs.time_next()
        del times_ms[0]
    assert buckets() == [128, 128, 128, 128, None]


def test_one_layer_of_a_step_is_run_before_it_is_captured_and_the_graph_is_used_from_then_on(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    graphs = object.__new__(DecodeGraphs)
    graphs._sizes, graphs._captured, graphs._padding_slot, graphs._pool = {}, {}, 0, None  # type: ignore[assignment]
    graphs._shares_prefixes = True
    monkeypatch.setattr(DecodeGraphs, "_functions_for", lambda *_: None)
    monkeypatch.setattr(DecodeGraphs, "_prepare", lambda *_: None)
    monkeypatch.setattr(DecodeGraphs, "_run", lambda *_, last=None: log.append(f"run to {last}"))
    for key in (GraphKey(16), GraphKey(4), GraphKey(8, NARROW), GraphKey(16)):
        graphs.capture_one(key, stream)  # type: ignore[arg-type]
    # Two graphs of the 16 rows, which may have blocks in common.
    assert log == ["run to 1", "begin", "run to None", "end"] * 6
    assert graphs._sizes == {WHOLE_GPU: (4, 16), NARROW: (8,)}
    keys = {(key, False) for key in (GraphKey(16), GraphKey(4), GraphKey(8, NARROW))}
    assert set(graphs._captured) == keys | {(GraphKey(16), True)}


@pytest.mark.parametrize("enabled", [True, False])
def test_a_failed_capture_is_ended_and_leaves_the_collector_as_it_was(enabled: bool, log: list[str]) -> None:
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), captured(None):
            {}[gc.isenabled()]
        assert gc.isenabled() == enabled
        assert log == ["begin", "end"]
    finally:
        (gc.enable if was else gc.disable)()
