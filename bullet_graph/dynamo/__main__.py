"""``python -m bullet_graph.dynamo``: the worker's command line."""

import argparse
import importlib.metadata
import json
from functools import partial
from pathlib import Path
from typing import Any

import click
from platformdirs import user_cache_path

from bullet_graph.cli.engine_run import leave_stuck_engine, open_engine
from bullet_graph.cli.main import ErrorReporting
from bullet_graph.cli.options import all_of, engine_options, setting_option
from bullet_graph.cli.result_file import require_extra, write_result_file
from bullet_graph.config import EngineConfig
from bullet_graph.errors import BulletGraphError, ConfigError, ModelError
from bullet_graph.models.presets import PRESETS_OF_BYTES, resolve_model
from bullet_graph.models.tokenizer import byte_tokenizer
from bullet_graph.serve.settings import SERVE_SETTINGS, ServeSettings

_NAME = "python -m bullet_graph.dynamo"
_RELEASE = "1.6"
_OF_SERVER = {
    "max_queue_len": SERVE_SETTINGS["max_queue_len"].help,
    "shutdown_timeout_s": "After SIGTERM and Dynamo's grace period, time for requests in progress; then they are "
    "aborted, and the frontend may move them.",
    "watchdog_timeout_s": "After this long without progress on a lane, all requests fail, and the worker ends.",
}
"""Settings that the server has as well, and what they mean here."""


class _WorkerCommand(ErrorReporting):
    """Its help ends with the options that Dynamo's runtime has for every worker."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        try:
            shown = _runtime_parser().format_help()
        except ConfigError as error:
            shown = f"Dynamo Runtime Options: not known here, for {error}\n"
        formatter.write(f"\n{shown}")


@click.command(
    _NAME,
    cls=_WorkerCommand,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "ignore_unknown_options": True,
        "allow_extra_args": True,
    },
)
@engine_options(max_num_seqs=256)
@click.option("--served-model-name", help="The model's name in requests.  [default: --model]")
@all_of([setting_option(SERVE_SETTINGS[name], help=text) for name, text in _OF_SERVER.items()])
@click.option(
    "--warmup/--no-warmup",
    default=True,
    help="Serve a few requests before registering, so that no client waits for kernels compiled on first use.",
)
def main(
    config: EngineConfig, trace_decisions: Path | None, served_model_name: str | None, warmup: bool, **settings: Any
) -> None:
    """Serve the model as a worker of NVIDIA Dynamo, whose frontend speaks HTTP and chooses the worker.

    Options of Dynamo's runtime, shown at the end, are taken as well.

    \b
    Examples:
      python -m bullet_graph.dynamo --model tiny --device cpu --discovery-backend file
      python -m bullet_graph.dynamo --model Qwen/Qwen3-8B --policy auto --slo "ttft:500 tpot:15" \\
          --dyn-tool-call-parser hermes
    """
    runtime = _runtime_config(click.get_current_context().args)
    # Dynamo's libraries are an extra.
    from dynamo.common.backend.run import run  # noqa: PLC0415
    from dynamo.common.backend.worker import WorkerConfig  # noqa: PLC0415

    from bullet_graph.dynamo.worker import BulletGraphEngine  # noqa: PLC0415

    named = config.model if served_model_name is None else served_model_name
    make = partial(open_engine, config, quiet=False, trace_decisions=trace_decisions)
    folder = str(model_folder(config.model, config.revision))
    server = ServeSettings(served_model_name=named, **settings)
    engine = BulletGraphEngine(make, server, model_path=folder, warmup=warmup)
    worker = WorkerConfig.from_runtime_config(runtime, model_name=folder, served_model_name=named)

    async def made(_: list[str] | None) -> tuple[BulletGraphEngine, Any]:
        return engine, worker

    try:
        run(BulletGraphEngine, engine_factory=made)
    except Exception as error:
        # Dynamo's runtime, in Rust, has no traceback that tells more.
        raise engine.failure or BulletGraphError(f"Dynamo's runtime has failed: {error}") from None
    if engine.stuck:
        leave_stuck_engine()
    if engine.failure is not None:
        raise engine.failure


def _runtime_parser() -> argparse.ArgumentParser:
    """Dynamo's own parser of the options that all workers have; ConfigError where Dynamo is not installed."""
    try:
        found = importlib.metadata.version("ai-dynamo")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if not found.startswith(f"{_RELEASE}."):
        raise ConfigError(f"{_NAME} needs ai-dynamo {_RELEASE}, found {found}: pip install 'bullet-graph[dynamo]'")
    require_extra(_NAME, "fastapi", "prometheus_client", "uvicorn", extra="dynamo")
    from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup  # noqa: PLC0415

    parser = argparse.ArgumentParser(_NAME, add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    DynamoRuntimeArgGroup().add_arguments(parser)
    return parser


def _runtime_config(arguments: list[str]) -> Any:
    """The settings of Dynamo's runtime, from the options that are not this project's."""
    found = _runtime_parser().parse_args(arguments)
    from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeConfig  # noqa: PLC0415
    from dynamo.common.utils.runtime import parse_endpoint  # noqa: PLC0415

    runtime = DynamoRuntimeConfig.from_cli_args(found)
    try:
        runtime.validate()
        endpoint = runtime.endpoint or f"{runtime.namespace}.backend.generate"
        runtime.namespace, runtime.component, runtime.endpoint = parse_endpoint(endpoint)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return runtime


def model_folder(model: str, revision: str | None) -> Path:
    """The folder that the frontend reads: the model's own, or one in the user's cache for a preset of bytes.

    The frontend tokenizes prompts and writes texts by its files. Dynamo takes workers for the same model only if they
    name the same folder. Raises ModelError where there is no such model, or no tokenizer in it, and ConfigError where
    the cache cannot be written.
    """
    found = resolve_model(model, revision)
    if found.folder is not None and (found.folder / "tokenizer.json").exists():
        return found.folder.resolve()
    if found.folder is not None or found.name not in PRESETS_OF_BYTES:
        raise ModelError(
            f"Dynamo's frontend needs the model's tokenizer, and {model} has none: give a folder or a hub id with "
            "tokenizer.json"
        )
    tokenizer = byte_tokenizer(found.config.vocab_size)
    assert tokenizer.eos_token_id is not None
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=False),
        "chat_template": tokenizer.chat_template,
    }
    # What the frontend reads of it. Nobody loads weights from here.
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": found.config.vocab_size,
        "max_position_embeddings": found.config.max_position_embeddings,
        "eos_token_id": [*found.config.eos_token_ids],
    }
    folder = user_cache_path("bullet_graph") / "dynamo" / found.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Other workers may be writing them, with the same text, or reading.
        write_result_file(folder / "tokenizer.json", tokenizer.to_json().encode())
        write_result_file(folder / "tokenizer_config.json", json.dumps(settings).encode())
        write_result_file(folder / "config.json", json.dumps(shape).encode())
    except (OSError, ConfigError) as error:
        raise ConfigError(f"{folder} must take the tokenizer of {model}, and cannot be written: {error}") from error
    return folder


if __name__ == "__main__":
    main()
