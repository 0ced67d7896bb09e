"""Serves requests one at a time on what was opened, until it is shut down or fails."""

import gc
import traceback
from pathlib import Path

import torch

from bullet_graph.config import EngineConfig
from bullet_graph.engine.admission import Admission, Prompt
from bullet_graph.engine.assembly import new_core, open_trace
from bullet_graph.engine.core import EngineCore
from bullet_graph.engine.opening import Opened
from bullet_graph.engine.output import EngineStats, OutputKind, RequestOutput
from bullet_graph.engine.preparation import PREPARE_MS
from bullet_graph.engine.request import Request, Sample
from bullet_graph.engine.stall import stalled_launches
from bullet_graph.engine.trace import DecisionTrace
from bullet_graph.errors import EngineDeadError, RequestError
from bullet_graph.perf.start_report import StartClock
from bullet_graph.planner.corrections import Corrections
from bullet_graph.runtime.executor import Executor, keep_for_ever
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import Slo


class RequestLoop:
    """The part of an engine that takes requests and makes them progress; it owns the executor.

    Args:
        config: of the engine.
        opened: for it; shut down if this fails.
        start: told of the first token.
        trace_path: of a new file for every decision of the planner, or None.

    Raises:
        ConfigError: the policy and what was opened do not fit, or the trace file exists.
        OSError: the trace file cannot be written.
    """

    def __init__(
        self, config: EngineConfig, opened: Opened, *, start: StartClock, trace_path: Path | None
    ) -> None:
        runtime, built = opened.runtime, opened.built
        self.config = config
        self.model_config = runtime.model
        self.max_model_len = runtime.max_model_len
        self.device_name = runtime.device.type
        self.tokenizer = opened.tokenizer
        self.memory = built.memory
        self.partition_backend = built.partition_backend
        self.capture = built.capture
        self.compiles = built.compiles
        self.cache_use = built.cache_use
        self.num_sms = built.executor.num_sms
        self._start = start
        self._admission = Admission(
            self.model_config, self.tokenizer, max_model_len=self.max_model_len, seed=config.seed
        )
        self._executor: Executor | None = built.executor
        self._lane_sms = built.lane_sms
        self._performance = built.performance
        # Of this device, so they outlive a change of policy.
        self._corrections = Corrections()
        self._failure: BaseException | None = None
        self._trace: DecisionTrace | None = None
        self._aborted: list[RequestOutput] = []
        try:
            self._core = self._new_core(built.executor)
            if trace_path is not None:
                self._trace = self._core.trace.file = open_trace(
                    trace_path,
                    config,
                    device=self.device_name,
                    num_sms=self.num_sms,
                    num_layers=self.model_config.num_layers,
                )
        except BaseException:
            # The error's frames would keep the device's memory for as long as the caller keeps the error.
            built.executor.shutdown()
            raise

    def _new_core(self, executor: Executor) -> EngineCore:
        """A loop with no requests and all blocks free."""
        return new_core(
            self.config,
            executor,
            self._performance,
            num_kv_blocks=self.memory.num_kv_blocks,
            max_model_len=self.max_model_len,
            num_layers=self.model_config.num_layers,
            trace=self._trace,
            corrections=self._corrections,
        )

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        output_kind: OutputKind = OutputKind.CUMULATIVE,
        arrival_s: float | None = None,
        slo: Slo | None = None,
    ) -> None:
        """Queue a request; :meth:`step` makes it progress.

        Args:
            arrival_s: when it came, on the clock of :meth:`now`, if that was earlier.
            slo: its latency targets; those it leaves out, or all, are the engine's.

        Raises:
            RequestError: the request is wrong (see the subclasses); the engine is unaffected.
            EngineDeadError: the engine was shut down or has failed.
        """
        executor = self._alive()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a str, got {request_id!r:.80}")
        if request_id in self._core.tracker:
            raise RequestError(f"request id {request_id!r} is in use")
        params = SamplingParams() if sampling_params is None else sampling_params
        token_ids = self._admission.token_ids(prompt)
        arrival = executor.now() if arrival_s is None else arrival_s
        self._start.first_request(arrival)
        targets = self.config.slo if slo is None else slo.or_else(self.config.slo)
        sequences = self._admission.sequences(request_id, token_ids, params, slo=targets, arrival_s=arrival)
        samples = [Sample(s, None if self.tokenizer is None else self.tokenizer.stream()) for s in sequences]
        self._core.add(Request(request_id, token_ids, samples, output_kind, arrival, targets))

    def now(self) -> float:
        """Seconds on the clock of the requests' metrics.

        Raises:
            EngineDeadError: the engine was shut down or has failed.
        """
        return self._alive().now()

    def sleep_until(self, time_s: float) -> None:
        """Let time pass, to this time of :meth:`now`, while there is nothing to do but to capture missing graphs.

        Raises:
            EngineDeadError: the engine was shut down or has failed.
        """
        executor = self._alive()
        while executor.now() + PREPARE_MS / 1e3 <= time_s and self.prepare_next():
            pass
        executor.sleep_until(time_s)

    def abort(self, request_id: str) -> None:
        """End a request where it is; the next :meth:`step` reports it. An unknown id is ignored."""
        output = self._core.abort(request_id)
        if output is not None:
            self._aborted.append(output)

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has something to do or to report."""
        return bool(self._core.has_work() or self._aborted)

    def step(self, until_s: float | None = None) -> list[RequestOutput]:
        """Launch what can be launched, wait until a launch has finished, and report what it brought.

        Args:
            until_s: wait no longer than this time of :meth:`now`.

        Raises:
            EngineDeadError: the engine was shut down, or the device failed now or earlier (the cause is
                attached); its requests are lost.
            KeyboardInterrupt: and other interrupts; all requests are lost, the engine can go on.
        """
        executor = self._alive()
        outputs, self._aborted = self._aborted, []
        try:
            if self._core.has_work():
                # Nothing to wait for before what is there already has been handed out.
                outputs += self._core.step(executor.now() if outputs else until_s)
                if self._core.counters.first_token_s is not None:
                    self._start.first_token(self._core.counters.first_token_s)
        except BaseException as error:
            self._failure = error
            if isinstance(error, Exception):
                raise EngineDeadError(f"the engine failed while running a step: {error}") from error
            # An interrupt may have struck anywhere: the scheduler's books can no longer be trusted.
            self._core.drain()
            self._core = self._new_core(executor)
            self._aborted = []
            self._failure = None
            raise
        return outputs

    def prepare_next(self) -> bool:
        """Capture the next graph that is missing, with ``ready="hot"``; for the time in which there is nothing to do.

        :meth:`sleep_until` does it as well, :class:`AsyncEngine` while it is idle, and :meth:`step` now and then.

        Returns:
            False once nothing is left to be captured.

        Raises:
            EngineDeadError: the engine was shut down, or the device failed now or earlier.
        """
        self._alive()
        try:
            return self._core.prepare_next()
        except Exception as error:
            self._failure = error
            raise EngineDeadError(f"the engine failed while capturing a graph: {error}") from error

    def stats(self) -> EngineStats:
        """Counters and state now."""
        return self._core.stats()

    def num_running(self) -> int:
        """Sequences that hold KV blocks; may be asked from any thread."""
        return self._core.scheduler.num_running

    def stalled_launches(self, limit_s: float) -> tuple[str, ...]:
        """The launches that have held a lane up for longer than so many seconds, in words, the first one first.

        May be asked from any thread, also while :meth:`step` is stuck in another.
        """
        executor = self._executor
        if executor is None:
            return ()
        return stalled_launches(
            self._core, now_s=executor.now(), limit_s=limit_s, config=self.config, lane_sms=self._lane_sms
        )

    def shutdown(self) -> None:
        """Give the memory back. Requests under way are lost; calling it again does nothing.

        On a GPU, torch itself keeps a cuBLAS workspace (32 MiB on Hopper) for each stream it has used.
        """
        executor, self._executor = self._executor, None
        if executor is None:
            return
        trace, self._trace = self._trace, None
        self._core.close()
        device_lives = executor.shutdown()
        del executor
        if trace is not None:
            trace.close()
        if not device_lives:
            # The driver frees its memory when the process ends.
            keep_for_ever(self._failure)
            return
        if self._failure is not None:
            # Its traceback keeps the frames of the failed step alive, and they keep weights and cache.
            traceback.clear_frames(self._failure.__traceback__)
        gc.collect()
        if self.device_name == "cuda":
            torch.cuda.empty_cache()

    def _alive(self) -> Executor:
        if self._failure is not None:
            raise EngineDeadError(f"the engine has failed: {self._failure}") from self._failure
        if self._executor is None:
            raise EngineDeadError("the engine was shut down: make a new one")
        return self._executor
