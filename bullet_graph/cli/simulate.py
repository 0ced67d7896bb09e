"""``bullet-graph simulate``: a trace on a GPU that need not be there, in virtual time."""

import contextlib
import dataclasses
import math
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from bullet_graph._version import __version__
from bullet_graph.cli.bench.sweep_runner import at_rate, fastest_rate
from bullet_graph.cli.options import FILE, all_of, result_options, setting_options
from bullet_graph.cli.replay_options import SIMULATED_MODEL, GoodputCommand, gpu_option, replay_options, search_options
from bullet_graph.cli.result_file import Output, check_plot_file, check_result_file, write_result_file
from bullet_graph.cli.tables import ReplayRun, counters, emit_replays, goodput_table, print_line, print_table
from bullet_graph.config import KV_BLOCK_TOKENS, EngineConfig, Policy
from bullet_graph.engine.simulation import HOST_OVERHEAD_MS, SimulationSettings
from bullet_graph.engine.simulation import simulate as serve_simulated
from bullet_graph.engine.trace import DecisionTrace, trace_header
from bullet_graph.errors import ConfigError, PerfTableError
from bullet_graph.graphs.capture_plan import CapturePlan, default_plan, named_plan
from bullet_graph.graphs.key import batch_size_buckets
from bullet_graph.hardware import KNOWN_GPUS, GpuSpec, gpu_spec
from bullet_graph.models.config import GPU_HEAD_DIMS, with_padded_heads, without_wide_windows
from bullet_graph.models.presets import resolve_model
from bullet_graph.models.progress import progress_bar
from bullet_graph.models.quantization import in_formats
from bullet_graph.models.sharding import shard
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.perf.goodput_search import GoodputSearch, RateRun, goodput_fields
from bullet_graph.perf.performance import PaddedModel, PerformanceModel
from bullet_graph.perf.predict import TableModel
from bullet_graph.perf.roofline import DTYPE_BYTES, Roofline
from bullet_graph.perf.table import for_lengths, format_name, gpu_nickname, load_table, shape_numbers
from bullet_graph.runtime.executor import gpu_lone_rows
from bullet_graph.runtime.memory import GIB, DeviceMemory, graphs_bytes, plan_memory, workspace_bytes
from bullet_graph.runtime.performance import table_model
from bullet_graph.slo import NO_TARGETS
from bullet_graph.workloads import Arrivals, Workload, load_workload

_ROOFLINE_PREFIX = "roofline:"
_CONTEXT_BYTES = GIB
"""What the driver and a process take before an engine does: 0.8 GiB on an H200, up to 1.5 on an H100."""
_AMPLE_BYTES = 2**60
"""Of a GPU whose memory is not known, where the KV cache has a given size."""


