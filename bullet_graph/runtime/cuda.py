"""The CUDA executor: decode from captured graphs, all else eagerly, on two lanes that run at the same time."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from bullet_graph.config import ReadyName
from bullet_graph.errors import ConfigError
from bullet_graph.graphs.capture_plan import CapturePlan
from bullet_graph.graphs.decode_graph import DecodeGraphs, DecodeInputs
from bullet_graph.graphs.engine_graphs import EngineGraphs
from bullet_graph.graphs.piecewise import PiecewiseGraphs
from bullet_graph.graphs.report import CaptureReport
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.decoder import Decoder
from bullet_graph.partition.masks import WHOLE_GPU, Lane, SmPartition
from bullet_graph.perf.start_report import StartClock
from bullet_graph.runtime.artifacts.use import Captures
from bullet_graph.runtime.cuda_lane import CudaLane
from bullet_graph.runtime.executor import keep_for_ever
from bullet_graph.runtime.launcher import Launcher
from bullet_graph.runtime.pending import PendingLaunch
from bullet_graph.runtime.rows import lay_out
from bullet_graph.runtime.self_check import SelfCheckStep
from bullet_graph.runtime.step import Placement, Step, StepResult

_POLL_S = 20e-6
"""Between two looks at the device; sleeping lets other threads run, and with work ahead nothing waits for it."""


class CudaExecutor:
    """Runs a decoder on one NVIDIA GPU.

    Args:
        decoder: weights and cache on the GPU.
        max_num_seqs: slots; one more is kept for padded rows.
        max_rows: most rows of a forward.
        num_kv_blocks: blocks of the cache.
        launcher: the lanes' streams; closed with the executor.
        plan: whose partitions steps may be placed on, and what is captured for them.
        cuda_graphs: capture what the plan says; else all is launched kernel by kernel.
        prefill_lane: there will be steps on the prefill lane.
        ready: capture ``all`` of it here, or what is ``hot``, and the rest by :meth:`prepare_next`.
        join_weights: waits until the decoder's weights are filled, which may go on meanwhile.
        clock: told of each phase.
        progress: show a progress bar while capturing.
        artifacts: gives compiled halves and what was tuned before; None: there is nothing of it.

    Attributes:
        capture: what capturing cost here, or None.
    """

    max_in_flight = 2

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_num_seqs: int,
        max_rows: int,
        num_kv_blocks: int,
        launcher: Launcher,
        plan: CapturePlan,
        cuda_graphs: bool,
        prefill_lane: bool,
        ready: ReadyName,
        join_weights: Callable[[], None],
        clock: StartClock,
        progress: bool,
        artifacts: Captures | None = None,
    ) -> None:
        artifacts = Captures() if artifacts is None else artifacts
        worthwhile = artifacts.row_buckets(plan) if cuda_graphs else None
        if worthwhile is not None:
            plan = dataclasses.replace(plan, piecewise_rows=worthwhile)
        device = decoder.cos_sin.device
        self._decoder = decoder
        self._launcher = launcher
        self._padding_slot = max_num_seqs
        self._pending: dict[int, PendingLaunch] = {}
        self._next_ticket = 0
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.partitions = tuple(plan.batch_sizes)
        self.has_prefill_lane = prefill_lane
        # Weights and cache were made on the default stream; the device as a whole is busy with filling the weights.
        torch.cuda.default_stream(device).synchronize()
        stream = launcher.stream("decode", WHOLE_GPU)
        with torch.cuda.stream(stream), torch.inference_mode():
            self._state = SamplingState(max_num_seqs + 1, device)

        self._layer_graphs: PiecewiseGraphs | None = None
        if cuda_graphs:
            with torch.cuda.stream(stream), torch.inference_mode():
                self._layer_graphs = PiecewiseGraphs(decoder, TritonOps(), buckets=plan.piecewise_rows)

        def lane(name: Lane, graphs: PiecewiseGraphs | None) -> CudaLane:
            return CudaLane.open(
                launcher.stream(name, WHOLE_GPU),
                decoder,
                self._state,
                max_num_seqs=max_num_seqs,
                max_rows=max_rows,
                num_kv_blocks=num_kv_blocks,
                graphs=graphs,
            )

        with clock.phase("kernels"):  # FlashInfer's are compiled, or loaded, here
            self._lanes: dict[Lane, CudaLane] = {"decode": lane("decode", self._layer_graphs)}
            if prefill_lane:
                self._lanes["prefill"] = lane("prefill", None)
        self._graphs: DecodeGraphs | None = None
        self._captures: EngineGraphs | None = None
        self.capture: CaptureReport | None = None
        if self._layer_graphs is not None:
            with torch.cuda.stream(stream), torch.inference_mode():
                self._graphs = DecodeGraphs(
                    decoder,
                    self._state,
                    max_batch_size=max_num_seqs,
                    num_kv_blocks=num_kv_blocks,
                    padding_slot=self._padding_slot,
                    compiler_for=artifacts.compiler_for,
                )
                self._captures = EngineGraphs(
                    self._graphs,
                    self._layer_graphs,
                    plan,
                    num_layers=decoder.config.num_layers,
                    is_tuned=worthwhile is not None,
                )
                self.capture = self._captures.capture_first(
                    ready, partial(launcher.stream, "decode"), clock, progress=progress
                )
        join_weights()
        torch.cuda.synchronize(device)  # the lanes begin with all that both of them need
        if self._layer_graphs is not None:
            with torch.cuda.stream(stream), torch.inference_mode():
                self._layer_graphs.pieces.clear()  # what was run with half of the weights
        if ready == "all":
            with clock.phase("short forwards"):  # only now, with the GPU to themselves, they can be timed
                while self.prepare_next():
                    pass
        torch.cuda.synchronize(device)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Rows of short forwards that run in captured pieces, rising."""
        return () if self._layer_graphs is None else self._layer_graphs.buckets

    @torch.inference_mode()
    def self_check_logits(self, step: SelfCheckStep) -> torch.Tensor:
        """Logits of a captured decode step, for the self-check; only between the start and the first launch."""
        if self._graphs is None:
            raise RuntimeError("no decode steps were captured")
        stream = self._launcher.stream("decode", WHOLE_GPU)
        slots = np.arange(len(step.token_ids), dtype=np.int32)
        with torch.cuda.stream(stream):
            self._state.last_token[: len(slots)] = torch.from_numpy(step.token_ids).to(self._state.last_token)
            self._graphs.run(
                DecodeInputs(slots, step.positions, step.kv_slots, step.kv_indptr, step.kv_indices)
            )
            logits = self._graphs.logits(len(slots)).clone()
        # The reference runs on the default stream.
        stream.synchronize()
        return logits

    def max_batch_size(self, partition: SmPartition) -> int | None:
        """See :meth:`Executor.max_batch_size`."""
        return None if self._captures is None else self._captures.max_batch_size(partition)

    def padded_rows(self, rows: int) -> int:
        """See :meth:`Executor.padded_rows`."""
        bucket = None if self._layer_graphs is None else self._layer_graphs.bucket(rows)
        return rows if bucket is None else bucket

    @property
    def num_missing_graphs(self) -> int:
        """See :attr:`Executor.num_missing_graphs`."""
        return 0 if self._captures is None else self._captures.num_missing

    @torch.inference_mode()
    def prepare_next(self) -> bool:
        """See :meth:`Executor.prepare_next`.

        A capture runs one layer of its step, on the decode lane and in turn with the prefill lane.
        """
        captures = self._captures
        if captures is None or (partition := captures.next_partition) is None:
            return False
        lasts = [lane.last for lane in self._lanes.values() if lane.last is not None]
        if captures.next_needs_quiet and not all(last.query() for last in lasts):
            return True
        lane = self._lanes["decode"]
        with torch.cuda.stream(lane.stream):
            for last in lasts:
                lane.stream.wait_event(last)
            captures.prepare_next(self._launcher.stream("decode", partition))
            lane.last = torch.cuda.Event()
            lane.last.record()
        return True

    @torch.inference_mode()
    def launch(self, step: Step, placement: Placement) -> int:
        """See :meth:`Executor.launch`.

        Raises:
            ConfigError: the executor was made without a prefill lane, or without graphs for the partition.
        """
        lane = self._lanes.get(placement.lane)
        if lane is None:
            raise ConfigError("this engine was made without a prefill lane: choose the policy when making it")
        stream = self._launcher.stream(placement.lane, placement.partition)
        if stream != lane.stream:  # green contexts have a stream for each partition
            stream.wait_stream(lane.stream)
            lane.stream = stream
        with torch.cuda.stream(stream):
            if placement.takes_turns:
                for name, other in self._lanes.items():
                    if name != placement.lane and other.last is not None:
                        stream.wait_event(other.last)
            started = torch.cuda.Event(enable_timing=True)
            started.record()
            pending = self._enqueue(step, placement, lane, started)
            pending.finished.record()
        lane.last = pending.finished
        ticket = self._next_ticket
        self._next_ticket += 1
        self._pending[ticket] = pending
        return ticket

    def _enqueue(
        self, step: Step, placement: Placement, lane: CudaLane, started: torch.cuda.Event
    ) -> PendingLaunch:
        finished = torch.cuda.Event(enable_timing=True)
        whole_gpu = placement.partition == WHOLE_GPU
        if placement.first_layer == 0:
            if step.admitted:
                lane.write_slots(step.admitted, self._state.settings)
            rows = lay_out(step.prefill, step.decode, self._decoder.cache.block_tokens)
            if step.prefill is None and self._graphs is not None:
                inputs = DecodeInputs(
                    rows.decode_slots, rows.positions, rows.kv_slots, rows.kv_indptr, rows.kv_indices
                )
                token_ids = self._graphs.run(inputs, placement.partition)
                logits = self._graphs.logits(len(token_ids))
                return PendingLaunch.sampling(started, finished, step, logits, token_ids)
            lane.forward = lane.eager.begin(rows, whole_gpu=whole_gpu)
        if lane.forward is None:
            raise RuntimeError(f"layer {placement.first_layer} of a forward that was not begun")
        lane.forward = lane.eager.run_layers(
            lane.forward, placement.first_layer, placement.last_layer, whole_gpu=whole_gpu
        )
        if placement.last_layer is not None:
            return PendingLaunch(started, finished, None, None)
        logits, token_ids = lane.eager.finish(lane.forward)
        lane.forward = None
        return PendingLaunch.sampling(started, finished, step, logits, token_ids)

    def done(self, ticket: int) -> bool:
        """See :meth:`Executor.done`."""
        return bool(self._pending[ticket].finished.query())

    def wait_any(self, tickets: Sequence[int], until_s: float | None) -> int | None:
        """See :meth:`Executor.wait_any`."""
        while True:
            for ticket in tickets:
                if self.done(ticket):
                    return ticket
            if until_s is not None and time.perf_counter() >= until_s:
                return None
            time.sleep(_POLL_S)

    def wait(self, ticket: int) -> StepResult:
        """See :meth:`Executor.wait`."""
        result = self._pending[ticket].wait()
        # Not before: a failure's traceback would be all that keeps its pinned memory.
        del self._pending[ticket]
        return result

    def now(self) -> float:
        """See :meth:`Executor.now`."""
        return time.perf_counter()

    def sleep_until(self, time_s: float) -> None:
        """See :meth:`Executor.sleep_until`."""
        time.sleep(max(time_s - time.perf_counter(), 0.0))

    def shutdown(self) -> bool:
        """See :meth:`Executor.shutdown`."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            # The device has failed, for good and for the whole process; what of was told when it happened. Graphs and
            # pinned buffers are kept for ever: the driver takes the memory back when the process ends.
            keep_for_ever(self.__dict__.copy())
            self.__dict__.clear()
            return False
        launcher = self._launcher
        self.__dict__.clear()
        launcher.close()
        return True
