"""Options of the commands that replay a workload: ``simulate`` and ``bench online``, ``serve`` and ``sweep``."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from bullet_graph.cli.options import COUNT, FILE, Decorator, all_of
from bullet_graph.config import SETTINGS, Policy
from bullet_graph.perf.goodput_search import LEAST_REQUESTS, LEAST_SECONDS
from bullet_graph.slo import Slo
from bullet_graph.workloads import Arrivals

TRACE_TIMES = "trace"
"""The ``--request-rate`` that stands for recorded times."""

SIMULATED_MODEL = ("model", "revision", "quantization", "kv_cache_dtype", "tensor_parallel_size", "expert_parallel")
"""Settings that say which model is simulated."""

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
    for argument in arguments:
        follows_a_target = spread[-2:-1] == [_GOODPUT] or "".join(spread[-1:]).startswith(f"{_GOODPUT}=")
        if follows_a_target and _TARGET.fullmatch(argument):
            spread.append(_GOODPUT)
        spread.append(argument)
    return spread


def _parse_rate(_: click.Context, __: click.Parameter, value: str) -> float | None:
    if value == TRACE_TIMES:
        return None
    try:
        return float(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is no rate: give requests per second, inf, or {TRACE_TIMES} for recorded times"
        ) from None


def policies_option(default_policy: str) -> Decorator:
    """Give a command ``policies: tuple[Policy, …]``, each policy once."""
    return click.option(
        "--policy",
        "policies",
        multiple=True,
        default=(default_policy,),
        show_default=default_policy,
        metavar=SETTINGS["policy"].metavar,
        callback=lambda _, __, values: tuple(dict.fromkeys(map(Policy.parse, values))),
        help="How prefill and decode share the GPU; repeat it to compare several.",
    )


trace_option = click.option(
    "--trace",
    required=True,
    metavar="FILE|NAME",
    help="A trace file (Azure CSV, ShareGPT JSON, Mooncake JSONL), or azure:conv, azure:code, synthetic:conv, "
    "synthetic:code, synthetic:longdoc, synthetic:sharegpt, synthetic:arxiv, synthetic:chat.",
)
gpu_option = click.option(
    "--gpu",
    default="h200",
    metavar="NAME|TABLE.json|roofline:NAME",
    help="Whose times to use: a table that comes with the package (h200 or h100), a table of `bullet-graph profile`, "
    "or an estimate by arithmetic, such as roofline:b200.",
)
num_prompts_option = click.option("--num-prompts", type=COUNT, help="Only the first N requests of the trace.")
burstiness_option = click.option("--burstiness", default=1.0, help="1: Poisson; less: burstier; more: steadier.")
goodput_option = click.option(
    _GOODPUT,
    "slo",
    multiple=True,
    metavar="NAME:MS …",
    callback=lambda _, __, values: Slo.parse(text for value in values for text in re.split(r"[\s,]+", value.strip())),
    help="Latency targets, such as ttft:500 tpot:15 (milliseconds), or ttft:0.2ms/token. Goodput counts the requests "
    "that meet them all.",
)


def request_rate_option(**look: Any) -> Decorator:
    """Give a command ``request_rate: float | None``: requests per second; None for the trace's own times."""
    text = "Requests per second; inf: all at once; trace: when they were recorded. Conversations begin at the rate "
    text += "divided by their mean number of turns."
    return click.option("--request-rate", metavar="RATE|inf|trace", callback=_parse_rate, help=text, **look)


def num_warmups_option(default: int) -> Decorator:
    """Give a command ``num_warmups: int``."""
    return click.option(
        "--num-warmups",
        type=click.IntRange(0, 2**20),
        default=default,
        help="Unmeasured requests before a measurement, so that it compiles no kernels.",
    )


def replay_options(*, default_policy: str | None) -> Decorator:
    """Give a workload to replay to a :class:`GoodputCommand` that has ``--seed`` and :func:`result_options`.

    It comes as ``trace: str``, ``num_prompts: int | None``, ``arrivals: Arrivals``, ``slo: Slo``,
    ``save_detailed: bool`` and, unless the ``default_policy`` is None, ``policies: tuple[Policy, …]``.
    """
    options = [
        trace_option,
        num_prompts_option,
        request_rate_option(default="inf"),
        burstiness_option,
        click.option("--time-scale", default=1.0, help="Factor on the times of --request-rate trace."),
        click.option("--max-concurrency", type=COUNT, help="Most requests under way at once."),
        goodput_option,
        *(() if default_policy is None else (policies_option(default_policy),)),
        click.option("--save-detailed", is_flag=True, help="Put the figures of each request into the JSON as well."),
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_arrivals(**arguments: Any) -> None:
            if arguments["save_detailed"] and not (arguments["as_json"] or arguments["output_json"]):
                raise click.UsageError("--save-detailed is for the JSON: add --output-json or --json, or leave it out")
            settings = {name: arguments.pop(name) for name in _ARRIVALS}
            command(arrivals=Arrivals(**settings, seed=arguments["seed"]), **arguments)

        return all_of(options)(with_arrivals)

    return decorate


search_options = all_of(
    [
        click.option(
            "--first-rate", default=8.0, help="First rate of a search, in requests/s; one near the answer saves runs."
        ),
        click.option("--tolerance", default=0.05, help="Relative accuracy of a goodput."),
        click.option("--step", default=1.25, help="First factor between two rates; later ones grow up to 2."),
        click.option("--max-runs", type=COUNT, default=12, help="Most runs of one search."),
        click.option(
            "--smoke",
            is_flag=True,
            help=f"For a short trial: runs may have less than {LEAST_SECONDS} s of arrivals or {LEAST_REQUESTS} "
            "requests. Results then say that they are not sustained.",
        ),
    ]
)
"""Gives a command the settings of a :class:`~bullet_graph.perf.goodput_search.GoodputSearch`, and ``smoke``."""

sweep_file_options = all_of(
    [
        click.option(
            "--output-json",
            type=FILE,
            required=True,
            help="The sweep's file; a sweep that it holds unfinished resumes.",
        ),
        click.option(
            "--overwrite",
            is_flag=True,
            help="Replace output files that exist; an unfinished sweep of the same settings resumes all the same.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print the sweep's file and nothing else."),
    ]
)
"""Gives a command ``output_json``, ``overwrite`` and ``as_json``."""