class Simulator:
    """A workload, a GPU and an engine's settings, ready to run at any rate under any policy.

    Args:
        gpu: a table file of ``bullet-graph profile`` (ending in .json), a GPU's name for a table that comes with the
            package, or ``roofline:`` and a name for an estimate.

    Attributes:
        times: where step times come from: ``measured table``, ``roofline``, or ``roofline of an unmeasured GPU``.
        performance: predicts step times, batches padded as the engine's CUDA graphs pad them; ``unpadded``: not padded.

    Raises BulletGraphError for errors in workload, model, table or settings.
    """

    performance: PerformanceModel
    unpadded: PerformanceModel

    def __init__(
        self,
        *,
        gpu: str,
        config: EngineConfig,
        trace: str,
        num_prompts: int | None,
        arrivals: Arrivals,
        host_overhead_ms: float = HOST_OVERHEAD_MS,
    ) -> None:
        self.config = config
        self.arrivals = arrivals
        self._host_overhead_ms = host_overhead_ms
        found = resolve_model(config.model, config.revision)
        whole = in_formats(found.config, quantization=config.quantization, kv_cache_dtype=config.kv_cache_dtype)
        limit = whole.max_position_embeddings
        self.max_model_len = config.max_model_len or limit
        whole = with_padded_heads(without_wide_windows(whole, self.max_model_len), GPU_HEAD_DIMS)
        self.model = shard(whole, config.tensor_parallel_size, 0, expert_parallel=config.expert_parallel)
        self.dtype = "bfloat16" if self.model.dtype == "float32" else self.model.dtype
        if self.max_model_len > limit:
            raise ConfigError(
                f"max_model_len={self.max_model_len} exceeds the model's own limit of {limit} positions: lower it"
            )
        if gpu.startswith(_ROOFLINE_PREFIX):
            spec = _known_gpu(gpu.removeprefix(_ROOFLINE_PREFIX))
            self.gpu, memory_bytes = spec.name, spec.memory_bytes
            self.times = "roofline" if spec.is_measured else "roofline of an unmeasured GPU"
            self.performance = self.unpadded = Roofline(spec, self.model, dtype_bytes=DTYPE_BYTES[self.dtype])
        else:
            format_of_table = format_name(self.dtype, shape_numbers(self.model))
            table = for_lengths(load_table(gpu, model=found.name, dtype=format_of_table), self.max_model_len)
            if table.key.dtype != self.dtype:
                raise PerfTableError(
                    f"the table {gpu} was measured in {table.key.dtype}, but {config.model} runs in {self.dtype}: "
                    "measure one in this dtype with `bullet-graph profile`"
                )
            self.gpu, self.times = table.key.gpu, "measured table"
            known_bytes = gpu_spec(self.gpu, table.key.num_sms).memory_bytes
            memory_bytes = table.provenance.get("device_memory_bytes", known_bytes)
            self.unpadded = TableModel(table, self.model)
            self.performance = table_model(table, config.max_num_seqs, self.model)
        self._padded = partial(PaddedModel, self.unpadded, routes=self.model.num_experts > 0)
        self.capture_plan = named_plan(config, dtype=self.dtype, num_sms=self.unpadded.num_sms)
        if self.capture_plan is not None:
            self.performance = self._padded(self.capture_plan.padded)
        self.kv_cache_tokens = self._kv_cache_tokens(memory_bytes)
        tokenizer = None if found.folder is None else Tokenizer.from_folder(found.folder)
        tokenize = None if tokenizer is None else tokenizer.encode
        self.workload = load_workload(trace, num_requests=num_prompts, seed=config.seed, tokenize=tokenize)

    def _kv_cache_tokens(self, memory_bytes: int | None) -> int:
        if memory_bytes is None and self.config.kv_cache_bytes is None:
            raise ConfigError(f"the memory of {self.gpu} is not known: give the KV cache's size with --kv-cache-bytes")
        # All policies have the same cache: that of `auto`, which takes the most memory beside it.
        num_bytes, config = memory_bytes or _AMPLE_BYTES, dataclasses.replace(self.config, policy=Policy("auto"))
        times, sizes = self.unpadded, sorted(set(config.decode_sms or self.unpadded.decode_sms))
        captured = self.capture_plan or default_plan(
            config, dtype=self.dtype, num_sms=times.num_sms, shape=self.model, decode_sms=sizes
        )
        return plan_memory(
            config,
            self.model,
            dtype_bytes=DTYPE_BYTES[self.dtype],
            max_model_len=self.max_model_len,
            device=DeviceMemory(num_bytes, num_bytes - _CONTEXT_BYTES),
            workspaces_bytes=workspace_bytes(self.model),
            graphs_bytes=graphs_bytes(captured, self.model, dtype_bytes=DTYPE_BYTES[self.dtype]),
        ).kv_cache_tokens

    def run(
        self,
        policy: Policy,
        arrivals: Arrivals | None = None,
        workload: Workload | None = None,
        *,
        capture_plan: CapturePlan | None = None,
        **observers: Any,
    ) -> ReplayRun:
        """Serve a workload once, under the simulator's ``arrivals``, ``workload`` and ``capture_plan`` where not given.

        ``observers`` are ``trace``, ``on_done`` and ``on_step`` of :func:`bullet_graph.engine.simulation.simulate`.
        """
        config, arrivals, workload = self.config, arrivals or self.arrivals, workload or self.workload
        padded = self.performance if capture_plan is None else self._padded(capture_plan.padded)
        started = datetime.now()
        simulation = serve_simulated(
            padded,
            workload,
            arrivals.times(workload),
            self.settings(policy, capture_plan),
            slo=config.slo,
            max_concurrency=arrivals.max_concurrency,
            **observers,
        )
        replayed = simulation.replay
        result = replayed.result(arrivals, started=started, backend="bullet-graph simulate", model_id=config.model)
        shareable = workload.without(set(replayed.unsent)).shareable_prompt_tokens
        own = {"policy": str(policy), "shareable_prompt_tokens": shareable}
        return ReplayRun(result, counters(simulation.stats) | own)

    def settings(self, policy: Policy, capture_plan: CapturePlan | None = None) -> SimulationSettings:
        """The engine to simulate, under the simulator's ``capture_plan`` where none is given."""
        block_bytes = 2 * KV_BLOCK_TOKENS * self.model.kv_size * DTYPE_BYTES[self.dtype]
        plan = capture_plan or self.capture_plan
        sizes = batch_size_buckets(self.config.max_num_seqs) if plan is None else plan.decode[0].batch_sizes
        return SimulationSettings(
            config=dataclasses.replace(self.config, policy=policy),
            kv_cache_tokens=self.kv_cache_tokens,
            max_model_len=self.max_model_len,
            capture_plan=plan,
            host_overhead_ms=self._host_overhead_ms,
            block_bytes=None if self.model.fp8_kv or any(self.model.windows) else block_bytes,
            lone_rows=gpu_lone_rows(self.config, self.model, sizes),
            window=self.model.widest_window,
        )

    def open_trace(self, path: Path, policy: Policy, *, overwrite: bool) -> DecisionTrace:
        """Open a file for every decision of a run under this policy."""
        config, model = dataclasses.replace(self.config, policy=policy), self.performance
        header = trace_header(config, f"{self.gpu}, simulated", num_sms=model.num_sms, num_layers=model.num_layers)
        return DecisionTrace(path, header=header, overwrite=overwrite)

    def title(self) -> str:
        """The simulation in a line."""
        config, gpu = self.config, f"{self.gpu} (simulated, {self.times})"
        return f"{config.model} on {gpu}, {self.workload.name}, {config.slo}"

    def describe(self) -> dict[str, Any]:
        """The fields that all runs share, for a JSON file."""
        config, plan = self.config, self.capture_plan
        decode_sms = (config.decode_sms or self.performance.decode_sms) if plan is None else plan.decode_sms
        limits = ("tensor_parallel_size", "expert_parallel", "max_num_seqs", "max_num_batched_tokens")
        own = ("seed", *limits, "prompt_order", "prefix_caching", "capture_plan")
        return {
            "gpu": self.gpu,
            "performance": self.times,
            "trace": self.workload.name,
            "slo": str(config.slo),
            "version": __version__,
            "max_model_len": self.max_model_len,
            "kv_cache_tokens": self.kv_cache_tokens,
            "decode_sms": list(decode_sms),
            **{name: getattr(config, name) for name in own},
            "host_overhead_ms": self._host_overhead_ms,
        }


