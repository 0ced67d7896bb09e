"""The loop: plans, launches and retires steps on both lanes. It knows no tokenizer, weights or device."""

from dataclasses import replace

from bullet_graph.config import KV_BLOCK_TOKENS, PromptOrder
from bullet_graph.engine.block_pool import BlockPool
from bullet_graph.engine.counters import LoopCounters
from bullet_graph.engine.in_flight import InFlight, Launch, Launching, other_lane
from bullet_graph.engine.loads import ChunkUnderWay, fill, load_of
from bullet_graph.engine.output import EngineStats, RequestOutput
from bullet_graph.engine.request import Request, RequestTracker
from bullet_graph.engine.scheduler import Scheduler
from bullet_graph.engine.sequence import ScheduledStep, Sequence
from bullet_graph.engine.trace import DecisionTrace
from bullet_graph.partition.masks import LANES, WHOLE_GPU, Lane
from bullet_graph.planner.options import ForwardKind
from bullet_graph.planner.plan import Load, Plan
from bullet_graph.planner.planner import Planner
from bullet_graph.planner.slack import PREPARE_MS, PreparationPace, spare_ms
from bullet_graph.runtime.executor import Executor, max_batch_sizes
from bullet_graph.runtime.step import Placement


class EngineCore:
    """Runs requests on an executor as a planner decides.

    Args:
        executor: runs the steps.
        planner: decides how prefill and decode share the device.
        num_kv_blocks: blocks of the KV cache, including the padding block.
        max_num_seqs: most sequences running at once.
        max_model_len: most tokens of a sequence.
        num_layers: layers of the model.
        prompt_order: order of prompts without targets; see :class:`~bullet_graph.config.EngineConfig`.
        trace: records every decision and launch.
    """

    def __init__(
        self,
        executor: Executor,
        planner: Planner,
        *,
        num_kv_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        num_layers: int,
        prompt_order: PromptOrder = "arrival",
        trace: DecisionTrace | None = None,
    ) -> None:
        self.executor = executor
        self.planner = planner
        self.trace = trace
        self.pool = BlockPool(
            num_blocks=num_kv_blocks,
            num_slots=max_num_seqs,
            max_blocks_per_seq=-(-max_model_len // KV_BLOCK_TOKENS),
            block_tokens=KV_BLOCK_TOKENS,
        )
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            pool=self.pool,
            prompt_order=prompt_order,
            tuning=planner.tuning,
        )
        self.tracker = RequestTracker(self.scheduler, max_model_len=max_model_len)
        self.counters = LoopCounters(executor.num_sms)
        self.launching: Launching | None = None
        self._num_layers = num_layers
        self._in_flight = InFlight(executor.num_sms)
        self._num_missing_graphs = executor.num_missing_graphs
        self._pace = PreparationPace()
        self._chunk: ChunkUnderWay | None = None
        self._prompts: list[Sequence] = []
        self._decoding: list[Sequence] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.tracker.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and return its last output; None for an unknown id."""
        output = self.tracker.abort(request_id)
        if output is not None and self.trace is not None:
            self.trace.finished(output)
        return output

    @property
    def in_flight(self) -> bool:
        """Whether the device has work."""
        return bool(self._in_flight)

    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do."""
        # A chunk whose prompts were all aborted runs to its last layer: only then are their blocks free.
        return len(self.tracker) > 0 or self.in_flight or self._chunk is not None

    def step(self, until_s: float | None = None) -> list[RequestOutput]:
        """Launch work, wait for one launch to finish, and return the new outputs.

        Args:
            until_s: latest time of the executor's clock to wait for.

        Raises:
            RuntimeError: requests wait, but nothing could be launched: a bug.
        """
        self._launch()
        if self._num_missing_graphs:
            self._prepare_between()
        heads = self._in_flight.heads()
        if not heads:
            if len(self.tracker):
                raise RuntimeError(
                    f"{len(self.tracker)} requests are under way, but the planner found nothing to launch"
                )
            return []
        ticket = self.executor.wait_any(heads, until_s)
        return [] if ticket is None else self._retire(self._in_flight.lane_of(ticket))

    def prepare_next(self) -> bool:
        """Capture the next missing graph, whatever waits; see :meth:`Executor.prepare_next`."""
        more = self.executor.prepare_next()
        self._num_missing_graphs = self.executor.num_missing_graphs
        self.planner.limit_batch_sizes(max_batch_sizes(self.executor))
        return more

    def drain(self) -> None:
        """Wait for everything in flight and drop the results; the scheduler is not told."""
        for ticket in self._in_flight.clear():
            self.executor.wait(ticket)

    def stats(self) -> EngineStats:
        """Counters and state now."""
        return self.counters.stats(
            scheduler=self.scheduler,
            pool=self.pool,
            in_flight=self._in_flight,
            planner=self.planner,
            num_missing_graphs=self._num_missing_graphs,
        )

    def oldest(self, lane: Lane) -> tuple[Launch, float] | None:
        """A lane's oldest launch, and the time since which it is the oldest. Safe in any thread."""
        return self._in_flight.oldest(lane)

    def close(self) -> None:
        """Forget all requests and the executor; the counters stay."""
        self.tracker.clear()
        self._in_flight.clear()
        self._chunk = None
        del self.executor

    # ---- launching ----

    def _launch(self) -> None:
        depth = self.executor.max_in_flight
        while any(len(self._in_flight[lane]) < depth for lane in LANES):
            load = self._load()
            plan, launched = self._follow(load)
            if not launched and self._chunk is not None and not self.in_flight:
                # Decode waits for blocks of the chunk's prompts, which are free only after its last layer: no pause.
                plan, launched = self._follow(replace(load, decode=None))
            decode_is_full = len(self._in_flight["decode"]) == depth
            if not launched or (decode_is_full and plan.prefill_lane == "decode"):
                return

    def _follow(self, load: Load) -> tuple[Plan, bool]:
        """Launch on each lane what the plan for this load says; return whether anything was launched."""
        depth = self.executor.max_in_flight
        plan = self.planner.plan(load)
        decision = 0 if self.trace is None else self.trace.decided(load, plan)
        launched = False
        # Decode first, as its rows may need the blocks of a prompt that is idle now.
        for lane, launch in (("decode", self._decode_step), ("prefill", self._prefill_slice)):
            launched |= len(self._in_flight[lane]) < depth and launch(plan, decision)  # type: ignore[index]
        return plan, launched

    def _decode_step(self, plan: Plan, decision: int) -> bool:
        """Launch a forward on the decode lane, if the plan has rows for it."""
        chunk_tokens = plan.chunk_tokens if plan.prefill_lane == "decode" and self._chunk is None else 0
        if not plan.decode and not chunk_tokens:
            return False
        prefilling = self._in_flight["prefill"]
        if self._in_flight["decode"] and prefilling and prefilling[-1].ends_chunk:
            # The second tokens of its prompts would wait for every step launched ahead of them.
            return False
        decoding = self._decoding if plan.decode else []
        filled = fill(chunk_tokens, len(decoding), self.planner.max_rows, self.executor.padded_rows)
        scheduled = self.scheduler.schedule(decode=decoding, prompts=self._prompts, chunk_tokens=filled)
        if scheduled is None:
            return False
        partition = WHOLE_GPU
        if scheduled.step.prefill is None:
            rows, most_rows = len(scheduled.sampled), self.executor.max_batch_size
            partition = self._in_flight.decode_partition(plan.partition, rows, most_rows)
        # If blocks ran out for some of the planned rows, the prediction does not apply. Rows in place of padding do not
        # count.
        prompt_rows = 0 if scheduled.step.prefill is None else len(scheduled.step.prefill.token_ids)
        predicted_ms = plan.decode_ms if prompt_rows >= chunk_tokens else None
        self._fly(scheduled, Placement("decode", partition), plan, predicted_ms, self._num_layers, decision)
        return True

    def _prefill_slice(self, plan: Plan, decision: int) -> bool:
        """Launch the next layers of the current chunk, or of a new one, if the plan says so."""
        if plan.prefill_lane != "prefill":
            return False
        if self._chunk is None:
            if not plan.chunk_tokens:
                return False
            scheduled = self.scheduler.schedule(
                prompts=self._prompts, chunk_tokens=plan.chunk_tokens, lane="prefill"
            )
            if scheduled is None:
                return False
            self._chunk = ChunkUnderWay.of(scheduled, self._num_layers)
        chunk = self._chunk
        layers = min(plan.slice_layers, self._num_layers - chunk.next_layer)
        if layers <= 0:
            return False
        first, last = chunk.next_layer, chunk.next_layer + layers
        ends = last == self._num_layers
        chunk.next_layer = last
        if ends:
            self._chunk = None
        placement = Placement("prefill", plan.partition, first, None if ends else last)
        self._fly(chunk.scheduled, placement, plan, plan.slice_ms, layers, decision)
        return True

    def _fly(
        self,
        scheduled: ScheduledStep,
        placement: Placement,
        plan: Plan,
        predicted_ms: float | None,
        layers: int,
        decision: int,
    ) -> None:
        lane, partition = placement.lane, placement.partition
        takes_turns = not self._in_flight.fit_beside(lane, partition)
        placement = replace(placement, takes_turns=takes_turns)
        now = self.executor.now()
        self.tracker.note_scheduled(scheduled, now)
        self.launching = Launching(scheduled.step, placement, now)
        ticket = self.executor.launch(scheduled.step, placement)
        self.launching = None
        beside = bool(self._in_flight[other_lane(lane)])
        launch = Launch(ticket, scheduled, placement, plan.policy, predicted_ms, beside)
        self._in_flight.add(launch, now)
        if self.trace is not None:
            self.trace.launched(launch, decision=decision, layers=layers, now_s=now)

    def _prepare_between(self) -> None:
        """Capture a missing graph while the device is busy, if no latency target suffers.

        This delays each sequence's next token by at most the time of one capture.
        """
        start_s = self.executor.now()
        if not self._pace.may_begin(start_s):
            return
        spare = spare_ms(
            self._load(timed=True),
            self._in_flight.awaited_s(start_s),
            ms_per_token=self.planner.prefill_ms_per_token,
            layers=self._num_layers,
        )
        if spare >= PREPARE_MS:
            self.prepare_next()
            self._pace.note(start_s, self.executor.now())

    # ---- what there is to do ----

    def _load(self, *, timed: bool = False) -> Load:
        """All the work there is; ``timed`` includes TPOT targets even if nothing contends with decode."""
        now = self.executor.now()
        self._prompts = self.scheduler.prompts(now, self.planner.prefill_ms_per_token)
        self._decoding = self.scheduler.decoding()
        return load_of(
            now,
            decoding=self._decoding,
            prompts=self._prompts,
            chunk=self._chunk,
            in_flight=self._in_flight,
            planner=self.planner,
            queue=self.scheduler.queue,
            timed=timed,
        )

    # ---- retiring ----

    def _retire(self, lane: Lane) -> list[RequestOutput]:
        result = self.executor.wait(self._in_flight[lane][0].ticket)
        now = self.executor.now()
        launch = self._in_flight.pop(lane, now)
        self.counters.retired(launch, result.device_ms)
        if self.trace is not None:
            self.trace.retired(launch.ticket, now, result.device_ms)
        # A split's step that ran alone for a while does not show its time beside the other lane.
        alone = launch.policy == "split" and not (launch.beside and self._in_flight[other_lane(lane)])
        if launch.predicted_ms is not None and not alone:
            kind: ForwardKind = "slice" if launch.scheduled.step.decode is None else "step"
            self.planner.observe(launch.policy, kind, launch.predicted_ms, result.device_ms)
        if not launch.ends_chunk:
            return []
        self.counters.stepped(launch.scheduled, now)
        outputs = self.tracker.retire(launch.scheduled, result, now)
        for output in outputs:
            if output.finished and self.trace is not None:
                self.trace.finished(output)
        return outputs
