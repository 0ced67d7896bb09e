"""The option ``--goodput`` of serving benchmarks, written as vLLM's: ``--goodput ttft:500 tpot:15``."""

import re
from collections.abc import Callable, Sequence

import click

from bullet_graph.slo import Slo

_OPTION = "--goodput"
_TARGET = re.compile(r"\w+:\S*")


class GoodputCommand(click.Command):
    """A command whose ``--goodput`` takes several values, which click's options cannot."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the option before each of its values."""
        return super().parse_args(ctx, spread_targets(args))


def spread_targets(arguments: Sequence[str]) -> list[str]:
    """Arguments with ``--goodput a:1 b:2`` written as ``--goodput a:1 --goodput b:2``."""
    spread: list[str] = []
    in_targets = False
    for argument in arguments:
        if in_targets and spread[-1] != _OPTION:
            in_targets = _TARGET.fullmatch(argument) is not None
            if in_targets:
                spread.append(_OPTION)
        in_targets = in_targets or argument.partition("=")[0] == _OPTION
        spread.append(argument)
    return spread


def goodput_option(command: Callable[..., None]) -> Callable[..., None]:
    """Give a :class:`GoodputCommand` the keyword ``slo: Slo``."""
    option = click.option(
        _OPTION,
        "slo",
        multiple=True,
        metavar="NAME:MS …",
        callback=_parse,
        help="Latency targets, such as ttft:500 tpot:15 (milliseconds), or ttft:0.2ms/token. Goodput counts the "
        "requests that meet them all.",
    )
    return option(command)


def _parse(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> Slo:
    return Slo.parse(text for value in values for text in re.split(r"[\s,]+", value.strip()))
