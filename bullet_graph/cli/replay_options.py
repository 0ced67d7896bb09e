"""Options of the commands that replay a workload: ``simulate`` and ``bench online``, ``serve`` and ``sweep``."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from bullet_graph.cli.options import Decorator, all_of
from bullet_graph.config import Policy
from bullet_graph.slo import Slo
from bullet_graph.workloads import Arrivals

TRACE_TIMES = "trace"
"""The ``--request-rate`` that stands for recorded times."""

_ARRIVALS = ("request_rate", "burstiness", "time_scale", "max_concurrency")
_GOODPUT = "--goodput"
_TARGET = re.compile(r"\w+:\S*")


class GoodputCommand(click.Command):
    """A command whose ``--goodput`` takes several values, as vLLM's does: ``--goodput ttft:500 tpot:15``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option before each of its values, which click's parser requires."""
        return super().parse_args(ctx, spread_targets(args))


def spread_targets(arguments: Sequence[str]) -> list[str]:
    """Write ``--goodput a:1 b:2`` as ``--goodput a:1 --goodput b:2``."""
    spread: list[str] = []
    in_targets = False
    for argument in arguments:
        if in_targets and spread[-1] != _GOODPUT:
            in_targets = _TARGET.fullmatch(argument) is not None
            if in_targets:
                spread.append(_GOODPUT)
        in_targets = in_targets or argument.partition("=")[0] == _GOODPUT
        spread.append(argument)
    return spread


def parse_rate(_: click.Context, __: click.Parameter, value: str) -> float | None:
    """An option's callback: requests per second; None for the trace's own times."""
    if value == TRACE_TIMES:
        return None
    try:
        return float(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is no rate: give requests per second, inf, or {TRACE_TIMES} for recorded times"
        ) from None


def _parse_goodput(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> Slo:
    return Slo.parse(text for value in values for text in re.split(r"[\s,]+", value.strip()))


def _parse_policies(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[Policy, ...]:
    return tuple(dict.fromkeys(Policy.parse(value) for value in values))


def policies_option(default_policy: str) -> Decorator:
    """Give a command ``policies: tuple[Policy, …]``, each policy once."""
    return click.option(
        "--policy",
        "policies",
        multiple=True,
        default=(default_policy,),
        show_default=default_policy,
        metavar="serial[:CHUNK]|mixed[:CHUNK]|split[:NUM_SMS]|auto",
        callback=_parse_policies,
        help="How prefill and decode share the GPU; repeat it to compare several.",
    )


trace_option = click.option(
    "--trace",
    required=True,
    metavar="FILE|NAME",
    help="A trace file (Azure CSV, ShareGPT JSON, Mooncake JSONL), or azure:conv, azure:code, synthetic:conv, "
    "synthetic:code, synthetic:longdoc.",
)
num_prompts_option = click.option(
    "--num-prompts", type=click.IntRange(min=1), help="Only the first N requests of the trace."
)
burstiness_option = click.option(
    "--burstiness",
    type=float,
    default=1.0,
    show_default=True,
    help="1: Poisson arrivals; less: burstier; more: steadier.",
)


def num_warmups_option(default: int) -> Decorator:
    """Give a command ``num_warmups: int``."""
    return click.option(
        "--num-warmups",
        type=click.IntRange(min=0),
        default=default,
        show_default=True,
        help="Unmeasured requests before a measurement, so that it compiles no kernels.",
    )


def replay_options(*, default_policy: str | None, request_rate_more: str = "") -> Decorator:
    """Give a :class:`GoodputCommand` a workload, its arrivals, targets and policies.

    These are ``trace: str``, ``num_prompts: int | None``, ``arrivals: Arrivals``, ``slo: Slo``,
    ``policies: tuple[Policy, …]`` and ``save_detailed: bool``. The command must have an option ``--seed``.

    Args:
        default_policy: without ``--policy``; None: the command has no such option.
        request_rate_more: appended to the help of ``--request-rate``.
    """
    options = [
        trace_option,
        num_prompts_option,
        click.option(
            "--request-rate",
            default="inf",
            show_default=True,
            metavar="RATE|inf|trace",
            callback=parse_rate,
            help="Requests per second; inf: all at once; trace: when they were recorded." + request_rate_more,
        ),
        burstiness_option,
        click.option(
            "--time-scale",
            type=float,
            default=1.0,
            show_default=True,
            help="Factor on the times of --request-rate trace.",
        ),
        click.option(
            "--max-concurrency", type=click.IntRange(min=1), help="Most requests under way at once."
        ),
        click.option(
            _GOODPUT,
            "slo",
            multiple=True,
            metavar="NAME:MS …",
            callback=_parse_goodput,
            help="Latency targets, such as ttft:500 tpot:15 (milliseconds), or ttft:0.2ms/token. Goodput counts the "
            "requests that meet them all.",
        ),
        *(() if default_policy is None else (policies_option(default_policy),)),
        click.option(
            "--save-detailed", is_flag=True, help="Put the figures of each request into the JSON as well."
        ),
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_arrivals(**arguments: Any) -> None:
            settings = {name: arguments.pop(name) for name in _ARRIVALS}
            command(arrivals=Arrivals(**settings, seed=arguments["seed"]), **arguments)

        return all_of(options)(with_arrivals)

    return decorate


def search_options(*, default_step: float) -> Decorator:
    """Give a command the settings of a search for goodput.

    They are ``first_rate``, ``attainment``, ``tolerance`` and ``step`` (floats), and ``max_runs: int``; see
    :class:`~bullet_graph.perf.goodput_search.GoodputSearch`.
    """
    return all_of(
        [
            click.option(
                "--first-rate",
                type=float,
                default=8.0,
                show_default=True,
                help="First rate of a search, in requests per second; one near the answer saves runs.",
            ),
            click.option(
                "--attainment",
                type=float,
                default=0.9,
                show_default=True,
                help="Share of requests that must meet all targets.",
            ),
            click.option(
                "--tolerance",
                type=float,
                default=0.02,
                show_default=True,
                help="Relative accuracy of a goodput.",
            ),
            click.option(
                "--step",
                type=float,
                default=default_step,
                show_default=True,
                help="First factor between two rates; later ones grow up to 2.",
            ),
            click.option(
                "--max-runs",
                type=click.IntRange(min=1),
                default=20,
                show_default=True,
                help="Most runs of one search.",
            ),
        ]
    )
