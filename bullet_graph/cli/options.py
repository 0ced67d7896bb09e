"""Options that several commands share."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from bullet_graph.cli.result_file import check_result_file
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
from bullet_graph.errors import ConfigError
from bullet_graph.slo import Slo

_UNITS = {"": 1, **{f"{p}b": 1000**i for i, p in enumerate(("", "k", "m", "g", "t"))}}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate(("k", "m", "g", "t"), start=1)}


def parse_size(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """An option's callback: read a number of bytes such as ``8GiB``, ``512MB`` or ``1000000``."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value, flags=re.IGNORECASE)
    unit = match and _UNITS.get(match[2].lower())
    if not match or unit is None:
        raise click.BadParameter(f"{value!r} is no size: write 8GiB, 512MiB, 1.5GB or a number of bytes")
    return int(float(match[1]) * unit)


def parse_sizes(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    """An option's callback: read numbers such as ``32,48``."""
    try:
        return tuple(int(part) for part in value.split(",") if part.strip())
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of numbers: write 32,48,64") from None


def parse_slo(_: click.Context, __: click.Parameter, value: str) -> Slo:
    """An option's callback: read targets such as ``ttft:500 tpot:15``."""
    return Slo.parse(value.replace(",", " ").split())


prompt_order_option = click.option(
    "--prompt-order",
    type=click.Choice(get_args(PromptOrder)),
    default="arrival",
    show_default=True,
    help="Which prompts go first without targets for their first token; longest-output: those with the most "
    "max_tokens, for batches of which nothing is needed before the end.",
)


def engine_options(
    *, max_num_seqs: int, max_num_seqs_shown: str | bool = True, without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the engine's settings, as ``config: EngineConfig``, and ``trace_decisions: Path | None``.

    The trace's file may be written when the command runs: it does not exist, or may be replaced.

    Args:
        max_num_seqs: the command's default.
        max_num_seqs_shown: what the help calls that default, where the number would not do.
        without: settings that the command has options of its own for; the config has their defaults.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    names = tuple(name for name in defaults if name not in without)
    options = {
        "model": click.option(
            "--model", required=True, help="A preset's name, or a Hugging Face model folder."
        ),
        "load_format": click.option(
            "--load-format",
            type=click.Choice(get_args(LoadFormat)),
            default=defaults["load_format"],
            show_default=True,
            help="dummy: seeded random weights; auto: dummy for a preset, safetensors for a folder.",
        ),
        "dtype": click.option(
            "--dtype",
            type=click.Choice(get_args(DtypeName)),
            default=defaults["dtype"],
            show_default=True,
            help="auto: config.json's on a GPU, float32 on the CPU.",
        ),
        "device": click.option(
            "--device",
            type=click.Choice(get_args(DeviceName)),
            default=defaults["device"],
            show_default=True,
            help="auto: the GPU where there is one.",
        ),
        "policy": click.option(
            "--policy",
            default=str(defaults["policy"]),
            show_default=True,
            metavar="serial|mixed|mixed:CHUNK|split|split:NUM_SMS|auto",
            help="How prefill and decode share the device; CHUNK: most tokens of one forward; auto: chosen at every "
            "step from measured performance.",
        ),
        "prompt_order": prompt_order_option,
        "slo": click.option(
            "--slo",
            metavar="TARGETS",
            callback=parse_slo,
            default="",
            help='Latency targets in ms, such as "ttft:500 tpot:15" or "ttft:0.2ms/token".',
        ),
        "perf_table": click.option(
            "--perf-table",
            metavar="FILE|roofline",
            help="Performance table of `bullet-graph profile`; roofline: an estimate.  [default: the one that fits]",
        ),
        "capture_plan": click.option(
            "--capture-plan",
            metavar="FILE.toml|NAME",
            help="What to capture: a file of `bullet-graph capture plan`, or a plan that comes with the package.  "
            "[default: all batch sizes for all partitions]",
        ),
        "compile": click.option(
            "--compile",
            is_flag=True,
            help="On the CPU: fuse the halves of each layer with torch.compile (captured steps on a GPU always are).",
        ),
        "capture_cache": click.option(
            "--capture-cache",
            metavar="DIR|auto|off",
            callback=lambda _, __, value: None if value in (None, "off") else value,
            help="Start from what `bullet-graph capture build` has put into this folder; auto: the one in your cache "
            "folder.  [default: off]",
        ),
        "self_check": click.option(
            "--self-check",
            type=click.Choice(get_args(SelfCheckChoice)),
            default=defaults["self_check"],
            show_default=True,
            help="At which batch sizes a start from a cache compares its logits with the uncompiled model's.",
        ),
        "ready": click.option(
            "--ready",
            type=click.Choice(get_args(ReadyName)),
            default=defaults["ready"],
            show_default=True,
            help="Serve once all graphs are captured, or the hot ones; the others then follow while there is time.",
        ),
        "max_num_seqs": click.option(
            "--max-num-seqs",
            type=int,
            default=max_num_seqs,
            show_default=max_num_seqs_shown,
            help="Most sequences running at once.",
        ),
        "max_num_batched_tokens": click.option(
            "--max-num-batched-tokens",
            type=int,
            default=defaults["max_num_batched_tokens"],
            show_default=True,
            help="Most tokens of one forward.",
        ),
        "max_model_len": click.option(
            "--max-model-len",
            type=int,
            help="Most tokens of a prompt and its output together.  [default: the model's]",
        ),
        "gpu_memory_utilization": click.option(
            "--gpu-memory-utilization",
            type=float,
            default=defaults["gpu_memory_utilization"],
            show_default=True,
            help="Share of the device's memory to fill.",
        ),
        "kv_cache_bytes": click.option(
            "--kv-cache-bytes",
            metavar="SIZE",
            callback=parse_size,
            help="Size of the KV cache, such as 8GiB.  [default: what memory is left]",
        ),
        "cuda_graphs": click.option(
            "--cuda-graphs/--no-cuda-graphs",
            default=defaults["cuda_graphs"],
            show_default=True,
            help="Capture decode steps into CUDA graphs.",
        ),
        "partition_backend": click.option(
            "--partition-backend",
            type=click.Choice(get_args(PartitionBackendName)),
            default=defaults["partition_backend"],
            show_default=True,
            help="What confines a lane to its SMs; auto: the first that verifies.",
        ),
        "decode_sms": click.option(
            "--decode-sms",
            metavar="N,N,…",
            callback=parse_sizes,
            default="",
            help="Sizes of the decode lane, in SMs, to verify and capture besides the whole GPU.",
        ),
        "seed": click.option(
            "--seed",
            type=click.IntRange(min=0),
            default=defaults["seed"],
            show_default=True,
            help="Of dummy weights, synthetic prompts and sampling.",
        ),
        "trace_decisions": click.option(
            "--trace-decisions",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="Write every decision of the planner (see `bullet-graph explain`).",
        ),
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_config(**arguments: Any) -> None:
            settings = {name: arguments.pop(name) for name in names}
            if "policy" in settings:
                settings["policy"] = Policy.parse(settings["policy"])
            config = EngineConfig(**settings)
            _check_trace_file(
                arguments.get("trace_decisions"), arguments.get("output_json"), arguments.get("overwrite")
            )
            command(config=config, **arguments)

        decorated: Callable[..., None] = with_config
        for name, option in reversed(options.items()):
            if name not in without:
                decorated = option(decorated)
        return decorated

    return decorate


def _check_trace_file(path: Path | None, output_json: Path | None, overwrite: bool | None) -> None:
    check_result_file(path, overwrite=overwrite, option="--trace-decisions")
    if path is not None and output_json is not None and path.resolve() == output_json.resolve():
        raise ConfigError(f"--trace-decisions {path}: the result goes there; give another name")


def fit_max_num_seqs(config: EngineConfig, num_sequences: int) -> EngineConfig:
    """Make room for just so many sequences, unless the user said how many: fewer CUDA graphs to capture.

    A capture plan is for one number of sequences, and so is a cache of captures.
    """
    if config.capture_plan is not None or config.capture_cache is not None:
        return config
    source = click.get_current_context().get_parameter_source("max_num_seqs")
    if source is not ParameterSource.DEFAULT:
        return config
    return dataclasses.replace(config, max_num_seqs=min(config.max_num_seqs, num_sequences))


def result_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``output_json``, ``overwrite`` and ``as_json``: where its result goes."""
    options = (
        click.option(
            "--output-json", type=click.Path(path_type=Path), help="Write the result to this file as well."
        ),
        click.option("--overwrite", is_flag=True, help="Replace output files that exist."),
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON and nothing else."),
    )
    for option in reversed(options):
        command = option(command)
    return command
