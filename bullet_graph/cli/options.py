"""Options that several commands share; the engine's are made from :class:`bullet_graph.config.EngineConfig`."""

import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import click
from click.core import ParameterSource

from bullet_graph.cli.result_file import Output, check_result_file
from bullet_graph.config import SETTINGS, EngineConfig, Setting, parse_bytes

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
OptionCallback = Callable[[click.Context, click.Parameter, str | tuple[str, ...] | None], Any]

FILE = click.Path(path_type=Path)
COUNT = click.IntRange(min=1)


def parsed_by(parse: Callable[[str], Any], without: Any = None) -> OptionCallback:
    """An option's callback that reads each text with ``parse``; ``without`` is its value where it is not given."""

    def callback(_: click.Context, __: click.Parameter, given: str | tuple[str, ...] | None) -> Any:
        try:
            if isinstance(given, tuple):
                return tuple(map(parse, given))
            return without if given is None else parse(given)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


parse_size = parsed_by(parse_bytes)


def parse_object(_: click.Context, __: click.Parameter, text: str | None) -> dict[str, Any] | None:
    """An option's callback that reads a JSON object."""
    try:
        value = None if text is None else json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"write a JSON object ({error})") from error
    if value is not None and not isinstance(value, dict):
        raise click.BadParameter("write a JSON object")
    return value


def setting_options(*names: str, **defaults: Any) -> Decorator:
    """Give a command these fields of :class:`~bullet_graph.config.EngineConfig`, with its own defaults for some."""
    return all_of([setting_option(SETTINGS[name], defaults.get(name, MISSING)) for name in names])


def setting_option(setting: Setting, default: Any = MISSING, **look: Any) -> Decorator:
    """The option of a setting, with a command's own ``default`` if there is one."""
    hint, flag = setting.hint, setting.flag or f"--{setting.name.replace('_', '-')}"
    types = [each for each in get_args(hint) if each is not NoneType]
    look = {"help": setting.help, "metavar": setting.metavar} | look
    default = setting.default if default is MISSING else default
    if default is MISSING:
        look["required"] = True
    elif setting.no_value is not None and default == setting.default:
        look["help"] += f"  [default: {setting.no_value}]"
    elif setting.parse is parse_bytes:
        look["default"] = f"{default >> 10}KiB"
    else:
        look["default"] = default
    if setting.parse is not None:
        look["callback"] = parsed_by(setting.parse, default)
    elif hint is bool:
        flag, look["is_flag"] = f"{flag}/--no-{flag[2:]}" if default else flag, True
    elif setting.choices:
        look["type"] = click.Choice(setting.choices)
    elif setting.minimum is not None:
        look["type"] = click.IntRange(min=setting.minimum)
    else:
        look["type"] = types[0] if types else hint
    return click.option(flag, setting.name, **look)


def decode_sms_option(help_text: str, without: str) -> Decorator:
    """The option of the setting ``decode_sms``, with what it means to a command with and ``without`` a value."""
    return setting_option(dataclasses.replace(SETTINGS["decode_sms"], help=help_text, no_value=without))


def engine_options(*, max_num_seqs: int, default_shown: str | None = None, without: Collection[str] = ()) -> Decorator:
    """Give a command the engine's settings, as ``config: EngineConfig``, and ``trace_decisions: Path | None``.

    When the command runs, the trace's file does not exist or may be replaced. The config has the defaults of those
    settings that the command goes ``without``. The help says ``default_shown`` for the default ``max_num_seqs``.
    """
    names = [name for name in SETTINGS if name not in without]
    own = {"max_num_seqs": {"default": max_num_seqs, "show_default": default_shown}}
    options = [setting_option(SETTINGS[name], **own.get(name, {})) for name in names]
    if "trace_decisions" not in without:
        help_text = "Write every decision of the planner (see `bullet-graph explain`)."
        options.append(click.option("--trace-decisions", metavar="FILE", type=FILE, help=help_text))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_config(**arguments: Any) -> None:
            config = EngineConfig(**{name: arguments.pop(name) for name in names})
            path, overwrite = arguments.get("trace_decisions"), arguments.get("overwrite")
            check_result_file(path, overwrite=overwrite, option="--trace-decisions")
            command(config=config, **arguments)

        return all_of(options)(with_config)

    return decorate


def all_of(options: Sequence[Decorator]) -> Decorator:
    """The options together, in this order in the help."""
    return lambda command: functools.reduce(lambda given, option: option(given), reversed(options), command)


def fit_max_num_seqs(config: EngineConfig, num_sequences: int) -> EngineConfig:
    """Make room for just ``num_sequences``, unless the user gave ``--max-num-seqs``: fewer CUDA graphs to capture.

    A capture plan or a capture cache is for one number of sequences, and keeps it.
    """
    is_given = click.get_current_context().get_parameter_source("max_num_seqs") is not ParameterSource.DEFAULT
    if is_given or config.capture_plan is not None or config.capture_cache is not None:
        return config
    return dataclasses.replace(config, max_num_seqs=min(config.max_num_seqs, num_sequences))


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")


def result_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``output: Output``; its file does not exist or may be replaced."""

    @functools.wraps(command)
    def with_output(output_json: Path | None, overwrite: bool, as_json: bool, **arguments: Any) -> None:
        check_result_file(output_json, overwrite=overwrite)
        command(output=Output(output_json, overwrite, as_json), **arguments)

    options = [
        click.option("--output-json", type=FILE, help="Write the result to this file as well."),
        click.option("--overwrite", is_flag=True, help="Replace output files that exist."),
        json_option,
    ]
    return all_of(options)(with_output)
