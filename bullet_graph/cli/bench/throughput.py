"""``bullet-graph bench throughput``: every request of a workload at once."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from bullet_graph.cli.engine_run import RunRecord, describe_run, load_requests, open_engine, watch_device
from bullet_graph.cli.options import engine_options, result_options
from bullet_graph.cli.replay_options import num_prompts_option, trace_option
from bullet_graph.cli.result_file import check_result_file, emit
from bullet_graph.cli.tables import figures_table, percentiles_table, print_failures, print_table
from bullet_graph.config import EngineConfig
from bullet_graph.engine.engine import Engine
from bullet_graph.engine.output import OutputKind, RequestOutput
from bullet_graph.engine.replay import recorded_length, require_forced_length
from bullet_graph.errors import RequestError, WorkloadError
from bullet_graph.perf.metrics import summarize_ms
from bullet_graph.runtime.resolve import resolve
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.workloads import WorkloadRequest, make_prompt_token_ids

_WARMUP_REQUESTS = 4
_WARMUP_OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class _Request:
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class _Served:
    """What became of the requests; ``failures`` has the reason of each that was refused, by index."""

    elapsed_s: float
    completed: tuple[RequestOutput, ...]
    failures: dict[int, str]


@click.command()
@engine_options(max_num_seqs=1024)
@trace_option
@num_prompts_option
@click.option(
    "--warmup/--no-warmup",
    default=True,
    show_default=True,
    help="Serve a few small requests first, so that the measurement compiles no kernels.",
)
@result_options
def throughput(
    config: EngineConfig,
    trace: str,
    num_prompts: int | None,
    warmup: bool,
    output_json: Path | None,
    overwrite: bool,
    as_json: bool,
    trace_decisions: Path | None,
) -> None:
    """Serve a whole trace at once and measure tokens per second.

    Every request is there from the start and samples greedily until its recorded output length. A request that is
    longer than the model's limit fails alone and is counted.

    \b
    Examples:
      bullet-graph bench throughput --model tiny --trace synthetic:conv --num-prompts 20
      bullet-graph bench throughput --model llama-3.1-8b --trace azure:code --num-prompts 400 \\
          --policy mixed:4096 --output-json code.json
      bullet-graph bench throughput --model llama-3.1-8b --trace azure:conv --num-prompts 600 \\
          --policy auto --trace-decisions decisions.jsonl
    """
    check_result_file(output_json, overwrite=overwrite)
    # Errors in the settings and the trace show before the weights are loaded.
    runtime = resolve(config)
    workload = load_requests(runtime, trace, num_prompts, seed=config.seed)
    requests = _make_requests(workload.requests, 0, runtime.model.vocab_size, config.seed)
    with open_engine(config, quiet=as_json, trace_decisions=trace_decisions) as engine:
        if warmup:
            # Short outputs for the workload's first prompt lengths; other tokens, so that nothing can be reused.
            first = [
                dataclasses.replace(r, output_tokens=_WARMUP_OUTPUT_TOKENS, prompt_token_ids=None)
                for r in workload.requests[:_WARMUP_REQUESTS]
            ]
            others = _make_requests(first, len(requests), runtime.model.vocab_size, config.seed)
            _serve(engine, others, show_progress=False)
        before = engine.stats()
        with watch_device(engine) as monitor:
            served = _serve(engine, requests, show_progress=not as_json)
        record = describe_run(config, runtime, before, engine.stats(), monitor.report, engine)
    fields = _fields(workload.name, served, record)
    emit(fields, output_json, as_json=as_json, show=lambda: _print(fields))


def _make_requests(
    requests: Sequence[WorkloadRequest], first_index: int, vocab_size: int, seed: int
) -> list[_Request]:
    return [
        _Request(make_prompt_token_ids(request, index, vocab_size, seed).tolist(), recorded_length(request))
        for index, request in enumerate(requests, first_index)
    ]


def _serve(engine: Engine, requests: Sequence[_Request], *, show_progress: bool) -> _Served:
    """Add all requests and step until none is left; one that is refused does not hold up the others."""
    completed: list[RequestOutput] = []
    failures: dict[int, str] = {}
    num_output_tokens = 0
    # disable=None: no bar where stderr is not a terminal.
    with tqdm(total=len(requests), unit="req", disable=None if show_progress else True) as bar:
        start_s = time.perf_counter()
        for index, request in enumerate(requests):
            try:
                require_forced_length(len(request.prompt_token_ids), request.params, engine.max_model_len)
                engine.add_request(
                    str(index), request.prompt_token_ids, request.params, output_kind=OutputKind.FINAL_ONLY
                )
            except RequestError as error:
                failures[index] = str(error)
                bar.update()
        while engine.has_unfinished_requests():
            for output in engine.step():
                completed.append(output)
                num_output_tokens += len(output.outputs[0].token_ids)
                bar.set_postfix(output_tokens=num_output_tokens, refresh=False)
                bar.update()
        elapsed_s = time.perf_counter() - start_s
    return _Served(elapsed_s, tuple(completed), failures)


def _fields(trace: str, served: _Served, record: RunRecord) -> dict[str, Any]:
    """The figures for a JSON file, with the names of vLLM's throughput benchmark.

    Counts, totals and rates are of completed requests; ``tokens_per_second`` counts prompt and output tokens.
    """
    completed, elapsed_s = served.completed, served.elapsed_s
    if not completed:
        raise WorkloadError(
            f"none of the {len(served.failures)} requests of {trace} could be served; "
            f"the first: {served.failures[0]}"
        )
    num_input = sum(len(output.prompt_token_ids) for output in completed)
    num_output = sum(len(output.outputs[0].token_ids) for output in completed)
    metrics = [output.metrics for output in completed]
    summaries = {
        "ttft_ms": summarize_ms(m.ttft_ms for m in metrics),
        "tpot_ms": summarize_ms(m.tpot_ms for m in metrics),
        "itl_ms": summarize_ms(gap for m in metrics for gap in m.itl_ms),
        "e2e_ms": summarize_ms(m.e2e_ms for m in metrics),
    }
    joules = record.device.energy_joules
    return {
        "elapsed_time": elapsed_s,
        "num_requests": len(completed),
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(completed) / elapsed_s,
        "tokens_per_second": (num_input + num_output) / elapsed_s,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "output_tokens_per_second": num_output / elapsed_s,
        "num_failed": len(served.failures),
        "failures": [{"index": index, "reason": reason} for index, reason in served.failures.items()],
        "trace": trace,
        **{name: None if s is None else dataclasses.asdict(s) for name, s in summaries.items()},
        "energy_joules": joules,
        "joules_per_token": None if joules is None else joules / (num_input + num_output),
        "joules_per_output_token": None if joules is None else joules / num_output,
        **dataclasses.asdict(record),
    }


def _print(fields: dict[str, Any]) -> None:
    rows = {
        "elapsed": f"{fields['elapsed_time']:,.2f} s",
        "requests": f"{fields['num_requests']:,} done, {fields['num_failed']:,} failed",
        "tokens in / out": f"{fields['total_input_tokens']:,} / {fields['total_output_tokens']:,}",
        "requests a second": f"{fields['requests_per_second']:,.2f}",
        "tokens a second": f"{fields['tokens_per_second']:,.1f}",
        "output tokens a second": f"{fields['output_tokens_per_second']:,.1f}",
    }
    if fields["energy_joules"] is not None:
        rows["energy"] = f"{fields['energy_joules']:,.0f} J"
        rows["energy an output token"] = f"{fields['joules_per_output_token']:,.3f} J"
    title = f"Throughput: {fields['model']}, {fields['trace']}, policy {fields['policy']}"
    print_table(figures_table(title, fields, rows))
    latencies = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "e2e": "e2e_ms"}
    print_table(percentiles_table({label: fields[name] for label, name in latencies.items()}))
    print_failures({failure["index"]: failure["reason"] for failure in fields["failures"]})
