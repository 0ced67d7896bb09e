"""The console script ``bullet-graph`` and its groups; each command's module is imported when it is used."""

import contextlib
import errno
import re
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import click

from bullet_graph import errors
from bullet_graph._version import __version__
from bullet_graph.cli import EXIT_ERROR, EXIT_INTERRUPTED

_COMMANDS = {
    "batch": ("batch:batch", "Answer the rows of files, on one machine or a Ray cluster."),
    "doctor": ("doctor:doctor", "Check what works on this machine, and say how to mend the rest."),
    "explain": ("explain:explain", "Sum up a decision trace."),
    "generate": ("generate:generate", "Continue prompts, printing text as it comes."),
    "profile": ("profile:profile", "Measure this GPU for the planner and the simulator."),
    "serve": ("serve:serve", "Serve a model over HTTP, with OpenAI's interface."),
    "simulate": ("simulate:simulate", "Serve a trace on a simulated GPU, in virtual time."),
}

_BENCH_COMMANDS = {
    "latency": ("bench.latency:latency", "Time one batch of equal requests."),
    "online": ("bench.replay:online", "Serve a trace as it arrives: latencies and goodput."),
    "serve": ("bench.replay:serve", "Like `online`, against a server by URL."),
    "startup": ("bench.startup:startup", "Time an engine's start, phase by phase."),
    "sweep": ("bench.sweep:sweep", "Find each policy's goodputs, by workload."),
    "throughput": ("bench.replay:throughput", "Serve a whole trace at once: tokens per second."),
}

_CAPTURE_COMMANDS = {
    "build": ("capture:build", "Compile and collect what an engine needs, so that it starts fast."),
    "explain": ("capture:explain", "Explain why entries fit this machine or do not."),
    "export": ("capture:export", "Write an entry into one file."),
    "import": ("capture:import_", "Place an exported entry into the store."),
    "list": ("capture:list_", "List the entries, or show one."),
    "plan": ("capture_plan:plan", "Propose what to capture for a workload."),
    "prune": ("capture:prune", "Remove entries that are no longer needed."),
}

_COMMAND = f"{__name__}.command"
"""Key of the command that runs, in the context's ``meta``."""

