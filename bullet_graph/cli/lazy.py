"""A group of commands whose modules are imported when a command is used, so that ``--help`` never waits for torch."""

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """A group that lists its commands without importing them.

    Args:
        lazy: for each command's name, where it is (``"package.module:attribute"``) and the line that the group's help
            shows for it.
        arguments: those of :class:`click.Group`.
    """

    def __init__(self, *, lazy: Mapping[str, tuple[str, str]], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        # Here, since the module's import starts the clock of the engine's imports.
        from bullet_graph._imports import load  # noqa: PLC0415

        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        # Libraries that greet on stdout when they are imported would spoil a command's JSON.
        with contextlib.redirect_stdout(sys.stderr):
            command: click.Command = load(module, attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.commands.get(name)
            rows.append((name, self._lazy[name][1] if command is None else command.get_short_help_str(80)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
