"""The simulated executor: two lanes in virtual time, with the speed that a performance model predicts. No torch."""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType

import numpy as np

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.errors import PartitionError
from bullet_graph.kernels.shared_blocks import saved_blocks, shared_blocks
from bullet_graph.partition.masks import LANES, WHOLE_GPU, Lane, SmPartition, lane_sms
from bullet_graph.perf.performance import PerformanceModel
from bullet_graph.runtime.executor import Executor
from bullet_graph.runtime.step import DecodeBatch, Placement, Step, StepResult


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step, in the terms of the performance model.

    ``tokens`` prompt rows have ``pairs`` (query, key) pairs; ``batch_size`` decode rows attend to ``kv_tokens`` in all,
    less what common blocks save.
    """

    tokens: int
    pairs: float
    batch_size: int
    kv_tokens: int
    num_sampled: int

    @classmethod
    def of(cls, step: Step, *, samples: bool) -> "StepWork":
        """The work of this step; ``samples``: it includes the last layer, so that tokens are sampled."""
        pairs, kv_tokens, num_sampled, batch_size = 0.0, 0, 0, step.decode_rows
        if step.prefill is not None:
            pairs = step.prefill.attention_pairs
            num_sampled = int(np.count_nonzero(step.prefill.samples))
        if step.decode is not None:
            kv_tokens = int(step.decode.positions.sum()) + batch_size
        return cls(step.prefill_rows, pairs, batch_size, kv_tokens, num_sampled + batch_size if samples else 0)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A finished launch: its lane, partition and layers, the work of its whole step, and its time on the device."""

    placement: Placement
    work: StepWork
    device_ms: float


@dataclass(slots=True)
class _Job:
    """A launch in flight."""

    ticket: int
    placement: Placement
    work: StepWork
    alone_ms: float  # of its whole step, all layers, alone on the device
    left: float  # share of the step's layers
    start_s: float | None = None


