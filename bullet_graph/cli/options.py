"""Options that several commands share; the engine's are made from :class:`bullet_graph.config.EngineConfig`."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click
from click.core import ParameterSource

from bullet_graph.cli.result_file import check_result_file
from bullet_graph.config import DEFAULTS, HINTS, SETTINGS, EngineConfig, parse_bytes, parse_counts
from bullet_graph.errors import ConfigError

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
OptionCallback = Callable[[click.Context, click.Parameter, str | None], Any]


def parsed_by(parse: Callable[[str], Any], without: Any = None) -> OptionCallback:
    """An option's callback that reads its text.

    Args:
        parse: raises ConfigError for a wrong text, with the forms allowed.
        without: the value where the option is not given.
    """

    def callback(_: click.Context, __: click.Parameter, text: str | None) -> Any:
        try:
            return without if text is None else parse(text)
        except ConfigError as error:
            raise click.BadParameter(str(error)) from None

    return callback


parse_size = parsed_by(parse_bytes)
parse_sizes = parsed_by(parse_counts, ())


def setting_options(*names: str, **defaults: Any) -> Decorator:
    """Give a command some of the engine's settings as options.

    Args:
        names: of fields of :class:`~bullet_graph.config.EngineConfig`.
        defaults: the command's own defaults, in the place of the engine's.
    """
    return all_of([_setting_option(name, defaults) for name in names])


def _setting_option(name: str, defaults: dict[str, Any], **look: Any) -> Decorator:
    setting, hint = SETTINGS[name], HINTS[name]
    flag = f"--{name.replace('_', '-')}"
    types = [each for each in get_args(hint) if each is not NoneType]
    look = {"help": setting.help, "metavar": setting.metavar} | look
    if name not in {**DEFAULTS, **defaults}:
        return click.option(flag, required=True, **look)
    default = defaults.get(name, DEFAULTS.get(name))
    if default == DEFAULTS.get(name) and setting.no_value is not None:
        look["help"] += f"  [default: {setting.no_value}]"
    else:
        look = {"default": default, "show_default": True} | look
    if setting.parse is not None:
        if "default" in look:
            look["default"] = str(default)
        return click.option(flag, callback=parsed_by(setting.parse, default), **look)
    if hint is bool:
        return click.option(f"{flag}/--no-{flag[2:]}" if default else flag, is_flag=True, **look)
    if get_origin(hint) is Literal:
        return click.option(flag, type=click.Choice(types), **look)
    if setting.minimum is not None:
        return click.option(flag, type=click.IntRange(min=setting.minimum), **look)
    return click.option(flag, type=types[0] if types else hint, **look)


def engine_options(
    *, max_num_seqs: int, max_num_seqs_shown: str | bool = True, without: Collection[str] = ()
) -> Decorator:
    """Give a command the engine's settings, as ``config: EngineConfig``, and ``trace_decisions: Path | None``.

    When the command runs, the trace's file does not exist or may be replaced.

    Args:
        max_num_seqs: the command's default.
        max_num_seqs_shown: what the help calls that default.
        without: settings that the command has options of its own for; the config has their defaults.
    """
    names = [name for name in SETTINGS if name not in without]
    options = [
        _setting_option(
            name,
            {"max_num_seqs": max_num_seqs},
            **({"show_default": max_num_seqs_shown} if name == "max_num_seqs" else {}),
        )
        for name in names
    ]
    if "trace_decisions" not in without:
        options.append(
            click.option(
                "--trace-decisions",
                metavar="FILE",
                type=click.Path(path_type=Path),
                help="Write every decision of the planner (see `bullet-graph explain`).",
            )
        )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_config(**arguments: Any) -> None:
            config = EngineConfig(**{name: arguments.pop(name) for name in names})
            _check_trace_file(
                arguments.get("trace_decisions"), arguments.get("output_json"), arguments.get("overwrite")
            )
            command(config=config, **arguments)

        return all_of(options)(with_config)

    return decorate


def all_of(options: list[Decorator]) -> Decorator:
    """The options together, in this order in the help."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _check_trace_file(path: Path | None, output_json: Path | None, overwrite: bool | None) -> None:
    check_result_file(path, overwrite=overwrite, option="--trace-decisions")
    if path is not None and output_json is not None and path.resolve() == output_json.resolve():
        raise ConfigError(f"--trace-decisions {path}: the result goes there; give another name")


def fit_max_num_seqs(config: EngineConfig, num_sequences: int) -> EngineConfig:
    """Make room for just ``num_sequences``, unless the user gave ``--max-num-seqs``: fewer CUDA graphs to capture.

    A capture plan or a capture cache is for one number of sequences, and keeps it.
    """
    if config.capture_plan is not None or config.capture_cache is not None:
        return config
    source = click.get_current_context().get_parameter_source("max_num_seqs")
    if source is not ParameterSource.DEFAULT:
        return config
    return dataclasses.replace(config, max_num_seqs=min(config.max_num_seqs, num_sequences))


result_options = all_of(
    [
        click.option(
            "--output-json", type=click.Path(path_type=Path), help="Write the result to this file as well."
        ),
        click.option("--overwrite", is_flag=True, help="Replace output files that exist."),
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON and nothing else."),
    ]
)
"""Gives a command ``output_json``, ``overwrite`` and ``as_json``: where its result goes."""