_SETTING = re.compile(
    r"""(?<![\w/."'-])(?P<name>[a-z][a-z0-9_]*)(?![\w/-]|\.\w)"""
    r"(=(?P<value>True\b|False\b|'[^']*'|))?(?P<must> must be)?"
)


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is used, so that ``--help`` never waits for torch.

    ``lazy`` has, by a command's name, its ``"module:attribute"`` in this package and the line of the group's help.
    """

    def __init__(self, *, lazy: Mapping[str, tuple[str, str]], **arguments: Any) -> None:
        stubs = {name: click.Command(name, short_help=line) for name, (_, line) in lazy.items()}
        super().__init__(commands=stubs, **arguments)
        self._lazy = lazy

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        # Here, since the module's import starts the clock of the engine's imports.
        from bullet_graph._imports import load  # noqa: PLC0415

        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        # Libraries that greet on stdout when they are imported would spoil a command's JSON.
        with contextlib.redirect_stdout(sys.stderr):
            command: click.Command = load(f"bullet_graph.cli.{module}", attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        found = super().resolve_command(ctx, args)
        ctx.meta[_COMMAND] = found[1]
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        lines = [(name, self.commands[name].get_short_help_str(80)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(lines)


def with_flags(message: str, command: click.Command) -> str:
    """A message with the command's flags in place of the names that the settings have in Python.

    ``max_model_len=512`` becomes ``--max-model-len 512``. A name without ``_`` changes only before ``=``, ``must be``.
    """
    flags: dict[str, click.Option] = {}
    for option in (each for each in command.params if isinstance(each, click.Option)):
        flags |= {name: option for name in (option.name, option.opts[0][2:].replace("-", "_")) if name}

    def flag(found: re.Match[str]) -> str:
        name, value, must = found.group("name", "value", "must")
        option = flags.get(name)
        if option is None or ("_" not in name and value is None and must is None):
            return found[0]
        shown = (option.secondary_opts or option.opts)[0] if value == "False" else option.opts[0]
        given = "" if value in (None, "True", "False") else f" {value.strip(chr(39))}"
        return f"{shown}{given}{must or ''}"

    return _SETTING.sub(flag, message)


def message_of(error: errors.BulletGraphError, command: click.Command) -> str:
    """An error's message with the command's flags, unless it is about a file, whose keys may be called as settings."""
    is_of_file = isinstance(error, errors.ModelError) or error.__cause__ is not None
    return str(error) if is_of_file else with_flags(str(error), command)


class ErrorReporting(click.Command):
    """Reports the package's own errors and warnings in one line, errors with an exit code; others stay as they are."""

    def invoke(self, ctx: click.Context) -> None:
        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, errors.CaptureCacheWarning | errors.PerfTableWarning):
                click.echo(f"warning: {with_flags(str(message), ctx.meta.get(_COMMAND, self))}", err=True)
            else:
                show_others(message, category, *place, **more)

        show_others, warnings.showwarning = warnings.showwarning, show
        try:
            super().invoke(ctx)
        except errors.BulletGraphError as error:
            if isinstance(error, errors.EngineDeadError) and error.__cause__ is not None:
                # The line alone would hide where a device, or the engine itself, failed.
                traceback.print_exception(error.__cause__)
            click.echo(f"error: {message_of(error, ctx.meta.get(_COMMAND, self))}", err=True)
            ctx.exit(EXIT_ERROR)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            click.echo(f"error: {error.filename or 'standard output'}: {error.strerror}; free some space", err=True)
            ctx.exit(EXIT_ERROR)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        finally:
            warnings.showwarning = show_others


class _ErrorReportingGroup(ErrorReporting, LazyGroup):
    """The program."""


@click.group(
    cls=_ErrorReportingGroup,
    lazy=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, prog_name="bullet-graph")
def main() -> None:
    """LLM inference with continuous batching, a paged KV cache and CUDA graphs.

    \b
    Examples:
      bullet-graph generate --model ./Llama-3.2-1B --prompt "The sea"
      bullet-graph bench throughput --model tiny --trace synthetic:conv --num-prompts 20
      bullet-graph serve --model ./Qwen3-8B --port 8000
      bullet-graph bench latency --model llama-3.1-8b --batch-size 64
      bullet-graph simulate --trace azure:conv --request-rate 20 --goodput ttft:500 tpot:15
      bullet-graph capture list
      bullet-graph doctor
    """
    with contextlib.suppress(AttributeError):  # a console that lacks a character shows another
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]


@main.group(cls=LazyGroup, lazy=_BENCH_COMMANDS)
def bench() -> None:
    """Measure the engine.

    \b
    Examples:
      bullet-graph bench throughput --model tiny --trace synthetic:conv --num-prompts 20
      bullet-graph bench online --model llama-3.1-8b --trace azure:conv --request-rate 20 --goodput ttft:500 tpot:15
      bullet-graph bench latency --model llama-3.1-8b --batch-size 64
      bullet-graph bench startup --model llama-3.1-8b --ready hot
    """


@main.group(cls=LazyGroup, lazy=_CAPTURE_COMMANDS)
def capture() -> None:
    """Build, check and ship capture caches, from which an engine starts faster.

    A capture cache is code: whoever made it decides what the engine runs. Import and use only what comes from a
    source that you trust.

    \b
    Examples:
      bullet-graph capture build --model llama-3.1-8b
      bullet-graph capture list
      bullet-graph capture explain --model llama-3.1-8b
      bullet-graph capture export 3f2a captures.tgz
      bullet-graph capture import captures.tgz --trusted-key fleet.pub
    """
