"""The engine: the one loop that sees requests, scheduler, executor and outputs."""

import dataclasses
import gc
import itertools
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import torch

from bullet_graph._imports import BEGAN_S
from bullet_graph.config import (
    Arm,
    CanaryChoice,
    DeviceName,
    DtypeName,
    EngineConfig,
    LoadFormat,
    PartitionBackendName,
    ReadyName,
)
from bullet_graph.engine.admission import Admission, Prompt, normalise_batch
from bullet_graph.engine.assembly import new_core, open_trace
from bullet_graph.engine.core import EngineCore
from bullet_graph.engine.corrections import Corrections
from bullet_graph.engine.output import EngineStats, OutputKind, RequestOutput
from bullet_graph.engine.preparation import PREPARE_MS
from bullet_graph.engine.request import Request, Sample
from bullet_graph.engine.stall import stalled_launches
from bullet_graph.engine.trace import DecisionTrace
from bullet_graph.errors import ConfigError, EngineDeadError, RequestError
from bullet_graph.models.progress import progress_bar
from bullet_graph.perf.start_report import StartClock, StartReport
from bullet_graph.runtime.build import build_executor
from bullet_graph.runtime.executor import Executor
from bullet_graph.runtime.memory import MemoryLedger
from bullet_graph.runtime.resolve import load_tokenizer, resolve
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo

_IMPORTED_S = time.perf_counter()


