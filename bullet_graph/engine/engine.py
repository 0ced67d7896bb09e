"""The engine: takes requests, steps the loop, and owns the executor."""

import atexit
import dataclasses
import inspect
import itertools
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bullet_graph._imports import BEGAN_S
from bullet_graph.config import EngineConfig, Policy, PromptOrder, with_settings
from bullet_graph.engine.admission import Admission, Prompt, normalise_batch
from bullet_graph.engine.block_pool import CacheListener
from bullet_graph.engine.core import EngineCore
from bullet_graph.engine.in_flight import stalled_launches
from bullet_graph.engine.output import EngineStats, OutputKind, RequestOutput
from bullet_graph.engine.scheduler import Scheduler
from bullet_graph.engine.trace import DecisionTrace, trace_header
from bullet_graph.errors import ConfigError, EngineDeadError, LateError, PerfTableWarning, RequestError
from bullet_graph.models.progress import progress_bar
from bullet_graph.partition.masks import lane_sms
from bullet_graph.perf.start_report import StartClock, StartReport
from bullet_graph.planner.options import Corrections
from bullet_graph.planner.planner import Planner
from bullet_graph.planner.slack import PREPARE_MS
from bullet_graph.planner.tuning import TUNING
from bullet_graph.runtime.build import Start
from bullet_graph.runtime.executor import Executor
from bullet_graph.runtime.memory import MemoryLedger, held_tokens
from bullet_graph.runtime.resolve import check_fork, default_sampling_params, load_tokenizer, resolve, with_own_end
from bullet_graph.runtime.tensor_parallel import build_on_ranks
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo

_IMPORTED_S = time.perf_counter()
_IMPORTED_PID = os.getpid()


