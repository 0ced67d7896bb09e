"""Commands that measure each file anew."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import click

from bench.peers.command import compare
from bench.reporting.evidence import Source, is_own
from bullet_graph.cli.bench.sweep_cells import SYSTEM

# Files that do not tell how they came about.
_BY_NAME = {
    "policies.json": "python bench/policies.py --output-json {path}  # several runs are joined by bench/join_runs.py",
    "conv_mixed1024.json": (
        "bullet-graph bench throughput --model llama-3.1-8b --max-model-len 20000 --trace azure:conv "
        "--num-prompts 600 --policy mixed:1024 --output-json {path}"
    ),
    "decode_attention.json": "python bench/kernels/decode_attention.py --output-json {path}",
    "decode_step.json": "python bench/kernels/decode_step.py --output-json {path}",
    "gpu_tests.json": "pytest tests/gpu -m gpu --gpu-report {path}",
    "layer_rows.json": "python bench/kernels/layer_rows.py --output-json {path}",
    "partitions.json": "python bench/partition_table.py {folder}/gpu_tests.json {path}",
    "prefill_attention.json": "python bench/kernels/prefill_attention.py --output-json {path}",
    "prefill_gemm.json": "python bench/kernels/prefill_gemm.py --output-json {path}",
    "simulation_error.json": "python bench/simulation_error.py {folder}/policies.json --output-json {path}",
    "wave_gain.json": "python bench/wave_gain.py capture/{table} --output-json {path}",
}
_OFFLINE_KINDS = {"decode_step_ms": "bench latency", "elapsed_time": "bench throughput"}


def command_for(source: Source, folder: str) -> str | None:
    """What writes a file like this one, as a shell reads it; None: nobody has told.

    Args:
        source: the file.
        folder: of the results, as the command is to name it.
    """
    path = f"{folder}/{source.name}"
    if source.sweep is not None and "systems" in source.sweep.settings:
        return _comparison(source.sweep.settings, path)
    if source.measurements:
        return _offline(source, path)
    if source.is_scaling:
        return _partitions(source.fields, path)
    known = _BY_NAME.get(source.name)
    if known is None:
        return None
    table = source.fields.get("table", "") if isinstance(source.fields, dict) else ""
    return known.format(path=path, folder=folder, table=table)


def _comparison(settings: Mapping[str, Any], path: str) -> str:
    words = ["python", "-m", "bench.peers"]
    given = {**settings, "systems": [_system(label) for label in settings["systems"]]}
    for parameter in compare.params:
        value = given.get(parameter.name or "")
        is_given = value is not None and value is not False and value != []
        if isinstance(parameter, click.Option) and is_given and value != parameter.default:
            words += _option(parameter, value)
    return shlex.join([*words, "--output-json", path])


def _option(option: click.Option, value: Any) -> Iterator[str]:
    name = option.opts[0]
    if option.is_flag:
        yield name
    elif option.multiple:
        for one in value:
            yield from (name, str(one))
    else:
        yield name
        yield ",".join(f"{one:g}" for one in value) if isinstance(value, list) else str(value)


def _system(label: str) -> str:
    """A system of a file as ``--system`` takes it."""
    if is_own(label):
        return f"own:{label.removeprefix(SYSTEM).strip()}"
    if label.startswith(("http://", "https://")):
        return f"openai:{label}"
    kind, _, chunk = label.partition(" chunk ")
    return f"{kind.split()[0]}:{chunk}" if chunk else kind.split()[0]


def _offline(source: Source, path: str) -> str:
    words = ["python", "bench/offline.py"]
    models = {str(one.get("model")) for one in source.measurements}
    if len(models) == 1 and models != {"llama-3.1-8b"}:
        words += ["--model", *models]
    kinds = {
        kind for field, kind in _OFFLINE_KINDS.items() if any(field in one for one in source.measurements)
    }
    if len(kinds) == 1:
        words += ["--only", min(kinds).removeprefix("bench ")]
    repeats = max(Counter(str(one["command"]) for one in source.measurements).values())
    if repeats > 1:
        words += ["--repeats", str(repeats)]
    return shlex.join([*words, "--output-json", path])


def _partitions(fields: Mapping[str, Any], path: str) -> str:
    words = ["python", "bench/partitions.py", "--model", str(fields.get("model"))]
    words += ["--backend", str(fields["backend"]).split(":")[0]]
    sizes = sorted(
        {p["decode_sms"] for p in fields["points"] if p.get("decode_sms") and p.get("prefill_sms")}
    )
    if sizes:
        words += ["--decode-sms", ",".join(map(str, sizes))]
    for name in ("batch_size", "context", "prompt", "seconds"):
        if name in fields:
            words += [f"--{name.replace('_', '-')}", str(fields[name])]
    if any(point.get("grid_follows") is False for point in fields["points"]):
        words.append("--grid-of-device")
    return shlex.join([*words, "--output-json", path])