class Engine:
    """An LLM inference engine in this process, on one device.

    It installs no signal handlers, changes no global logging, environment or torch defaults, and starts no
    process. Not thread-safe: use :class:`AsyncEngine` from several threads or tasks.

    Args:
        model: a Hugging Face model folder or a preset's name.
        trace_decisions: write every decision of the planner to this new file, for ``bullet-graph explain``.
        on_ledger: told the memory ledger before anything is allocated.
        use_tqdm: show progress while loading weights and capturing graphs.

    The other arguments are those of :class:`~bullet_graph.config.EngineConfig`; ``arm`` may be text such as
    ``"mixed:2048"``.

    Raises:
        ConfigError, ModelError, DeviceError, InsufficientMemoryError: as their docstrings say.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: DtypeName = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        gpu_memory_utilization: float = 0.9,
        kv_cache_bytes: int | None = None,
        device: DeviceName = "auto",
        load_format: LoadFormat = "auto",
        seed: int = 0,
        arm: str | Arm = "mixed",
        cuda_graphs: bool = True,
        partition_backend: PartitionBackendName = "auto",
        decode_sms: Sequence[int] = (),
        slo: Slo = NO_TARGETS,
        perf_table: str | None = None,
        capture_plan: str | None = None,
        compile: bool = False,
        capture_cache: str | Path | None = None,
        canary: CanaryChoice = "sample",
        ready: ReadyName = "all",
        trace_decisions: str | Path | None = None,
        use_tqdm: bool = False,
        on_ledger: Callable[[MemoryLedger], None] | None = None,
    ) -> None:
        self._start = StartClock()
        self._start.add("imports", BEGAN_S, _IMPORTED_S)
        self.config = EngineConfig(
            model=model,
            load_format=load_format,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_bytes=kv_cache_bytes,
            arm=Arm.parse(arm) if isinstance(arm, str) else arm,
            seed=seed,
            cuda_graphs=cuda_graphs,
            partition_backend=partition_backend,
            decode_sms=tuple(decode_sms),
            slo=slo,
            perf_table=perf_table,
            capture_plan=capture_plan,
            compile=compile,
            capture_cache=str(capture_cache) if isinstance(capture_cache, Path) else capture_cache,
            canary=canary,
            ready=ready,
        )
        if trace_decisions is not None and Path(trace_decisions).exists():
            # Known now rather than after the weights are loaded.
            raise ConfigError(f"the trace file {trace_decisions} exists: give another name, or remove it")
        with self._start.phase("device"):
            runtime = resolve(self.config)
        self.model_config = runtime.model
        self.max_model_len = runtime.max_model_len
        self.device_name = runtime.device.type
        with self._start.phase("tokenizer"):
            self.tokenizer = load_tokenizer(runtime)
        self._admission = Admission(
            self.model_config, self.tokenizer, max_model_len=self.max_model_len, seed=seed
        )
        try:
            built = build_executor(
                self.config,
                runtime,
                progress=use_tqdm,
                on_ledger=on_ledger or (lambda _: None),
                clock=self._start,
            )
        except BaseException as error:
            # The error's frames would keep the device's memory for as long as the caller keeps the error.
            traceback.clear_frames(error.__traceback__)
            raise
        self._executor: Executor | None = built.executor
        self.memory = built.memory
        self.partition_backend = built.partition_backend
        self.capture = built.capture
        self.compiles = built.compiles
        self.cache_use = built.cache_use
        self.num_sms = built.executor.num_sms
        self._lane_sms = built.lane_sms
        self._performance = built.performance
        # Of this device, so they outlive a change of policy.
        self._corrections = Corrections()
        self._names = itertools.count()
        self._failure: BaseException | None = None
        self._trace: DecisionTrace | None = None
        self._aborted: list[RequestOutput] = []
        try:
            self._core = self._new_core(built.executor)
            if trace_decisions is not None:
                self._trace = self._core.trace.file = open_trace(
                    Path(trace_decisions),
                    self.config,
                    device=self.device_name,
                    num_sms=built.executor.num_sms,
                    num_layers=self.model_config.num_layers,
                )
        except BaseException:
            # As above.
            built.executor.shutdown()
            raise
        self._first_request_s: float | None = None
        self._first_token_s: float | None = None
        self._start.ready()

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

    # ---- one request at a time ----

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
        if self._first_request_s is None:
            self._first_request_s = arrival
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
                self._note_first_token()
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

    def _note_first_token(self) -> None:
        if self._first_token_s is not None or self._core.first_token_s is None:
            return
        self._first_token_s = self._core.first_token_s
        if self._first_request_s is not None:
            self._start.add("first token", self._first_request_s, self._first_token_s)

    # ---- whole batches ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, and return when all are done.

        Args:
            prompts: text, token ids, or a list of either.
            sampling_params: one for all, or one a prompt.
            use_tqdm: show a progress bar.

        Returns:
            One output a prompt, in order. In a list, a request that is wrong fails alone: its output has
            ``error`` set and no ``outputs``.

        Raises:
            RequestError: a single prompt is wrong, or requests added one by one are still under way.
        """
        self._alive()
        if len(self._core.tracker):
            raise RequestError(
                f"generate needs the engine to itself, but {len(self._core.tracker)} requests are under way: "
                "finish them with step(), or abort them"
            )
        batch, params, single = normalise_batch(prompts, sampling_params)
        results: dict[str, RequestOutput] = {}
        ids = [f"generate-{next(self._names)}" for _ in batch]
        wanted = set(ids)
        try:
            for request_id, prompt, param in zip(ids, batch, params, strict=True):
                try:
                    self.add_request(request_id, prompt, param, output_kind=OutputKind.FINAL_ONLY)
                except RequestError as error:
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
        """What the start took; the first token is in it once it is out."""
        return self._start.report()

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

    def set_policy(self, arm: str | Arm, slo: Slo = NO_TARGETS) -> None:
        """Serve under another arm and other targets from now on, with the graphs and partitions there are.

        Counters begin anew; what the planner has learned of the device stays.

        Raises:
            RequestError: requests are under way.
            ConfigError: the arm needs a performance table or partitions that this engine was not made with.
        """
        executor = self._alive()
        if self.has_unfinished_requests():
            raise RequestError("the policy can change between requests only: finish or abort them first")
        chosen = Arm.parse(arm) if isinstance(arm, str) else arm
        config = dataclasses.replace(self.config, arm=chosen, slo=slo)
        before, self.config = self.config, config
        try:
            self._core = self._new_core(executor)
        except BaseException:
            self.config = before
            raise

    def shutdown(self) -> None:
        """Give the memory back. Requests under way are lost; calling it again does nothing.

        On a GPU, torch itself keeps a cuBLAS workspace (32 MiB on Hopper) for each stream it has used.
        """
        executor, self._executor = self._executor, None
        if executor is None:
            return
        trace, self._trace = self._trace, None
        self._core.close()
        executor.shutdown()
        del executor
        if trace is not None:
            trace.close()
        if self._failure is not None:
            # Its traceback keeps the frames of the failed step alive, and they keep weights and cache.
            traceback.clear_frames(self._failure.__traceback__)
        gc.collect()
        if self.device_name == "cuda":
            # On a device that has failed every call fails; the driver frees its memory when the process ends.
            with suppress(RuntimeError) if self._failure is not None else nullcontext():
                torch.cuda.empty_cache()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _alive(self) -> Executor:
        if self._failure is not None:
            raise EngineDeadError(f"the engine has failed: {self._failure}") from self._failure
        if self._executor is None:
            raise EngineDeadError("the engine was shut down: make a new one")
        return self._executor
