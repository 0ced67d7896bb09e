"""The CUDA executor: decode steps from captured graphs, other forwards eagerly, on two lanes at the same time."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby

import numpy as np
import torch
from torch import Tensor

from bullet_graph.config import EngineConfig, ReadyName
from bullet_graph.errors import ConfigError
from bullet_graph.graphs.capture_plan import CaptureKey, CapturePlan, CaptureProgress, CaptureReport, PieceKey, hot_keys
from bullet_graph.graphs.compiled import PartCompiler, compile_now
from bullet_graph.graphs.decode_graph import DecodeGraphs, DecodeInputs
from bullet_graph.graphs.piecewise import PiecewiseGraphs
from bullet_graph.kernels.communicator import ALONE, Communicators
from bullet_graph.kernels.gpu import Gpu, wait_for_device
from bullet_graph.kernels.memory import Uploader
from bullet_graph.kernels.sampler import SamplingState, token_logprobs
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.progress import progress_bar
from bullet_graph.partition.backend import PartitionBackend
from bullet_graph.partition.masks import WHOLE_GPU, Lane, SmPartition
from bullet_graph.perf.start_report import StartClock
from bullet_graph.runtime.eager_lane import EagerForward, EagerLane
from bullet_graph.runtime.executor import Executor, clear_frames, gpu_lone_rows, keep_for_ever
from bullet_graph.runtime.rows import Rows, adjustments_row, lay_out, settings_row
from bullet_graph.runtime.step import Int32Array, Placement, SlotInit, Step, StepLogprobs, StepResult

_POLL_S = 20e-6
"""Time between two queries of the device. Sleeping lets other threads run; with work queued, nothing waits for it."""
_IDLE_S = 30.0  # a device that has not failed ends its launches sooner


def lane_stream(
    backend: PartitionBackend, lane: Lane, partition: SmPartition, device: torch.device
) -> torch.cuda.Stream:
    """The lane's stream, bound to the partition until the next call for the lane; captured graphs keep their SMs."""
    return torch.cuda.ExternalStream(backend.stream(lane, partition), device=device)


def decode_inputs(rows: Rows) -> DecodeInputs:
    """The inputs of a captured step, from rows that all decode."""
    blocks = rows.kv_indptr, rows.kv_indices
    return DecodeInputs(rows.decode_slots, rows.positions, rows.kv_lens, rows.kv_slots, *blocks)


@dataclass(frozen=True, slots=True)
class _PendingLaunch:
    """A launch under way, and the copies of its results to pinned memory, complete once ``finished`` has passed."""

    started: torch.cuda.Event
    finished: torch.cuda.Event
    token_ids: Tensor | None  # [sampled rows] int32
    logprobs: tuple[Tensor, Tensor, Tensor] | None  # those chosen, the top ids and the top ones
    prompt_logprobs: tuple[Tensor, Tensor, Tensor] | None

    def wait(self) -> StepResult:
        self.finished.synchronize()
        device_ms = self.started.elapsed_time(self.finished)
        if self.token_ids is None:
            return StepResult(np.empty(0, dtype=np.int32), None, device_ms)
        logprobs, prompt_logprobs = (
            None if of is None else StepLogprobs(of[0].numpy(), of[1].int().numpy(), of[2].numpy())
            for of in (self.logprobs, self.prompt_logprobs)
        )
        return StepResult(self.token_ids.numpy(), logprobs, device_ms, prompt_logprobs)


