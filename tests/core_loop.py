"""The engine's core on two simulated lanes, every launch checked on the way."""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import planner_loads
from hypothesis import strategies as st
from paged_device import PagedDevice, check_blocks, generate_alone

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.engine.core import EngineCore
from bullet_graph.engine.output import OutputKind, RequestOutput
from bullet_graph.engine.request import Request, Sample
from bullet_graph.engine.scheduler import Scheduler
from bullet_graph.engine.sequence import Sequence
from bullet_graph.partition.masks import LANES, SMS_PER_TPC, Lane, SmPartition, lane_masks, partition_of
from bullet_graph.planner.planner import Planner
from bullet_graph.runtime.simulated import SimulatedExecutor
from bullet_graph.runtime.step import Placement, Step, StepResult
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo

MODEL = planner_loads.model()
NUM_LAYERS = MODEL.num_layers

Arrival = tuple[float, int, int, Slo]
"""When a request comes, the lengths of its prompt and output, and its targets."""


@dataclass(frozen=True)
class Launch:
    """One call of the executor, and what was known of it."""

    ticket: int
    step: Step
    placement: Placement
    time_s: float

    @property
    def slots(self) -> frozenset[int]:
        batches = (self.step.prefill, self.step.decode)
        return frozenset(slot for batch in batches if batch is not None for slot in batch.slots.tolist())

    @property
    def rows(self) -> int:
        """Of the step."""
        prefill, decode = self.step.prefill, self.step.decode
        return (0 if prefill is None else len(prefill.token_ids)) + (0 if decode is None else len(decode.slots))


@dataclass
class CheckedExecutor(SimulatedExecutor):
    """A simulated executor with the tokens of :class:`PagedDevice`; refuses what no device may be asked for."""

    host_overhead_ms: float = 0.1
    max_in_flight: int = SimulatedExecutor.max_in_flight
    device: PagedDevice = field(default_factory=lambda: PagedDevice(KV_BLOCK_TOKENS))
    launches: list[Launch] = field(default_factory=list)
    in_flight: dict[Lane, deque[Launch]] = field(default_factory=lambda: {lane: deque() for lane in LANES})
    max_batch_sizes: Mapping[SmPartition, int] = field(default_factory=dict)
    row_step: int = 1
    """Forwards with prompt rows are padded to multiples of it."""

    def __post_init__(self) -> None:
        super().__init__(
            MODEL,
            partitions=[partition_of(sms, num_sms=MODEL.num_sms) for sms in MODEL.decode_sms],
            host_overhead_ms=self.host_overhead_ms,
            max_batch_sizes=self.max_batch_sizes,
        )
        self._under_way: Step | None = None
        """The chunk on the prefill lane whose last layers are not launched."""
        self._device_tickets: dict[int, int] = {}
        self._last_turn: dict[Lane, int] = dict.fromkeys(LANES, -1)

    def padded_rows(self, rows: int) -> int:
        return -(-rows // self.row_step) * self.row_step

    def launch(self, step: Step, placement: Placement) -> int:
        lane = placement.lane
        assert len(self.in_flight[lane]) < self.max_in_flight, "too much in flight"
        self._check_slices(step, placement)
        self._check_turns(step, placement)
        now_s = self.now()
        ticket = super().launch(step, placement)  # checks that layers follow on one another
        launch = Launch(ticket, step, placement, now_s)
        self.launches.append(launch)
        self.in_flight[lane].append(launch)
        if placement.takes_turns:
            self._last_turn[lane] = ticket
        if placement.first_layer == 0:
            # Its blocks are in use from here until the last slice has been waited for.
            self._device_tickets[id(step)] = self.device.launch(step, lane)
        return ticket

    def _check_slices(self, step: Step, placement: Placement) -> None:
        if placement.lane == "decode":
            assert (placement.first_layer, placement.last_layer) == (0, None), "decode steps are whole"
            slices = self.in_flight["prefill"]
            ends_chunk = bool(slices) and slices[-1].placement.last_layer is None
            assert not (ends_chunk and self.in_flight["decode"]), "first tokens would wait for this step"
            assert self._under_way is None or step.prefill is None, "prompt rows beside a chunk under way"
            return
        assert step.prefill is not None
        assert step.decode is None
        if placement.first_layer:
            assert step is self._under_way, "a slice of another chunk"
        else:
            assert self._under_way is None, "a second chunk before the first one's last slice"
        self._under_way = None if placement.last_layer is None else step

    def _check_turns(self, step: Step, placement: Placement) -> None:
        """What shares SMs or sequences with a launch on the other lane comes after it."""
        lane = placement.lane
        other: Lane = "prefill" if lane == "decode" else "decode"
        launch = Launch(-1, step, placement, 0.0)
        for flight in self.in_flight[other]:
            # By itself, or because a launch before it on its own lane did.
            comes_after = placement.takes_turns or self._last_turn[lane] > flight.ticket
            shared = self._sms(placement.partition, lane) & self._sms(flight.placement.partition, other)
            assert comes_after or not shared, "both lanes at once on the same SMs"
            assert comes_after or not launch.slots & flight.slots, "both lanes at once on the same sequence"

    def _sms(self, partition: SmPartition, lane: Lane) -> int:
        return lane_masks(partition, num_tpcs=MODEL.num_sms // SMS_PER_TPC)[lane].bits

    def wait(self, ticket: int) -> StepResult:
        (lane,) = (lane for lane, flights in self.in_flight.items() if flights and flights[0].ticket == ticket)
        launch = self.in_flight[lane].popleft()
        device_ms = super().wait(ticket).device_ms
        if launch.placement.last_layer is not None:
            return StepResult(np.empty(0, dtype=np.int32), None, device_ms)
        return StepResult(self.device.wait(self._device_tickets.pop(id(launch.step))).token_ids, None, device_ms)


def arrivals(targets: Rows[Slo], *, max_output: int) -> st.SearchStrategy[list[Arrival]]:
    """Up to twelve requests in order of arrival, most of them at once, short or long."""
    gaps = st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.3])
    prompts = st.integers(1, 60) | st.integers(1, 900)
    request = st.tuples(gaps, prompts, st.integers(1, max_output), st.sampled_from(targets))

    def at_their_times(found: list[Arrival]) -> list[Arrival]:
        times = accumulate(gap_s for gap_s, *_ in found)
        return [(time_s, *rest) for time_s, (_, *rest) in zip(times, found, strict=True)]  # type: ignore[misc]

    return st.lists(request, min_size=1, max_size=12).map(at_their_times)