def _known_gpu(name: str) -> GpuSpec:
    for known, spec in KNOWN_GPUS.items():
        if gpu_nickname(known) == gpu_nickname(name):
            return spec
    raise ConfigError(
        f"there is no estimate for the GPU {name!r}: use {_ROOFLINE_PREFIX}NAME with NAME one of "
        f"{', '.join(map(gpu_nickname, KNOWN_GPUS))}"
    )


machine_options = all_of(
    [
        gpu_option,
        setting_options(*SIMULATED_MODEL, model="llama-3.1-8b"),
        setting_options("decode_sms", "capture_plan", "prompt_order", "prefix_caching"),
        setting_options("max_num_seqs", "max_num_batched_tokens", "max_model_len", max_num_seqs=1024),
        setting_options("kv_cache_bytes", "gpu_memory_utilization", "seed"),
        click.option(
            "--host-overhead-ms",
            type=click.FloatRange(0, 1e6),
            default=HOST_OVERHEAD_MS,
            help="Host time per launch. A layer of a long prompt, launched kernel by kernel, takes 2.5 times as long.",
        ),
    ]
)
"""Gives a command the machine to simulate: the first arguments of a :class:`Simulator`, and settings of its engine."""


@click.command(cls=GoodputCommand)
@replay_options(default_policy="auto")
@machine_options
@click.option("--sweep", is_flag=True, help="Find each policy's goodputs, as `bullet-graph bench sweep` does.")
@search_options
@click.option("--plot", type=FILE, help="Draw the sweep; the name ends in .svg or .png.")
@click.option("--trace-decisions", type=FILE, help="Write every decision (see `bullet-graph explain`).")
@result_options
def simulate(
    policies: tuple[Policy, ...],
    sweep: bool,
    smoke: bool,
    plot: Path | None,
    trace_decisions: Path | None,
    save_detailed: bool,
    output: Output,
    arrivals: Arrivals,
    **settings: Any,
) -> None:
    """Serve a trace on a simulated GPU: the engine's own scheduler and planner in virtual time.

    Step times come from a measured table. The same arguments give the same figures. With one policy the JSON is flat,
    as that of vLLM's serving benchmark; with several, the field "results" holds one such object for each.

    \b
    Examples:
      bullet-graph simulate --trace azure:conv --request-rate 20 --goodput ttft:500 tpot:15
      bullet-graph simulate --trace azure:code --request-rate 10 --goodput ttft:500 tpot:8 \\
          --policy mixed:2048 --policy split --policy auto --output-json code.json
      bullet-graph simulate --trace synthetic:conv --goodput ttft:500 tpot:15 --sweep --first-rate 20 --plot conv.svg
    """
    simulated = {name: settings.pop(name) for name in ("gpu", "trace", "num_prompts", "host_overhead_ms")}
    search = GoodputSearch(**{name: settings.pop(name) for name in ("first_rate", "tolerance", "step", "max_runs")})
    config = EngineConfig(**settings)
    if sweep and config.slo == NO_TARGETS:
        raise ConfigError("--sweep looks for the rate that meets the targets: give some, as --goodput ttft:500 tpot:15")
    if sweep and not (arrivals.request_rate == math.inf and arrivals.max_concurrency is None):
        raise ConfigError("--sweep chooses the rates itself: leave out --request-rate and --max-concurrency")
    if not sweep and (plot is not None or smoke or search != GoodputSearch()):
        raise ConfigError("--plot, --smoke and the options of a search are for several rates: add --sweep")
    if trace_decisions is not None and (sweep or len(policies) > 1):
        raise ConfigError("--trace-decisions writes one run: give one --policy, and no --sweep")
    check_result_file(trace_decisions, overwrite=output.overwrite, option="--trace-decisions")
    check_plot_file(plot, overwrite=output.overwrite)
    simulator = Simulator(config=config, arrivals=arrivals, **simulated)
    simulator.workload.require_fit(simulator.max_model_len)
    show_progress = not output.as_json and sys.stderr.isatty()
    title = simulator.title()
    if not sweep:
        runs = {}
        total = len(policies) * len(simulator.workload.requests)
        with contextlib.ExitStack() as stack:
            advance = stack.enter_context(progress_bar(show_progress, total=total, unit="req"))
            decisions = None
            if trace_decisions is not None:
                decisions = simulator.open_trace(trace_decisions, policies[0], overwrite=output.overwrite)
                stack.enter_context(contextlib.closing(decisions))
            for policy in policies:
                runs[str(policy)] = simulator.run(policy, trace=decisions, on_done=lambda _: advance(1))
        emit_replays(title, runs, simulator.describe(), output, detailed=save_detailed)
        return

    fitting = dataclasses.replace(search, fastest=fastest_rate(simulator.workload, smoke=smoke))
    searches = {str(p): _search(simulator, p, fitting, smoke=smoke, show=show_progress) for p in policies}
    runs_of = {policy: [run.fields() for run in runs] for policy, runs in searches.items()}

    def show() -> None:
        print_line(title)
        print_table(goodput_table(None, runs_of, search.tolerance))

    found = {
        policy: goodput_fields(runs_of[policy]) | {"results": [run.fields(detailed=save_detailed) for run in runs]}
        for policy, runs in searches.items()
    }
    output.emit(simulator.describe() | {"tolerance": search.tolerance, "policies": found}, show)
    if plot is not None:
        # matplotlib is an extra.
        from bullet_graph.cli.plots import draw_rates  # noqa: PLC0415

        write_result_file(plot, draw_rates(plot.suffix[1:].lower(), runs_of, title=title, slo=config.slo))
        if not output.as_json:
            print_line(f"wrote {plot}")


def _search(simulator: Simulator, policy: Policy, search: GoodputSearch, *, smoke: bool, show: bool) -> list[ReplayRun]:
    """The runs of a search for a policy's goodputs, lowest rate first."""
    runs: dict[float, ReplayRun] = {}
    while (rate := search.next_rate([RateRun.of(run.fields()) for run in runs.values()])) is not None:
        workload, arrivals = at_rate(simulator.workload, simulator.arrivals, rate, smoke=smoke)
        label = f"run {len(runs) + 1}, {policy}, {rate:.4g}/s"
        with progress_bar(show, total=len(workload.requests), unit="req", desc=label, leave=False) as advance:
            runs[rate] = simulator.run(policy, arrivals, workload, on_done=lambda _: advance(1))
    return [runs[rate] for rate in sorted(runs)]