class SimulatedExecutor(Executor):
    """Carries out steps in virtual time, which passes while the caller launches, waits or sleeps.

    Each lane runs its launches in order. A launch runs at the predicted speed: alone, or beside the other lane while
    both run on parts of the GPU. If one of them may use the whole GPU and neither takes turns, each gets half of the
    time. Sampled tokens are all 0, and there are no log-probabilities.

    Besides the whole GPU, steps may run on ``partitions``; one that is not in ``max_batch_sizes`` takes any batch. The
    device continues for ``host_overhead_ms`` a launch. The host then takes ``eager_layer_ms`` for each layer of a
    forward with prompt rows that takes the device longer than the host; faster ones are captured. With ``block_bytes``,
    those of a KV block's keys and values in a layer, decode rows read the blocks they have in common in less time.
    """

    def __init__(
        self,
        model: PerformanceModel,
        *,
        partitions: Sequence[SmPartition] = (),
        max_batch_sizes: Mapping[SmPartition, int] = MappingProxyType({}),
        host_overhead_ms: float = 0.0,
        eager_layer_ms: float = 0.0,
        block_bytes: int | None = None,
        on_step: Callable[[StepRecord], object] = lambda _: None,
    ) -> None:
        self._model = model
        self._max_batch_sizes = max_batch_sizes
        self._on_step = on_step
        self._block_bytes = block_bytes
        self.num_sms = model.num_sms
        self.partitions: Sequence[SmPartition] = tuple(dict.fromkeys((WHOLE_GPU, *partitions)))
        self._host_overhead_s = host_overhead_ms / 1e3
        self._eager_ms = model.num_layers * eager_layer_ms
        self._now_s = 0.0
        self._lanes: dict[Lane, deque[_Job]] = {lane: deque() for lane in LANES}
        self._next_layer: dict[Lane, int] = dict.fromkeys(LANES, 0)
        self._tickets = count()
        self._results: dict[int, StepResult] = {}
        self._pair: tuple[int, int] | None = None
        self._pair_ms: dict[Lane, float] = {}

    def max_batch_size(self, partition: SmPartition) -> int | None:
        return self._max_batch_sizes.get(partition)

    def launch(self, step: Step, placement: Placement) -> int:
        """Enqueue a step; PartitionError or ValueError for what no device could run as placed."""
        if placement.partition not in self.partitions:
            raise PartitionError(
                f"a step was placed on {placement.partition}, but this device has {list(self.partitions)}: "
                "name the partition when the executor is made"
            )
        lane, num_layers = placement.lane, self._model.num_layers
        stop = num_layers if placement.last_layer is None else placement.last_layer
        if placement.first_layer != self._next_layer[lane] or not placement.first_layer <= stop <= num_layers:
            raise ValueError(
                f"the {lane} lane goes on at layer {self._next_layer[lane]} of {num_layers}, but layers "
                f"{placement.first_layer} to {stop} were launched"
            )
        self._next_layer[lane] = 0 if placement.last_layer is None else stop
        work = StepWork.of(step, samples=placement.last_layer is None)
        most = self.max_batch_size(placement.partition)
        if step.prefill is None and most is not None and work.batch_size > most:
            raise PartitionError(
                f"a decode step of {work.batch_size} rows was placed on {placement.partition}, where at most {most} "
                "are captured: place it on the whole GPU"
            )
        if step.decode is not None and self._block_bytes is not None:
            saved = self._saved_tokens(step.decode, self._block_bytes, placement)
            work = dataclasses.replace(work, kv_tokens=work.kv_tokens - saved)
        alone_ms = self._alone_ms(work, placement)
        self._advance(self._now_s + self._host_overhead_s)
        ticket = next(self._tickets)
        share = (stop - placement.first_layer) / num_layers
        self._lanes[lane].append(_Job(ticket, placement, work, alone_ms, share))
        if work.tokens and 0 < self._eager_ms < alone_ms:
            self._advance(self._now_s + share * self._eager_ms / 1e3)
        return ticket

    def wait_any(self, tickets: Sequence[int], until_s: float | None) -> int | None:
        """See :meth:`Executor.wait_any`; KeyError: none of the tickets is in flight or waits to be read."""
        while True:
            for ticket in tickets:
                if ticket in self._results:
                    return ticket
            next_s = min((self._now_s + job.left * ms / 1e3 for job, ms in self._active()), default=None)
            if until_s is not None and (next_s is None or next_s > until_s):
                self._advance(until_s)
                return None
            if next_s is None:
                raise KeyError(f"none of the launches {list(tickets)} is under way")
            self._advance(next_s)

    def wait(self, ticket: int) -> StepResult:
        self.wait_any([ticket], None)
        return self._results.pop(ticket)

    def now(self) -> float:
        return self._now_s

    def sleep_until(self, time_s: float) -> None:
        self._advance(time_s)

    def drain(self) -> None:
        for jobs in self._lanes.values():
            jobs.clear()
        self._results.clear()

    def shutdown(self, failure: BaseException | None = None) -> None:
        del failure
        self.drain()

    # ---- how long things take ----

    @staticmethod
    def _saved_tokens(decode: DecodeBatch, block_bytes: int, placement: Placement) -> int:
        shared = shared_blocks(decode.kv_indptr, decode.kv_indices)
        if shared is None:
            return 0
        cached, by_groups = saved_blocks(shared, decode.kv_indptr, decode.kv_indices, block_bytes)
        # Parts of the GPU have no graphs with groups.
        return int(KV_BLOCK_TOKENS * (cached + (by_groups if placement.partition == WHOLE_GPU else 0.0)))

    def _alone_ms(self, work: StepWork, placement: Placement) -> float:
        lane, partition = placement.lane, placement.partition
        if work.batch_size and lane == "prefill":
            raise ValueError("decode rows were launched on the prefill lane: they run on the decode lane alone")
        if work.tokens and lane == "decode" and partition != WHOLE_GPU:
            raise PartitionError(
                f"prompt rows were placed on {partition} in the decode lane, but the performance model knows them "
                "there on the whole GPU only: place them on it, or in the prefill lane"
            )
        sms = lane_sms(partition, lane)
        if not work.batch_size:
            return self._model.prefill(work.tokens, work.pairs, sms).ms
        if not work.tokens:
            return self._model.decode(max(work.batch_size, placement.least_rows), work.kv_tokens, sms).ms
        return self._model.mixed(work.tokens, work.pairs, work.batch_size, work.kv_tokens).ms

    def _beside_ms(self, decode: _Job, prefill: _Job) -> dict[Lane, float]:
        """Times of both lanes' whole steps while both run; if they are on two partitions, each on its own."""
        decode_sms = lane_sms(decode.placement.partition)
        prefill_sms = lane_sms(prefill.placement.partition, "prefill")
        if decode_sms is None or prefill_sms is None:
            return {"decode": 2 * decode.alone_ms, "prefill": 2 * prefill.alone_ms}
        rows, prompts = decode.work, prefill.work
        first, second = (
            self._model.split(sms, rows.batch_size, rows.kv_tokens, prompts.tokens, prompts.pairs)
            for sms in (decode_sms, self._model.num_sms - prefill_sms)
        )
        return {"decode": first.decode_ms, "prefill": second.prefill_ms}

    # ---- the passing of time ----

    def _active(self) -> list[tuple[_Job, float]]:
        """The jobs that run now, each with the time of its whole step at its present speed, in ms."""
        heads = {lane: jobs[0] for lane, jobs in self._lanes.items() if jobs}
        running = {
            lane: job
            for lane, job in heads.items()
            if not (job.placement.takes_turns and any(other.ticket < job.ticket for other in heads.values()))
        }
        if len(running) < 2:
            return [(job, job.alone_ms) for job in running.values()]
        decode, prefill = running["decode"], running["prefill"]
        if self._pair != (decode.ticket, prefill.ticket):
            self._pair = (decode.ticket, prefill.ticket)
            self._pair_ms = self._beside_ms(decode, prefill)
        return [(job, self._pair_ms[lane]) for lane, job in running.items()]

    def _advance(self, until_s: float) -> None:
        """Let the lanes run to this time; a time in the past changes nothing."""
        while active := self._active():
            for job, _ in active:
                if job.start_s is None:
                    job.start_s = self._now_s
            ends = [self._now_s + job.left * ms / 1e3 for job, ms in active]
            end_s = min(ends)
            if end_s > until_s:
                break
            self._run(active, end_s)
            self._complete(active[ends.index(end_s)][0])
        if until_s > self._now_s:
            self._run(active, until_s)

    def _run(self, active: list[tuple[_Job, float]], until_s: float) -> None:
        for job, ms in active:
            if job.left:
                job.left = max(job.left - (until_s - self._now_s) * 1e3 / ms, 0.0)
        self._now_s = until_s

    def _complete(self, job: _Job) -> None:
        self._lanes[job.placement.lane].popleft()
        assert job.start_s is not None
        device_ms, work = (self._now_s - job.start_s) * 1e3, job.work
        self._results[job.ticket] = StepResult(
            token_ids=np.zeros(work.num_sampled, dtype=np.int32), logprobs=None, device_ms=device_ms
        )
        self._on_step(StepRecord(job.placement, work, device_ms))
