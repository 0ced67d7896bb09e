"""Options of the commands that serve a workload as it arrives: ``simulate``, ``bench online``, ``bench sweep``."""

from collections.abc import Callable

import click

from bullet_graph.cli.serving.goodput import goodput_option
from bullet_graph.config import Policy

TRACE_TIMES = "trace"
"""The ``--request-rate`` that stands for recorded times."""


def parse_rate(_: click.Context, __: click.Parameter, value: str) -> float | None:
    """An option's callback: requests a second; None for the trace's own times."""
    if value == TRACE_TIMES:
        return None
    try:
        return float(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is no rate: give requests a second, inf, or {TRACE_TIMES} for recorded times"
        ) from None


def parse_policies(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[Policy, ...]:
    """An option's callback: the policies to compare, each once."""
    return tuple(dict.fromkeys(Policy.parse(value) for value in values))


def policies_option(default_policy: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command ``policies: tuple[Policy, …]``."""
    return click.option(
        "--policy",
        "policies",
        multiple=True,
        default=(default_policy,),
        show_default=default_policy,
        metavar="serial[:CHUNK]|mixed[:CHUNK]|split[:NUM_SMS]|auto",
        callback=parse_policies,
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


def serving_options(
    *, default_policy: str | None, request_rate_more: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a :class:`~bullet_graph.cli.serving.goodput.GoodputCommand` a workload, its arrivals, targets and policies.

    These are ``trace: str``, ``num_prompts: int | None``, ``request_rate: float | None`` (None: the trace's own times),
    ``burstiness: float``, ``time_scale: float``, ``max_concurrency: int | None``, ``slo: Slo``,
    ``policies: tuple[Policy, …]``
    and ``save_detailed: bool``.

    Args:
        default_policy: without ``--policy``; None leaves the policies to the server.
        request_rate_more: what the help of ``--request-rate`` says besides.
    """
    options = (
        trace_option,
        num_prompts_option,
        click.option(
            "--request-rate",
            default="inf",
            show_default=True,
            metavar="RATE|inf|trace",
            callback=parse_rate,
            help="Requests a second; inf: all at once; trace: when they were recorded." + request_rate_more,
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
        goodput_option,
        *(() if default_policy is None else (policies_option(default_policy),)),
        click.option(
            "--save-detailed",
            is_flag=True,
            help="Put the figures of each request into the JSON as well.",
        ),
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
