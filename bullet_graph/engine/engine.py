"""The engine: the one loop that sees requests, scheduler, executor and outputs."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bullet_graph._imports import BEGAN_S
from bullet_graph.config import (
    DeviceName,
    DtypeName,
    EngineConfig,
    LoadFormat,
    PartitionBackendName,
    Policy,
    PromptOrder,
    ReadyName,
    SelfCheckChoice,
)
from bullet_graph.engine.admission import Prompt, normalise_batch
from bullet_graph.engine.opening import open_engine
from bullet_graph.engine.output import OutputKind, RequestOutput
from bullet_graph.engine.request_loop import RequestLoop
from bullet_graph.errors import ConfigError, RequestError
from bullet_graph.models.progress import progress_bar
from bullet_graph.perf.start_report import StartClock, StartReport
from bullet_graph.runtime.memory import MemoryLedger
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo

_IMPORTED_S = time.perf_counter()


class Engine(RequestLoop):
    """An LLM inference engine in this process, on one device.

    It installs no signal handlers, changes no global logging, environment or torch defaults, and starts no
    process. Not thread-safe: use :class:`AsyncEngine` from several threads or tasks.

    Args:
        model: a Hugging Face model folder or a preset's name.
        trace_decisions: write every decision of the planner to this new file, for ``bullet-graph explain``.
        on_ledger: told the memory ledger before anything is allocated.
        use_tqdm: show progress while loading weights and capturing graphs.

    The other arguments are those of :class:`~bullet_graph.config.EngineConfig`; ``policy`` may be text such as
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
        policy: str | Policy = "mixed",
        prompt_order: PromptOrder = "arrival",
        cuda_graphs: bool = True,
        partition_backend: PartitionBackendName = "auto",
        decode_sms: Sequence[int] = (),
        slo: Slo = NO_TARGETS,
        perf_table: str | None = None,
        capture_plan: str | None = None,
        compile: bool = False,
        capture_cache: str | Path | None = None,
        self_check: SelfCheckChoice = "sample",
        ready: ReadyName = "all",
        trace_decisions: str | Path | None = None,
        use_tqdm: bool = False,
        on_ledger: Callable[[MemoryLedger], None] | None = None,
    ) -> None:
        start = StartClock()
        start.add("imports", BEGAN_S, _IMPORTED_S)
        config = EngineConfig(
            model=model,
            load_format=load_format,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_bytes=kv_cache_bytes,
            policy=Policy.parse(policy) if isinstance(policy, str) else policy,
            prompt_order=prompt_order,
            seed=seed,
            cuda_graphs=cuda_graphs,
            partition_backend=partition_backend,
            decode_sms=tuple(decode_sms),
            slo=slo,
            perf_table=perf_table,
            capture_plan=capture_plan,
            compile=compile,
            capture_cache=str(capture_cache) if isinstance(capture_cache, Path) else capture_cache,
            self_check=self_check,
            ready=ready,
        )
        trace_path = None if trace_decisions is None else Path(trace_decisions)
        if trace_path is not None and trace_path.exists():
            # Known now rather than after the weights are loaded.
            raise ConfigError(f"the trace file {trace_decisions} exists: give another name, or remove it")
        opened = open_engine(config, clock=start, progress=use_tqdm, on_ledger=on_ledger or (lambda _: None))
        super().__init__(config, opened, start=start, trace_path=trace_path)
        self._names = itertools.count()
        start.ready()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

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

    def set_policy(
        self, policy: str | Policy, slo: Slo = NO_TARGETS, prompt_order: PromptOrder | None = None
    ) -> None:
        """Serve under another policy and other targets from now on, with the graphs and partitions there are.

        Counters begin anew; what the planner has learned of the device stays. So does the order of prompts where
        ``prompt_order`` is None.

        Raises:
            RequestError: requests are under way.
            ConfigError: the policy needs a performance table or partitions that this engine was not made with.
        """
        executor = self._alive()
        if self.has_unfinished_requests():
            raise RequestError("the policy can change between requests only: finish or abort them first")
        chosen = Policy.parse(policy) if isinstance(policy, str) else policy
        order = self.config.prompt_order if prompt_order is None else prompt_order
        config = dataclasses.replace(self.config, policy=chosen, slo=slo, prompt_order=order)
        before, self.config = self.config, config
        try:
            self._core = self._new_core(executor)
        except BaseException:
            self.config = before
            raise