def _logprobs_to_host(of: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    chosen, top_ids, top = of
    return _to_host(chosen), _to_host(top_ids), _to_host(top)


def _to_host(tensor: Tensor) -> Tensor:
    """Start a copy into pinned memory on the current stream."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(slots=True)
class _Lane:
    """The parts of one lane, whose stream is bound to the partition of its last launch."""

    stream: torch.cuda.Stream
    eager: EagerLane
    slots: Uploader  # of settings
    forward: EagerForward | None = None  # stopped between two layers
    last: torch.cuda.Event | None = None  # has passed once all the lane's launches are done

    def write_slots(self, admitted: tuple[SlotInit, ...], state: SamplingState) -> None:
        """Enqueue the state from which sequences' sampling starts on the current stream."""
        slots = np.array([init.slot for init in admitted], dtype=np.int32)
        table = np.concatenate([settings_row(init) for init in admitted])
        device_slots, device_table = self.slots.upload(slots, table)
        state.settings[device_slots] = device_table.view(len(admitted), -1)
        for init in admitted:
            if init.adjustments is not None:
                state.write_adjustments(init.slot, adjustments_row(init.adjustments, state.vocab_size))


class CudaExecutor(Executor):
    """Runs a decoder on the NVIDIA GPU of its weights and KV cache.

    With ``ready`` "hot", :meth:`prepare_next` captures all but the hot graphs. Without ``cuda_graphs`` every step is
    launched kernel by kernel. The back end is closed with the executor. ``join_weights`` waits for the decoder's
    weights, which may still be loading. ``tuned_rows`` are the plan's rows of piecewise graphs that are known to be
    worthwhile; None: they are timed.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        *,
        backend: PartitionBackend,
        plan: CapturePlan,
        join_weights: Callable[[], None],
        clock: StartClock,
        progress: bool,
        compiler: PartCompiler = compile_now,
        tuned_rows: tuple[int, ...] | None = None,
        communicators: Communicators = ALONE,
    ) -> None:
        if tuned_rows is not None:
            plan = dataclasses.replace(plan, piecewise_rows=tuned_rows)
        device, max_num_seqs = decoder.cos_sin.device, config.max_num_seqs
        self._decoder = decoder
        self._backend = backend
        self._device = device
        self._pending: dict[int, _PendingLaunch] = {}
        self._tickets = count()
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.partitions = tuple(plan.batch_sizes)
        self.has_prefill_lane = config.policy.uses_prefill_lane
        self.lone_rows = gpu_lone_rows(config, decoder.config, plan.batch_sizes[WHOLE_GPU])
        # Weights and cache were made on the default stream. The other streams are still loading the weights.
        torch.cuda.default_stream(device).synchronize()
        stream = self._stream("decode", WHOLE_GPU)
        communicator = communicators.get("decode")
        self._layer_graphs: PiecewiseGraphs | None = None
        with torch.cuda.stream(stream), torch.inference_mode():
            self._state = SamplingState(max_num_seqs + 1, decoder.config.vocab_size, device)  # one for padded rows
            if config.cuda_graphs:
                ops = TritonOps(Gpu.of(device), communicator)
                self._layer_graphs = PiecewiseGraphs(
                    decoder, ops, buckets=plan.piecewise_rows, are_tuned=tuned_rows is not None
                )

        def lane(name: Lane, graphs: PiecewiseGraphs | None) -> _Lane:
            stream = self._stream(name, WHOLE_GPU)
            with torch.cuda.stream(stream), torch.inference_mode():
                eager = EagerLane(
                    decoder,
                    self._state,
                    max_num_seqs=max_num_seqs,
                    max_rows=config.max_forward_rows,
                    graphs=graphs,
                    communicator=communicators.get(name),
                )
                slots = Uploader(max_num_seqs * (self._state.settings.shape[1] + 1) + 8, device)
            return _Lane(stream, eager, slots)

        with clock.phase("kernels"):  # FlashInfer's are compiled, or loaded, here
            self._lanes: dict[Lane, _Lane] = {"decode": lane("decode", self._layer_graphs)}
            if self.has_prefill_lane:
                self._lanes["prefill"] = lane("prefill", None)
        self._graphs: DecodeGraphs | None = None
        self._captures: EngineGraphs | None = None
        self.capture: CaptureReport | None = None
        """The cost of capturing here."""
        if self._layer_graphs is not None:
            with torch.cuda.stream(stream), torch.inference_mode():
                self._graphs = DecodeGraphs(
                    decoder,
                    self._state,
                    max_batch_size=max_num_seqs,
                    shares_prefixes=config.prefix_caching,
                    compiler=compiler,
                    communicator=communicator,
                )
                self._captures = EngineGraphs(
                    self._graphs, self._layer_graphs, plan, num_layers=decoder.config.num_layers
                )
                self.capture = self._captures.capture_first(
                    config.ready, partial(self._stream, "decode"), clock, progress=progress
                )
        join_weights()
        torch.cuda.synchronize(device)  # both lanes need all of the above
        if self._layer_graphs is not None:
            with torch.cuda.stream(stream), torch.inference_mode():
                self._layer_graphs.pieces.clear()  # computed while weights were missing
        if config.ready == "all":
            with clock.phase("piecewise graphs"):  # timed only now, when nothing else runs on the GPU
                while self.prepare_next():
                    pass
        torch.cuda.synchronize(device)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Sizes, in rows, of forwards that run in piecewise CUDA graphs, rising."""
        return () if self._layer_graphs is None else self._layer_graphs.buckets

    @torch.inference_mode()
    def self_check_logits(self, token_ids: Int32Array, rows: Rows) -> Tensor:
        """Logits of a captured decode step, for the self-check; call it only before the first launch."""
        if self._graphs is None:
            raise RuntimeError("no decode steps were captured")
        stream, num_rows = self._stream("decode", WHOLE_GPU), len(token_ids)
        with torch.cuda.stream(stream):
            self._state.last_token[:num_rows] = torch.from_numpy(token_ids).to(self._state.last_token)
            self._graphs.run(decode_inputs(rows))
            logits = self._graphs.logits(num_rows).clone()
        # The reference runs on the default stream.
        stream.synchronize()
        return logits

    def max_batch_size(self, partition: SmPartition) -> int | None:
        return None if self._captures is None else self._captures.max_batch_size(partition)

    def padded_rows(self, rows: int) -> int:
        bucket = None if self._layer_graphs is None else self._layer_graphs.bucket(rows)
        return rows if bucket is None else bucket

    @property
    def num_missing_graphs(self) -> int:
        return 0 if self._captures is None else len(self._captures.missing)

    @torch.inference_mode()
    def prepare_next(self) -> bool:
        # A capture runs one layer of its step, on the decode lane and in turn with the prefill lane.
        captures = self._captures
        if captures is None or (partition := captures.next_partition) is None:
            return False
        lasts = [lane.last for lane in self._lanes.values() if lane.last is not None]
        # A time is measured with nothing else on the GPU.
        if captures.next is None and not all(last.query() for last in lasts):
            return True
        lane = self._lanes["decode"]
        with torch.cuda.stream(lane.stream):
            for last in lasts:
                lane.stream.wait_event(last)
            captures.prepare_next(self._stream("decode", partition))
            lane.last = torch.cuda.Event()
            lane.last.record()
        return True

    @torch.inference_mode()
    def launch(self, step: Step, placement: Placement) -> int:
        lane = self._lanes.get(placement.lane)
        if lane is None:
            raise ConfigError("this engine was made without a prefill lane: choose the policy when making it")
        stream = self._stream(placement.lane, placement.partition)
        if stream != lane.stream:  # green contexts have a stream for each partition
            stream.wait_stream(lane.stream)
            lane.stream = stream
        with torch.cuda.stream(stream):
            if placement.takes_turns:
                for name, other in self._lanes.items():
                    if name != placement.lane and other.last is not None:
                        stream.wait_event(other.last)
            started, finished = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            token_ids = logprobs = prompt_logprobs = None
            if (sampled := self._enqueue(step, placement, lane, started)) is not None:
                logits, sampled_ids, scores = sampled
                if scores is not None:
                    prompt_logprobs = _logprobs_to_host(scores)
                if step.num_logprobs is not None:
                    logprobs = _logprobs_to_host(token_logprobs(logits, sampled_ids, step.num_logprobs))
                token_ids = _to_host(sampled_ids)
            finished.record()
        lane.last = finished
        ticket = next(self._tickets)
        self._pending[ticket] = _PendingLaunch(started, finished, token_ids, logprobs, prompt_logprobs)
        return ticket

    def _enqueue(
        self, step: Step, placement: Placement, lane: _Lane, started: torch.cuda.Event
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None] | None:
        """Logits and token ids of the sampled rows, and scores; None for a forward that stops before its last layer."""
        whole_gpu = placement.partition == WHOLE_GPU
        if placement.first_layer == 0:
            if step.admitted:
                lane.write_slots(step.admitted, self._state)
            if step.bitmasks is not None:
                self._state.write_bitmasks(step.bitmasks.slots, step.bitmasks.words)
            rows = lay_out(step.prefill, step.decode, self._decoder.cache.block_tokens)
            if step.prefill is None and self._graphs is not None:
                token_ids = self._graphs.run(decode_inputs(rows), placement.partition, placement.least_rows, started)
                return self._graphs.logits(len(token_ids)), token_ids, None
            lane.forward = lane.eager.begin(rows, whole_gpu=whole_gpu)
        if lane.forward is None:
            raise RuntimeError(f"layer {placement.first_layer} of a forward that was not begun")
        started.record()
        lane.forward = lane.eager.run_layers(
            lane.forward, placement.first_layer, placement.last_layer, whole_gpu=whole_gpu
        )
        if placement.last_layer is not None:
            return None
        # First, so that its logits are freed before those of the sampled rows are made.
        scores = lane.eager.score(lane.forward)
        logits, token_ids = lane.eager.finish(lane.forward)
        lane.forward = None
        return logits, token_ids, scores

    def wait_any(self, tickets: Sequence[int], until_s: float | None) -> int | None:
        while True:
            for ticket in tickets:
                if self._pending[ticket].finished.query():
                    return ticket
            if until_s is not None and time.perf_counter() >= until_s:
                return None
            time.sleep(_POLL_S)

    def wait(self, ticket: int) -> StepResult:
        result = self._pending[ticket].wait()
        # Only now: after a failure, its traceback alone would keep the pinned memory alive.
        del self._pending[ticket]
        return result

    def drain(self) -> None:
        torch.cuda.synchronize(self._device)
        self._pending.clear()

    def shutdown(self, failure: BaseException | None = None) -> None:
        try:
            wait_for_device(self._device, _IDLE_S)
        except (RuntimeError, TimeoutError):
            # The device has failed for the whole process; the cause was reported when it happened. Graphs and pinned
            # buffers are kept for ever: the driver takes the memory back when the process ends.
            keep_for_ever(self.__dict__.copy())
            keep_for_ever(failure)
            self.__dict__.clear()
            return
        backend = self._backend
        self.__dict__.clear()
        # Frames may hold pinned memory, and to free that records an event on its streams: they must still exist.
        clear_frames(failure)
        backend.close()
        torch.cuda.empty_cache()

    def _stream(self, lane: Lane, partition: SmPartition) -> torch.cuda.Stream:
        return lane_stream(self._backend, lane, partition, self._device)


class EngineGraphs(CaptureProgress):
    """Captures a plan's graphs, in the order of :func:`~bullet_graph.graphs.capture_plan.capture_order`.

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
        if (key := self.next) is not None:
            return key.partition
        return WHOLE_GPU if self._pieces.untimed else None

    def prepare_next(self, stream: torch.cuda.Stream) -> None:
        """Capture the next graph on this stream; once all are captured, time the next size of piecewise graphs."""
        if (key := self.next) is not None:
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
