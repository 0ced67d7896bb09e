"""The loop: plans, launches and retires steps on both lanes. It knows no tokenizer, weights or device."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import compress

from bullet_graph.engine.in_flight import InFlight, Launch, other_lane
from bullet_graph.engine.output import EngineStats, RequestOutput
from bullet_graph.engine.prompt_queue import QUEUE_IN_SIGHT, prompt_load
from bullet_graph.engine.request import Request, row_logprobs
from bullet_graph.engine.scheduler import Scheduler
from bullet_graph.engine.sequence import ScheduledStep, Sequence, Status
from bullet_graph.engine.trace import DecisionTrace
from bullet_graph.errors import LateError
from bullet_graph.partition.masks import LANES, WHOLE_GPU, Lane, lane_sms
from bullet_graph.planner.options import ForwardKind
from bullet_graph.planner.plan import ChunkLoad, DecodeLoad, Load, Plan, PolicyName, PromptLoad
from bullet_graph.planner.planner import Planner
from bullet_graph.planner.slack import PREPARE_MS, PREPARE_SHARE, decode_load, have_room, spare_ms, wait_ms
from bullet_graph.runtime.executor import Executor, max_batch_sizes
from bullet_graph.runtime.step import Placement, StepResult
from bullet_graph.slo import NO_TARGETS, Slo

PREDICT_EVERY_S = 0.1
"""While many prompts wait, the TTFT that is told to others is predicted once in this time."""


class EngineCore:
    """Runs the requests of a scheduler on an executor as a planner decides.

    ``first_token_s`` is when the first token reached the host, on the executor's clock; None before that.
    """

    def __init__(
        self,
        executor: Executor,
        planner: Planner,
        scheduler: Scheduler,
        *,
        num_layers: int,
        trace: DecisionTrace | None = None,
    ) -> None:
        self.executor = executor
        self.planner = planner
        self.planner.max_batch_sizes = max_batch_sizes(executor)
        self.trace = trace
        self.scheduler = scheduler
        self.requests: dict[str, Request] = {}
        self.in_flight = InFlight(executor.num_sms)
        self.first_token_s: float | None = None
        self.max_model_len = scheduler.max_model_len
        self._num_layers = num_layers
        self._num_sms = executor.num_sms
        self._num_missing_graphs = executor.num_missing_graphs
        self._no_capture_before_s = 0.0
        # When the decode lane's last forward was launched, and when the next one may be if the plan sets an interval.
        self._decode_start_s = 0.0
        self._wake_s: float | None = None
        self._num_steps = 0
        self._prediction = 0.0, 0.0
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._policy_seconds: dict[PolicyName, float] = defaultdict(float)
        self._lane_seconds: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self._lane_sm_seconds: dict[Lane, float] = {} if self._num_sms is None else dict.fromkeys(LANES, 0.0)
        # The chunk under way on the prefill lane, and its layers that are not launched.
        self._chunk: tuple[ScheduledStep, ChunkLoad] | None = None
        self._prompts: list[Sequence] = []
        self._decoding: list[Sequence] = []

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.scheduler.add(*(sample.sequence for sample in request.samples))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and return its last output; None for an unknown id."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        for sample in request.samples:
            if sample.finish_reason is None:
                sample.finish("abort")
                self.scheduler.finish(sample.sequence)
        output = request.output()
        if self.trace is not None:
            self.trace.finished(output)
        return output

    def has_unfinished_requests(self) -> bool:
        # A chunk whose prompts were all aborted runs to its last layer: only then are their blocks free.
        return bool(self.requests or self.in_flight) or self._chunk is not None

    def step(self, until_s: float | None = None) -> list[RequestOutput]:
        """Launch work, wait until one launch is over or ``until_s`` of the executor's clock, and return the outputs."""
        self._launch()
        if self._num_missing_graphs:
            self._prepare_between()
        heads = self.in_flight.heads()
        if self._wake_s is not None:
            until_s = self._wake_s if until_s is None else min(until_s, self._wake_s)
            if not heads:
                self.executor.sleep_until(until_s)
                return []
        if not heads:
            if self.requests:
                # A bug.
                raise RuntimeError(f"{len(self.requests)} requests are under way, but the planner launches nothing")
            return []
        ticket = self.executor.wait_any(list(heads), until_s)
        return [] if ticket is None else self._retire(heads[ticket])

    def prepare_next(self) -> bool:
        """Capture the next missing graph, whatever waits; see :meth:`Executor.prepare_next`."""
        more = self.executor.prepare_next()
        self._num_missing_graphs = self.executor.num_missing_graphs
        self.planner.max_batch_sizes = max_batch_sizes(self.executor)
        return more

    def predicted_ttft_ms(self, prompt_tokens: int, slo: Slo, cached_tokens: int = 0) -> float:
        """TTFT of a request that came now, if no other followed; 0 without a performance model."""
        now_s, ms_per_token = self.executor.now(), self.planner.prefill_ms_per_token
        deadline_s = now_s + slo.ttft_limit_ms(prompt_tokens) / 1e3
        newcomer = PromptLoad(prompt_tokens - cached_tokens, cached_tokens, deadline_s, now_s)
        under_way_ms = (self.in_flight.due_s("decode", now_s) - now_s) * 1e3
        if self._chunk is not None:
            chunk = self._chunk[1]
            under_way_ms += chunk.tokens * chunk.layers_left / self._num_layers * ms_per_token
        return under_way_ms + wait_ms(self.scheduler.prompt_loads(), newcomer, now_s, ms_per_token)

    def _recent_prediction_ms(self, slo: Slo) -> float:
        """The predicted TTFT of one token. To rank a long queue takes half a millisecond: too much at every step."""
        if not self.requests:  # perhaps the executor is gone
            return 0.0
        now_s, (made_s, predicted_ms) = self.executor.now(), self._prediction
        if len(self.scheduler.queue) <= QUEUE_IN_SIGHT or now_s - made_s > PREDICT_EVERY_S:
            made_s, predicted_ms = self._prediction = now_s, self.predicted_ttft_ms(1, slo)
        return predicted_ms

    def require_in_time(self, request: Request, factor: float | None) -> None:
        """Raise LateError if the predicted TTFT of a new request is more than ``factor`` times its target."""
        sequence = request.samples[0].sequence
        prompt_tokens = len(sequence.prompt_token_ids)
        limit_ms = sequence.slo.ttft_limit_ms(prompt_tokens)
        if factor is None or limit_ms == math.inf:
            return
        predicted_ms = self.predicted_ttft_ms(prompt_tokens, sequence.slo, self.scheduler.tokens_cached_for(sequence))
        if predicted_ms > factor * limit_ms:
            raise LateError(
                f"the first token would come after about {predicted_ms / 1e3:.1f} s, more than {factor:g} × the target "
                f"of {limit_ms:g} ms (reject_late): try again later, or ask another server",
                predicted_ms / 1e3,
            )

    def stats(self, slo: Slo = NO_TARGETS) -> EngineStats:
        """Counters and state; the predicted TTFT is of a request with these targets."""
        scheduler, num_sms, heads = self.scheduler, self._num_sms, self.in_flight.oldest
        return EngineStats(
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.num_queried_tokens,
            prefix_cache_hits=scheduler.num_found_tokens,
            kv_blocks_total=scheduler.pool.num_usable,
            kv_blocks_used=scheduler.pool.num_used,
            kv_blocks_peak=scheduler.pool.peak_used,
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.queue),
            num_missing_graphs=self._num_missing_graphs,
            policy_seconds=dict(self._policy_seconds),
            lane_seconds=dict(self._lane_seconds),
            lane_sm_seconds=dict(self._lane_sm_seconds),
            lane_sms={}
            if num_sms is None
            else {
                lane: (lane_sms(head[0].placement.partition, lane) or num_sms) if head else 0
                for lane, head in heads.items()
            },
            corrections=dict(self.planner.corrections),
            predicted_ttft_ms=self._recent_prediction_ms(slo),
        )

    def close(self) -> None:
        """Forget all requests and the executor; the counters stay."""
        self.requests.clear()
        self.in_flight = InFlight(self._num_sms)
        self._chunk = None
        del self.executor

    # ---- launching ----

    def _launch(self) -> None:
        depth, self._wake_s = self.executor.max_in_flight, None
        while any(len(self.in_flight[lane]) < depth for lane in LANES):
            load, num_preemptions = self._load(), self.scheduler.num_preemptions
            plan, launched = self._follow(load)
            if not launched and self.scheduler.num_preemptions > num_preemptions:
                continue  # the plan's rows lost their blocks: what is left to do is another load
            if not launched and self._chunk is not None and not self.in_flight:
                # Decode waits for blocks of the chunk's prompts, which are free only after its last layer: no pause.
                plan, launched = self._follow(replace(load, decode=None))
            decode_is_full = len(self.in_flight["decode"]) == depth
            if not launched or (decode_is_full and plan.prefill_lane == "decode"):
                return

    def _follow(self, load: Load) -> tuple[Plan, bool]:
        """Launch on each lane what the plan for this load says; return whether anything was launched."""
        depth = self.executor.max_in_flight
        plan = self.planner.plan(load)
        if self.trace is not None:
            self.trace.decided(load, plan)
        if plan.interval_ms and (next_s := self._decode_start_s + plan.interval_ms / 1e3) > load.now_s:
            self._wake_s = next_s
            return plan, False
        launched = False
        # Decode first, as its rows may need the blocks of a prompt that is idle now.
        for lane, launch in (("decode", self._decode_step), ("prefill", self._prefill_slice)):
            launched |= len(self.in_flight[lane]) < depth and launch(plan)  # type: ignore[index]
        return plan, launched

    def _decode_step(self, plan: Plan) -> bool:
        """Launch a forward on the decode lane, if the plan has rows for it."""
        chunk_tokens = plan.chunk_tokens if plan.prefill_lane == "decode" and self._chunk is None else 0
        prefilling = self.in_flight["prefill"]
        if self.in_flight["decode"] and prefilling and prefilling[-1].ends_chunk:
            # The second tokens of its prompts would wait for every step launched ahead of them.
            return False
        if not self._decoding and any(launch.scheduled.step.decode for launch in self.in_flight["decode"]):
            # Those rows are the last of their sequences. The host would hand them out after 20 ms of launching prompts.
            return False
        decoding = self._decoding if plan.decode else []
        filled = fill(chunk_tokens, len(decoding), self.planner.max_rows, self.executor.padded_rows)
        scheduled = self.scheduler.schedule(decode=decoding, prompts=self._prompts, chunk_tokens=filled)
        if scheduled is None:
            return False
        partition = WHOLE_GPU
        if scheduled.step.prefill is None:
            rows, most_rows = len(scheduled.sampled), self.executor.max_batch_size
            partition = self.in_flight.decode_partition(plan.partition, rows, most_rows)
        # No prediction applies to fewer rows than planned: blocks ran out, or structured outputs wait for their tokens.
        some_wait = any(x.scheduled.step.bitmasks is not None for x in self.in_flight["decode"])
        predicted_ms = plan.decode_ms if scheduled.step.prefill_rows >= chunk_tokens and not some_wait else None
        self._submit(scheduled, Placement("decode", partition, least_rows=plan.least_rows), plan, predicted_ms)
        return True

    def _prefill_slice(self, plan: Plan) -> bool:
        """Launch the next layers of the current chunk, or of a new one, if the plan says so."""
        if plan.prefill_lane != "prefill" or not plan.slice_layers:
            return False
        if self._chunk is None:
            scheduled = self.scheduler.schedule(prompts=self._prompts, chunk_tokens=plan.chunk_tokens, lane="prefill")
            if scheduled is None:
                return False
            self._chunk = scheduled, _chunk_load(scheduled, self._num_layers)
        scheduled, chunk = self._chunk
        layers = min(plan.slice_layers, chunk.layers_left)
        first, layers_left = self._num_layers - chunk.layers_left, chunk.layers_left - layers
        self._chunk = (scheduled, replace(chunk, layers_left=layers_left)) if layers_left else None
        placement = Placement("prefill", plan.partition, first, first + layers if layers_left else None)
        self._submit(scheduled, placement, plan, plan.slice_ms)
        return True

    def _submit(self, scheduled: ScheduledStep, placement: Placement, plan: Plan, predicted_ms: float | None) -> None:
        lane, partition = placement.lane, placement.partition
        placement = replace(placement, takes_turns=not self.in_flight.fit_beside(lane, partition))
        now = self.executor.now()
        if placement.first_layer == 0:
            for request in (self.requests[sequence.request_id] for sequence in scheduled.admitted):
                if request.first_scheduled_s is None:
                    request.first_scheduled_s = now
        self.in_flight.launching = scheduled.step, placement, now
        if scheduled.scored:
            predicted_ms = None  # made for chunks of which one row has logits
        if lane == "decode":
            self._decode_start_s = now
        ticket = self.executor.launch(scheduled.step, placement)
        self.in_flight.launching = None
        launch = Launch(ticket, scheduled, placement, plan.policy, predicted_ms, bool(self.in_flight[other_lane(lane)]))
        self.in_flight.add(launch, now)
        if self.trace is not None:
            self.trace.launched(launch, now)

    def _prepare_between(self) -> None:
        """Capture a missing graph while the device is busy, if no latency target suffers from the delay."""
        start_s = self.executor.now()
        if start_s < self._no_capture_before_s:
            return
        awaited_s, ms_per_token = self.in_flight.awaited_s(start_s), self.planner.prefill_ms_per_token
        spare = spare_ms(self._load(), awaited_s, ms_per_token=ms_per_token, layers=self._num_layers)
        if spare >= PREPARE_MS:
            self.prepare_next()
            end_s = self.executor.now()
            self._no_capture_before_s = end_s + (end_s - start_s) * (1 / PREPARE_SHARE - 1)

    # ---- what there is to do ----

    def _load(self) -> Load:
        now_s, queue = self.executor.now(), self.scheduler.queue
        prompts = self.scheduler.prompts(now_s, self.planner.prefill_ms_per_token)
        self._decoding = self.scheduler.decoding()
        rows = [*self._decoding, *self._decoding_next()]
        steps_left = None
        if queue.longest_first:
            # With the longest first, no prompt out of sight has more.
            steps_left = max((s.max_tokens - s.num_tokens for s in (*rows, *prompts)), default=0)
        decode, loads = self._decode_load(rows, now_s) if rows else None, list(map(prompt_load, prompts))
        if decode is not None and (predictor := self.planner.predictor) is not None:
            room = have_room(loads, decode, now_s, solo_ms=predictor.decode_ms)
            prompts, loads = list(compress(prompts, room)), list(compress(loads, room))
        self._prompts = prompts
        return Load(
            now_s=now_s,
            decode=decode,
            prompts=tuple(loads),
            queued_tokens=queue.num_tokens,
            chunk=None if self._chunk is None else self._chunk[1],
            steps_left=steps_left,
        )

    def _decoding_next(self) -> Iterable[Sequence]:
        """Sequences that decode as soon as the slices in flight, or their own structured tokens, are done."""
        for lane in LANES:
            for launch in self.in_flight[lane]:
                if launch.ends_chunk and (lane == "prefill" or launch.scheduled.step.bitmasks is not None):
                    for sequence in launch.scheduled.sampled:
                        waits = sequence.prompt_launched and not sequence.decoding
                        if waits and sequence.num_tokens < sequence.max_tokens:
                            yield sequence

    def _decode_load(self, rows: list[Sequence], now_s: float) -> DecodeLoad:
        due_s = self.in_flight.due_s("decode", now_s)
        return decode_load(
            [
                (
                    due_s if s.first_token_s is None else s.first_token_s,
                    s.num_tokens - len(s.prompt_token_ids) or 1,
                    s.max_tokens - s.num_tokens,
                    tpot_ms,
                )
                for s in rows
                if (tpot_ms := s.slo.tpot_ms) is not None
            ],
            len(rows),
            sum([s.num_tokens for s in rows]),
            due_s,
            solo_ms=None if self.planner.predictor is None else self.planner.predictor.decode_ms,
        )

    # ---- retiring ----

    def _retire(self, lane: Lane) -> list[RequestOutput]:
        result = self.executor.wait(self.in_flight[lane][0].ticket)
        now = self.executor.now()
        launch = self.in_flight.pop(lane, now)
        seconds = result.device_ms / 1e3
        self._policy_seconds[launch.policy] += seconds
        self._lane_seconds[lane] += seconds
        if self._num_sms is not None:
            self._lane_sm_seconds[lane] += (lane_sms(launch.placement.partition, lane) or self._num_sms) * seconds
        if self.trace is not None:
            self.trace.retired(launch.ticket, now, result.device_ms)
        # A split's step that ran alone for a while does not show its time beside the other lane.
        alone = launch.policy == "split" and not (launch.beside and self.in_flight[other_lane(lane)])
        if launch.predicted_ms is not None and not alone:
            step = launch.scheduled.step
            kind: ForwardKind = "slice" if step.decode is None else "step"
            rows = step.prefill_rows + step.decode_rows
            self.planner.corrections.observe(launch.policy, kind, rows, launch.predicted_ms, result.device_ms)
        if not launch.ends_chunk:
            return []
        self._num_steps += 1
        if self.first_token_s is None and launch.scheduled.sampled:
            self.first_token_s = now
        return self._hand_out(launch.scheduled, result, now)

    def _hand_out(self, scheduled: ScheduledStep, result: StepResult, now: float) -> list[RequestOutput]:
        """Give a finished step's tokens to their samples; returns one output per request that has one to report."""
        self.scheduler.retire(scheduled)
        row = 0
        for sequence, first, end in scheduled.scored:
            if sequence.status is not Status.FINISHED and result.prompt_logprobs is not None:
                self.requests[sequence.request_id].score(first, end, result.prompt_logprobs, row)
            row += end - first
        touched: dict[Request, None] = {}
        self._num_output_tokens += len(scheduled.sampled)
        for row, (sequence, token_id) in enumerate(zip(scheduled.sampled, result.token_ids.tolist(), strict=True)):
            if sequence.status is Status.FINISHED:
                self._num_output_tokens -= 1
                continue  # it ended while this step was in flight
            request = self.requests[sequence.request_id]
            sample = request.samples[sequence.index]
            num_logprobs = sequence.params.logprobs
            if not sequence.params.max_tokens:
                self._num_output_tokens -= 1
                sample.finish("length")
            elif num_logprobs is None or result.logprobs is None:
                sample.append(token_id, None)
            else:
                sample.append(token_id, row_logprobs(result.logprobs, row, token_id, num_logprobs))
            if sample.finish_reason is None and sequence.num_tokens - sequence.num_in_flight >= self.max_model_len:
                sample.finish("length")
            if sequence.first_token_s is None:
                sequence.first_token_s = now
                # The samples of a request share its prompt.
                self._num_prompt_tokens += 0 if sequence.index else len(sequence.prompt_token_ids)
            if sequence.output_token_ids:
                request.last_token_s = now
                if sequence.index == 0:
                    request.token_times_s.append(now)
            if sample.finish_reason is not None:
                self.scheduler.finish(sequence)
            if sample.finish_reason is not None or request.reports_progress:
                touched[request] = None
        outputs = [request.output() for request in touched if request.reports_progress or request.finished]
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
                if self.trace is not None:
                    self.trace.finished(output)
        return outputs


def fill(chunk_tokens: int, decode_rows: int, max_rows: int, padded_rows: Callable[[int], int]) -> int:
    """Prompt rows of a chunk on the decode lane: those planned, and those that replace padding up to ``max_rows``."""
    if not chunk_tokens:
        return 0
    rows = chunk_tokens + decode_rows
    return min(padded_rows(rows), max(max_rows, rows)) - decode_rows


def _chunk_load(scheduled: ScheduledStep, num_layers: int) -> ChunkLoad:
    """A step of the prefill lane before its first launch."""
    prefill = scheduled.step.prefill
    assert prefill is not None  # the prefill lane has nothing else
    deadline_s = min(sequence.deadline_s for sequence in scheduled.touched)
    return ChunkLoad(len(prefill.token_ids), prefill.attention_pairs, num_layers, deadline_s)