class CoreLoop:
    """Adds requests at their times, aborts some, steps to the end, and checks the books after each step.

    Its planner may be a policy's name. Prompts are the beginnings of ``num_texts`` texts; None: of one each.
    """

    def __init__(
        self,
        planner: Planner | str,
        *,
        num_kv_blocks: int = 1000,
        max_num_seqs: int = 16,
        max_model_len: int = 1024,
        executor: CheckedExecutor | None = None,
        num_texts: int | None = None,
    ) -> None:
        self.num_texts = num_texts
        self.executor = CheckedExecutor() if executor is None else executor
        self.core = EngineCore(
            self.executor,
            planner_loads.planner(planner) if isinstance(planner, str) else planner,
            Scheduler(
                num_blocks=num_kv_blocks, max_num_seqs=max_num_seqs, max_model_len=max_model_len, prefix_caching=True
            ),
            num_layers=NUM_LAYERS,
        )
        self.max_num_seqs = max_num_seqs
        self.sequences: dict[str, Sequence] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.num_steps = 0

    def add(
        self,
        prompt_tokens: int,
        output_tokens: int,
        *,
        slo: Slo = NO_TARGETS,
        arrival_s: float | None = None,
        scored: int | None = None,
        matcher: Any = None,
    ) -> str:
        index = len(self.sequences)
        name, arrival = f"request-{index}", self.executor.now() if arrival_s is None else arrival_s
        prompt = np.arange(prompt_tokens, dtype=np.int32) + 10 * (index % (self.num_texts or index + 1))
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output_tokens, prompt_logprobs=scored)
        sequence = Sequence(name, 0, prompt, params, 100 + index, frozenset(), slo, arrival, matcher=matcher)
        self.sequences[name] = sequence
        self.core.add(Request([Sample(sequence, None)], OutputKind.FINAL_ONLY))
        return name

    def abort(self, name: str) -> None:
        output = self.core.abort(name)
        if output is not None:
            self.outputs[name] = output

    def step(self, until_s: float | None = None) -> None:
        self.num_steps += 1
        for output in self.core.step(until_s):
            assert output.request_id not in self.outputs, "reported after its end"
            self.outputs[output.request_id] = output
        self.check_books()

    def run(self, *, arrivals: Rows[Arrival] = (), max_steps: int = 30_000) -> None:
        """Serve these requests, in order of arrival, and all others."""
        waiting = deque(arrivals)
        while waiting or self.core.has_unfinished_requests():
            assert self.num_steps < max_steps, "it does not come to an end"
            if waiting and not self.core.has_unfinished_requests():
                self.executor.sleep_until(waiting[0][0])
            while waiting and waiting[0][0] <= self.executor.now():
                arrival_s, prompt_tokens, output_tokens, slo = waiting.popleft()
                self.add(prompt_tokens, output_tokens, slo=slo, arrival_s=arrival_s)
            self.step(waiting[0][0] if waiting else None)
        self.check_end()

    def check_books(self) -> None:
        check_blocks(self.core.scheduler.pool, self.max_num_seqs, self.sequences.values())

    def check_end(self) -> None:
        """Each request has the tokens it would have alone, and nothing is left behind."""
        assert self.outputs.keys() == self.sequences.keys()
        for name, sequence in self.sequences.items():
            (completion,) = self.outputs[name].outputs
            alone = generate_alone(sequence.seed, sequence.prompt_token_ids.tolist(), sequence.params.max_tokens)
            if completion.finish_reason == "abort":
                alone = alone[: len(completion.token_ids)]
            assert list(completion.token_ids) == alone
            metrics = self.outputs[name].metrics
            times_s = (metrics.arrival_s, metrics.first_scheduled_s or metrics.arrival_s, *metrics.token_times_s)
            assert list(times_s) == sorted(times_s)
            # Each token takes as long as weights are read, but the host may see two at once.
            assert times_s[-1] - times_s[0] >= 0.003 * len(metrics.token_times_s)
        stats = self.core.stats()
        assert stats.kv_blocks_peak <= stats.kv_blocks_total
        assert (stats.kv_blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.num_output_tokens == sum(len(o.outputs[0].token_ids) for o in self.outputs.values())
        assert not any(self.executor.in_flight.values())
        assert not self.core.in_flight