class Engine:
    """An LLM inference engine in this process, on one device, or with ``tensor_parallel_size`` on several.

    It installs no signal handlers, changes no global logging, environment or torch defaults, and starts no
    process but those of further ranks. Not thread-safe: use :class:`AsyncEngine` from several threads or tasks.

    Args:
        model: a Hugging Face model folder, a hub id such as ``Qwen/Qwen3-0.6B``, or a preset's name.
        settings: those of :class:`~bullet_graph.config.EngineConfig`, by name; text such as
            ``policy="mixed:2048"`` is read as on the command line.
        trace_decisions: write every decision of the planner to this new file, for ``bullet-graph explain``.
        on_ledger: given the memory ledger before anything is allocated.

    Raises ConfigError, ModelError, DeviceError or InsufficientMemoryError, as their docstrings say.
    """

    def __init__(
        self,
        model: str,
        *,
        trace_decisions: str | Path | None = None,
        use_tqdm: bool = False,
        on_ledger: Callable[[MemoryLedger], None] | None = None,
        **settings: Any,
    ) -> None:
        start = StartClock()
        start.add("imports", BEGAN_S, _IMPORTED_S)
        config = EngineConfig.of(model, **settings)
        trace_path = None if trace_decisions is None else Path(trace_decisions)
        if trace_path is not None and trace_path.exists():
            # Known now rather than after the weights are loaded.
            raise ConfigError(f"the trace file {trace_decisions} exists: give another name, or remove it")
        with start.phase("device"):
            runtime = resolve(config)
            if os.getpid() != _IMPORTED_PID:
                check_fork(config, runtime)
        with start.phase("tokenizer"):
            self.tokenizer = load_tokenizer(runtime)
        self.default_sampling_params = default_sampling_params(config, runtime)
        try:
            built = build_on_ranks(config, runtime, Start(clock=start, progress=use_tqdm, on_ledger=on_ledger))
        except BaseException as error:
            # Its frames would hold the device's memory for as long as the caller holds the error.
            traceback.clear_frames(error.__traceback__)
            raise
        self.config = config
        self.model_config = with_own_end(runtime, self.tokenizer)
        self.max_model_len = runtime.max_model_len
        self.device = runtime.device
        self.device_name = runtime.device.type
        self._eager_layer_ms = runtime.gpu.eager_layer_ms
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
        self._pid = os.getpid()
        self._most_chunk_tokens = config.chunk_tokens
        self._lane_sms = built.lane_sms
        self._performance = built.performance
        # They belong to the device, so they outlive a change of policy.
        self._corrections = Corrections()
        self._failure: BaseException | None = None
        self._trace: DecisionTrace | None = None
        self._cache_listener: CacheListener | None = None
        self._aborted: list[RequestOutput] = []
        self._names = itertools.count()
        try:
            self._core = self._new_core(built.executor, config)
            if trace_path is not None:
                num_layers = self.model_config.num_layers
                header = trace_header(config, self.device_name, num_sms=self.num_sms, num_layers=num_layers)
                self._trace = self._core.trace = DecisionTrace(trace_path, header=header, overwrite=False)
        except BaseException:
            # The same here.
            built.executor.shutdown()
            raise
        if config.tensor_parallel_size > 1:
            # Threads of collectives, which wait for the others, would abort the program at its end.
            atexit.register(self.shutdown)
        start.ready()

    __signature__ = with_settings(inspect.signature(__init__))

    def _new_core(self, executor: Executor, config: EngineConfig) -> EngineCore:
        """A loop without requests whose blocks are all free."""
        if config.policy.uses_prefill_lane and not executor.has_prefill_lane:
            raise ConfigError(
                f"the policy {config.policy} needs a prefill lane, but the engine was made for one that has none: "
                "make it with policy=auto, which can serve as any other"
            )
        chunk_tokens = config.chunk_tokens
        if self._performance is None and config.predicts and config.policy.name != "split":
            chunk_tokens = min(chunk_tokens, TUNING.fixed_chunk_tokens)
            # Level 1, this place: Python shows a text of one place once.
            warnings.warn(
                f"there is no performance table, so forwards have at most {chunk_tokens} rows, whatever the latency "
                "targets: measure a table with `bullet-graph profile` (on a GPU), choose policy='mixed:CHUNK', or pass "
                "perf_table='roofline' for an estimate",
                PerfTableWarning,
                stacklevel=1,
            )
        planner = Planner(
            config.policy,
            max_chunk_tokens=chunk_tokens,
            decode_sms=[sms for p in executor.partitions if (sms := lane_sms(p)) is not None],
            model=self._performance,
            corrections=self._corrections,
            eager_layer_ms=self._eager_layer_ms,
            lone_rows=executor.lone_rows,
        )
        scheduler = Scheduler(
            num_blocks=self.memory.num_kv_blocks,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            prompt_order=config.prompt_order,
            window=self.model_config.widest_window,
            held_tokens=held_tokens(config, self.model_config.widest_window, self.max_model_len),
            prefix_caching=config.prefix_caching and self.model_config.widest_window is None,
        )
        scheduler.pool.listener = self._cache_listener
        return EngineCore(executor, planner, scheduler, num_layers=self.model_config.num_layers, trace=self._trace)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Engine cannot be pickled or copied, for it owns a device: make one in each process")

    # ---- requests one by one ----

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
        """Queue a request; :meth:`step` runs it.

        It arrived at ``arrival_s`` of :meth:`now` (None: now). ``default_sampling_params``, which the model's
        generation_config.json gives, stand in for None. The engine's targets replace those that ``slo`` lacks.
        Raises RequestError for an invalid request, LateError for one that ``reject_late`` refuses,
        and EngineDeadError if the engine was shut down or has failed.
        """
        executor = self._alive()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a str, got {request_id!r:.80}")
        if request_id in self._core.requests:
            raise RequestError(f"request id {request_id!r} is in use: give another")
        if not isinstance(output_kind, OutputKind):
            raise RequestError(f"output_kind must be such as OutputKind.DELTA, got {output_kind!r:.80}")
        if not isinstance(slo, Slo | None):
            raise RequestError(f"slo must be targets, such as Slo(ttft_ms=500), or None, got {slo!r:.80}")
        if arrival_s is not None and not (isinstance(arrival_s, int | float) and math.isfinite(arrival_s)):
            raise RequestError(f"arrival_s must be a time of now(), in seconds, or None, got {arrival_s!r:.80}")
        arrival = executor.now() if arrival_s is None else arrival_s
        request = self._admission.request(
            request_id,
            prompt,
            SamplingParams(**self.default_sampling_params) if sampling_params is None else sampling_params,
            kind=output_kind,
            arrival_s=arrival,
            slo=self.config.slo if slo is None else slo.or_else(self.config.slo),
        )
        self._core.require_in_time(request, self.config.reject_late)
        self._start.first_request(arrival)
        self._core.add(request)

    def compile_structured_outputs(self, sampling_params: SamplingParams | None) -> None:
        """Compile ahead what :meth:`add_request` would have to. Safe in any thread.

        Raises SamplingParamsError for what is not supported or too complex.
        """
        if isinstance(sampling_params, SamplingParams) and sampling_params.structured_outputs is not None:
            self._admission.grammars.matcher(sampling_params.structured_outputs)

    def now(self) -> float:
        """Seconds on the clock of the requests' metrics."""
        return self._alive().now()

    def sleep_until(self, time_s: float) -> None:
        """Sleep until this time of :meth:`now`; missing CUDA graphs are captured meanwhile."""
        executor = self._alive()
        while executor.now() + PREPARE_MS / 1e3 <= time_s and self.prepare_next():
            pass
        executor.sleep_until(time_s)

    def abort(self, request_id: str) -> None:
        """End a request now; the next :meth:`step` reports it. An unknown id is ignored."""
        self.require_own_process()
        if (output := self._core.abort(request_id)) is not None:
            self._aborted.append(output)

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has something to do or to report."""
        return bool(self._core.has_unfinished_requests() or self._aborted)

    def step(self, until_s: float | None = None) -> list[RequestOutput]:
        """Launch work, wait until one launch is over or ``until_s`` of :meth:`now`, and return the new outputs.

        Raises EngineDeadError if the engine was shut down, or the device has failed (the error is its cause). All
        requests are then lost. An interrupt, such as KeyboardInterrupt, loses them too, but the engine can go on. With
        several ranks, it cannot if one of their launches was interrupted.
        """
        executor = self._alive()
        outputs, self._aborted = self._aborted, []
        try:
            if self._core.has_unfinished_requests():
                # Outputs that are ready are handed out before anything is waited for.
                outputs += self._core.step(executor.now() if outputs else until_s)
                if self._core.first_token_s is not None:
                    self._start.first_token(self._core.first_token_s)
        except BaseException as error:
            self._failure = error
            if isinstance(error, Exception):
                raise EngineDeadError(f"the engine failed while running a step: {error}") from error
            # An interrupt may strike anywhere, so the scheduler's books cannot be trusted.
            executor.drain()
            self._core.scheduler.pool.abandon()
            self._core = self._new_core(executor, self.config)
            self._aborted = []
            self._failure = None
            raise
        return outputs

    def prepare_next(self) -> bool:
        """Capture the next missing CUDA graph of an engine with ``ready="hot"``; False if none is missing any more.

        :meth:`sleep_until` calls it, :class:`AsyncEngine` does while it is idle, and :meth:`step` now and then.
        """
        self._alive()
        try:
            return self._core.prepare_next()
        except Exception as error:
            self._failure = error
            raise EngineDeadError(f"the engine failed while idle or capturing a graph: {error}") from error

    # ---- whole batches ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; return one output per prompt, in order, when all are done.

        ``sampling_params`` are those of each prompt, or of all; None: as in :meth:`add_request`.
        A refused prompt of a list fails alone: its output has ``error`` set and no ``outputs``. A single one raises
        as in :meth:`add_request`. Raises RequestError while requests that were added one by one are under way.
        """
        self._alive()
        if self._core.requests:
            raise RequestError(
                f"generate needs the engine to itself, but {len(self._core.requests)} requests are under way: "
                "finish them with step(), or abort them"
            )
        if sampling_params is None:
            sampling_params = SamplingParams(**self.default_sampling_params)
        batch, params, single = normalise_batch(prompts, sampling_params)
        ids = [f"generate-{next(self._names)}" for _ in batch]
        wanted, results = set(ids), dict[str, RequestOutput]()
        try:
            for request_id, prompt, param in zip(ids, batch, params, strict=True):
                try:
                    self.add_request(request_id, prompt, param, output_kind=OutputKind.FINAL_ONLY)
                except (RequestError, LateError) as error:
                    if single:
                        raise
                    results[request_id] = RequestOutput.refused(request_id, error, self.now())
            with progress_bar(use_tqdm, total=len(batch), initial=len(results), unit="req") as advance:
                while len(results) < len(batch):
                    for output in self.step():
                        if output.request_id in wanted:
                            results[output.request_id] = output
                            advance(1)
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise
        return [results[request_id] for request_id in ids]

    # ---- state ----

    @property
    def start_report(self) -> StartReport:
        """The phases of the start and their times; holds the first token's time once there is one."""
        return self._start.report()

    def set_policy(self, policy: str | Policy, slo: Slo = NO_TARGETS, prompt_order: PromptOrder | None = None) -> None:
        """Change the policy and the targets; the graphs and partitions stay.

        The counters and the prefix cache start anew, the planner's corrections stay. None leaves the prompt order.
        Raises RequestError while requests are under way, and ConfigError for a policy that needs a performance table,
        partitions or memory for chunks that this engine does not have.
        """
        executor = self._alive()
        if self.has_unfinished_requests():
            raise RequestError("the policy can change between requests only: finish or abort them first, with step()")
        chosen = Policy.parse(policy) if isinstance(policy, str) else policy
        order = self.config.prompt_order if prompt_order is None else prompt_order
        config = dataclasses.replace(self.config, policy=chosen, slo=slo, prompt_order=order)
        core = self._new_core(executor, config)
        if config.chunk_tokens > self._most_chunk_tokens:
            raise ConfigError(
                f"the policy {chosen} has chunks of {config.chunk_tokens} tokens, but the engine was made for "
                f"{self._most_chunk_tokens}: make it with the policy that has the largest chunks"
            )
        self._core.scheduler.pool.abandon()
        self._core, self.config = core, config

    @property
    def caches_prefixes(self) -> bool:
        """Whether requests share the KV blocks of equal prefixes: not where every layer has a sliding window."""
        return self._core.scheduler.prefix_caching

    def listen_to_prefix_cache(self, listener: CacheListener) -> None:
        """Have ``listener`` told of every block that the prefix cache holds from now on, or holds no more.

        It is called in the thread that calls the engine, which waits for it. Raises RequestError if the cache holds
        blocks already, which it would not hear of.
        """
        self._alive()
        if self._core.scheduler.pool.found_by_key or self.has_unfinished_requests():
            raise RequestError("a listener must come before the first request, or miss blocks: make a new engine")
        self._cache_listener = self._core.scheduler.pool.listener = listener

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; the counters stay. Raises RequestError while requests are under way."""
        self._alive()
        if self.has_unfinished_requests():
            raise RequestError("the prefix cache can be reset between requests only: finish or abort them first")
        self._core.scheduler.pool.forget()

    def stats(self) -> EngineStats:
        """Counters and state now."""
        return self._core.stats(self.config.slo)

    def num_running(self) -> int:
        """Sequences that hold KV blocks. Safe in any thread."""
        return self._core.scheduler.num_running

    def num_waiting(self) -> int:
        """Sequences that wait for KV blocks. Safe in any thread."""
        return len(self._core.scheduler.queue)

    def stalled_launches(self, limit_s: float) -> tuple[str, ...]:
        """Describe launches that have blocked a lane for more than ``limit_s`` seconds, oldest first.

        Safe in any thread, even while :meth:`step` is stuck in another.
        """
        executor = self._executor
        if executor is None:
            return ()
        return stalled_launches(self._core.in_flight, executor.now(), limit_s, self.config, self._lane_sms)

    def require_own_process(self) -> None:
        """Raise EngineDeadError in a fork of the process that made the engine. Safe in any thread."""
        if os.getpid() != self._pid:
            raise EngineDeadError(
                f"this engine belongs to process {self._pid}, but was used in its fork {os.getpid()}, where it would "
                "hang: make an engine there, or start processes with the method spawn"
            )

    def shutdown(self) -> None:
        """Free the memory. Requests under way are lost; a second call does nothing.

        On a GPU, torch keeps a cuBLAS workspace (32 MiB on Hopper) for each stream that it has used.
        """
        executor, self._executor = self._executor, None
        # After a fork, the device and the threads are the parent's.
        if executor is None or os.getpid() != self._pid:
            return
        atexit.unregister(self.shutdown)
        trace, self._trace = self._trace, None
        self._core.close()
        executor.shutdown(self._failure)
        if trace is not None:
            trace.close()

    def _alive(self) -> Executor:
        self.require_own_process()
        if self._failure is not None:
            raise EngineDeadError(f"the engine has failed: {self._failure}") from self._failure
        if self._executor is None:
            raise EngineDeadError("the engine was shut down: make a new one")
        return self._executor
