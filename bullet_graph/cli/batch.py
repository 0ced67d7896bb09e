"""``bullet-graph batch``: answers the rows of files on one machine or a cluster."""

import contextlib
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from bullet_graph.cli.options import COUNT, engine_options, json_option, parse_object
from bullet_graph.cli.result_file import require_extra, to_json
from bullet_graph.config import EngineConfig
from bullet_graph.errors import ConfigError

_EXTRA = ("ray", "pyarrow", "fastapi", "prometheus_client")
_FIXED = ("model", "revision", "load_format", "seed", "dtype", "quantization", "kv_cache_dtype", "generation_config")


@click.command()
@click.option(
    "--input",
    "source",
    required=True,
    metavar="PATH|URI",
    help="File or folder of JSON lines or parquet: OpenAI's batch format, or rows with `prompt` or `messages`; or s3://….",
)
@click.option(
    "--output",
    "folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the answers, which all machines see. With answers of the same batch: only the rest is done.",
)
@engine_options(max_num_seqs=256, without=("trace_decisions", "reject_late"))
@click.option("--served-model-name", help="The model's name in rows that give one.  [default: --model]")
@click.option(
    "--request-defaults",
    metavar="JSON",
    callback=parse_object,
    help="Fields of requests that leave them out, such as '{\"max_tokens\": 256}'.",
)
@click.option("--num-workers", type=COUNT, help="Engines.  [default: as many as there are GPUs for; on the CPU 1]")
@click.option("--ray-address", help="Ray's cluster.  [default: the one that runs here, or Ray inside this process]")
@json_option
def batch(
    config: EngineConfig,
    source: str,
    folder: Path,
    served_model_name: str | None,
    request_defaults: dict[str, Any] | None,
    num_workers: int | None,
    ray_address: str | None,
    as_json: bool,
) -> None:
    """Answer every row of files, as the server would, and write each answer once.

    Rows with the longest outputs come first. The folder gets output.jsonl in OpenAI's batch format, in the order of the
    input. What is wrong with a row is its `error`. Rows that a dead worker has not written are done by others. The same
    command goes on after an interruption.

    \b
    Examples:
      bullet-graph batch --input prompts.jsonl --output answers --model ./Qwen3-8B
      bullet-graph batch --input s3://bucket/prompts.parquet --output /shared/answers --model Qwen/Qwen3-8B \\
          --ray-address auto --num-workers 16 --request-defaults '{"max_tokens": 256}'
    """
    require_extra("bullet-graph batch", *_EXTRA, extra="ray")
    # Ray's libraries are an extra, and --help works without them.
    from bullet_graph.ray.batch_files import read_input  # noqa: PLC0415

    if folder.absolute().is_relative_to(Path(source).absolute()):
        raise ConfigError(f"--output {folder} is in --input {source}, and would be read as input: give another folder")
    rows = read_input(source, request_defaults)
    from bullet_graph.ray.job import run_batch  # noqa: PLC0415

    # Ray tells each step of a data set on stderr.
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    named = config.model if served_model_name is None else served_model_name
    quiet = as_json or not sys.stderr.isatty()
    # Ray tells of workers that died on stdout.
    with contextlib.redirect_stdout(sys.stderr), tqdm(total=len(rows.custom_ids), unit="row", disable=quiet) as bar:
        report = run_batch(
            rows,
            folder,
            config.values() | {"served_model_name": named},
            identity={"served_model_name": named} | {name: getattr(config, name) for name in _FIXED},
            num_workers=num_workers,
            address=ray_address,
            on_progress=bar.update,
        )
    if as_json:
        click.echo(to_json(asdict(report)))
        return
    click.echo(
        f"{report.rows - report.skipped:,} rows done, {report.skipped:,} were there, {report.errors:,} have an error: "
        f"{report.output}\n"
        f"{report.prompt_tokens:,} prompt tokens, {report.output_tokens:,} output tokens, {report.seconds:.1f} s"
    )
