"""What binds where a target was not met, by arithmetic on what the files have; "not proven" where it does not tell."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.reporting.all_at_once import AllAtOnceRun, DurationAllAtOnce
from bench.reporting.bare import bare_lines
from bench.reporting.decode_groups import group_lines
from bench.reporting.evidence import Evidence, Source
from bench.reporting.markdown import number, significant, table
from bench.reporting.measures import DecodeStep, Figure, RunRatio
from bench.reporting.rates import Rate, Rates, rates_of
from bench.reporting.targets import Verdict
from bench.reporting.work import ServingWork, StepWork, serving_work, step_work
from bullet_graph.models.presets import PRESETS
from bullet_graph.workloads import WorkloadRequest, load_workload

POWER_CAP_W = 700.0
"""Of the H200, by NVIDIA's data sheet; no file tells it."""

_AT_CAP = 0.95
"""Share of the cap from which a run counts as held back by power."""


@dataclass(frozen=True, slots=True)
class Part:
    """Work of one kind, at the best rate that is known of it.

    Attributes:
        name: for people.
        amount: operations or bytes.
        unit: ``FLOP`` or ``B``.
        rate: None: no file has it.
    """

    name: str
    amount: float
    unit: Literal["FLOP", "B"]
    rate: Rate | None

    @property
    def seconds(self) -> float:
        """At that rate; 0 where none is known."""
        return 0.0 if self.rate is None else self.amount / self.rate.per_s

    @property
    def joules(self) -> float | None:
        """At the power it drew when it was measured; None: not known."""
        return None if self.rate is None or self.rate.watts is None else self.seconds * self.rate.watts


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time for parts, each at its best rate.

    Attributes:
        parts: all of them.
        in_turn_s: where none runs beside another.
        overlapped_s: where all that computes runs beside all that reads memory, at no cost to either.
    """

    parts: tuple[Part, ...]
    in_turn_s: float
    overlapped_s: float

    @property
    def known_joules(self) -> float:
        """Of the parts whose energy is known, each at the power it drew when it was measured."""
        return sum(part.joules or 0.0 for part in self.parts)

    @property
    def without_joules(self) -> list[str]:
        """Names of the other parts."""
        return [part.name for part in self.parts if part.joules is None]

    def verdict(self, limit_s: float) -> str:
        """What the arithmetic says about a limit in seconds."""
        unknown = [part.name for part in self.parts if part.rate is None]
        if unknown:
            return f"**Not proven**: no file has the rate of {', '.join(unknown)}."
        target, turns, overlapped = (_time(s, limit_s) for s in (limit_s, self.in_turn_s, self.overlapped_s))
        if self.overlapped_s > limit_s:
            return (
                f"**Proven** at these rates: {overlapped} even where computing and reading memory overlap at no cost, "
                f"and the target is {target}."
            )
        if self.in_turn_s > limit_s:
            return (
                f"**Proven for parts that take turns**: {turns}, and the target is {target}. **Not proven where they "
                f"overlap**: {overlapped} if reading memory beside computing cost nothing. It takes power, too; how "
                "much that slows the rest is not known."
            )
        left = limit_s - self.in_turn_s
        return (
            f"**Not proven**: in turn, the parts take {turns}, and the target is {target}. That leaves "
            f"{_time(left, limit_s)} ({_percent(left / limit_s)}) for all else, were each part at the best rate ever "
            "measured of it."
        )


def serving_floor(work: ServingWork, rates: Rates) -> Floor:
    """The least time for all requests of a workload."""
    computing = (
        Part("layers without attention", work.layer_flops, "FLOP", rates.layers),
        Part("output head", work.head_flops, "FLOP", rates.products),
        Part("attention of prompts", work.attention_flops, "FLOP", rates.prompt_attention),
    )
    reading = Part("keys and values read by decode rows", work.kv_bytes, "B", rates.kv_reads)
    computing_s = sum(part.seconds for part in computing)
    return Floor((*computing, reading), computing_s + reading.seconds, max(computing_s, reading.seconds))


def step_floor(work: StepWork, rates: Rates) -> Floor:
    """The least time for a decode step, whose products read their weights while they compute."""
    products = Part("matrix products", work.product_flops, "FLOP", rates.products)
    weights = Part("weights, read beside them", work.weight_bytes, "B", rates.copy)
    kv = Part("keys and values", work.kv_bytes, "B", rates.copy)
    in_turn_s = max(products.seconds, weights.seconds) + kv.seconds
    return Floor((products, weights, kv), in_turn_s, max(products.seconds, weights.seconds + kv.seconds))


def limit_lines(verdicts: Sequence[Verdict], evidence: Evidence) -> Iterator[str]:
    """The section about targets that were missed or are open."""
    wanting = [verdict for verdict in verdicts if verdict.word in ("missed", "open")]
    if not wanting:
        yield "No target is missed or open."
        return
    untold = []
    for verdict in wanting:
        lines = list(_lines(verdict, evidence))
        if lines:
            yield f"\n### {verdict.target.name}: {verdict.word}\n"
            yield from lines
        else:
            untold.append(verdict.target.name)
    if untold:
        yield f"**Not proven**, no arithmetic yet: {'; '.join(untold)}."


def _lines(verdict: Verdict, evidence: Evidence) -> Iterator[str]:
    figure, measure, limit = verdict.figure, verdict.target.measure, verdict.target.limit
    if figure is None:
        return
    source = next(source for source in evidence.sources if source.name == figure.file)
    rates = rates_of(evidence, source.cards)
    if isinstance(measure, DurationAllAtOnce):
        run = measure.run_of(source)
        if run is not None:
            requests = load_workload(measure.workload, num_requests=measure.num_prompts).requests
            yield from _all_at_once(measure.model, requests, run, figure.file, limit, rates)
            yield from bare_lines(
                evidence,
                f"{measure.workload}={measure.num_prompts}",
                source.cards,
                measured_s=run.duration_s,
                limit_s=limit,
                num_forwards=max(request.output_tokens for request in requests),
            )
    elif isinstance(measure, RunRatio) and measure.field == "joules_per_token" and measure.num_prompts:
        if measure.rate is None:
            yield from _joules(measure, measure.num_prompts, source, figure, limit, rates)
    elif isinstance(measure, DecodeStep):
        yield from _decode_step(measure, figure, limit, rates)
        yield from bare_lines(
            evidence,
            f"decode={measure.batch_size}x{measure.context}",
            source.cards,
            measured_s=figure.value / 1e3,
            limit_s=limit / 1e3,
        )
        yield from group_lines(evidence, measure.model, measure.batch_size, measure.context, rates)


def _all_at_once(
    model: str,
    requests: Sequence[WorkloadRequest],
    run: AllAtOnceRun,
    file: str,
    limit_s: float,
    rates: Rates,
) -> Iterator[str]:
    tokens = (sum(r.prompt_tokens for r in requests), sum(r.output_tokens for r in requests))
    if (run.prompt_tokens, run.output_tokens) != tokens:
        yield (
            f"**Not proven**: the run in `{file}` had {run.prompt_tokens} prompt and {run.output_tokens} output "
            f"tokens, and the workload has {tokens[0]} and {tokens[1]}."
        )
        return
    work = serving_work(PRESETS[model], requests)
    floor = serving_floor(work, rates)
    yield f"{run.system} took {run.duration_s:.2f} s (`{file}`). {_power(run)}"
    yield from _floor_table(floor, run.duration_s)
    if rates.products is not None:
        products_s = (work.layer_flops + work.head_flops) / rates.products.per_s
        yield (
            f"The matrix products alone, without the passes between them, take {products_s:.2f} s at "
            f"{_rate(rates.products, 'FLOP')} ({rates.products.source}).\n"
        )
    yield floor.verdict(limit_s)
    if run.energy_joules is not None:
        yield _energy(run.energy_joules, work, floor, limit_s)


def _joules(
    measure: RunRatio, num_prompts: int, source: Source, figure: Figure, limit: float, rates: Rates
) -> Iterator[str]:
    """What the parts of the work take at least, where it is a peer's energy that is to be undercut."""
    runs = DurationAllAtOnce(measure.model, measure.workload, num_prompts).runs_by_setting(source)
    told = [run for of in runs.values() for run in of if run.energy_joules is not None]
    run = min(told, key=lambda run: run.energy_joules or 0.0, default=None)
    if run is None or run.energy_joules is None:
        return
    requests = load_workload(measure.workload, num_requests=num_prompts).requests
    floor = serving_floor(serving_work(PRESETS[measure.model], requests), rates)
    allowed = run.energy_joules * limit / figure.value
    known, missing = floor.known_joules, floor.without_joules
    least = f"at least {known / 1e3:.2f} kJ" if missing else f"{known / 1e3:.2f} kJ"
    yield (
        f"{run.system} took {run.energy_joules / 1e3:.2f} kJ (`{source.name}`), {figure.detail}. The target allows "
        f"{allowed / 1e3:.2f} kJ."
    )
    yield from _floor_table(floor, run.duration_s)
    without = f" The energy of {', '.join(missing)} is in no file." if missing else ""
    if known > allowed:
        yield f"**Proven** at these rates: the parts alone take {least}, where each was measured alone.{without}"
    else:
        yield (
            f"**Not proven**: the parts take {least}, where each was measured alone, "
            f"{_percent(known / allowed)} of what the target allows.{without} The passes between matrix products, "
            "sampling, and what an idle card draws meanwhile come on top."
        )


def _power(run: AllAtOnceRun) -> str:
    if run.energy_joules is None:
        return "What it drew is not known."
    watts = run.energy_joules / run.duration_s
    clock = "" if run.sm_clock_mhz is None else f", at {number(run.sm_clock_mhz, 0)} MHz"
    at_cap = watts >= _AT_CAP * POWER_CAP_W
    held = "it was at the cap nearly all through" if at_cap else "power did not hold it back all through"
    return (
        f"On average it drew {watts:.0f} W of the card's {POWER_CAP_W:.0f} W ({_percent(watts / POWER_CAP_W)}){clock}: "
        f"{held}."
    )


def _energy(joules: float, work: ServingWork, floor: Floor, limit_s: float) -> str:
    flops = work.layer_flops + work.head_flops + work.attention_flops
    taken, allowed = joules / flops, limit_s * POWER_CAP_W / flops
    change = allowed / taken - 1
    known, missing = floor.known_joules, floor.without_joules
    without = f" (without {', '.join(missing)}, of which no file tells it)" if missing else ""
    return (
        f"\nEnergy: {joules / 1e3:.2f} kJ, {1e12 * taken:.3f} pJ/FLOP all told. The target at the cap allows "
        f"{limit_s * POWER_CAP_W / 1e3:.2f} kJ, {1e12 * allowed:.3f} pJ/FLOP ({100 * change:+.1f} %). The parts took "
        f"{known / 1e3:.2f} kJ where each was measured alone{without}, which the cap gives in "
        f"{known / POWER_CAP_W:.2f} s."
    )


def _decode_step(measure: DecodeStep, figure: Figure, limit_ms: float, rates: Rates) -> Iterator[str]:
    work = step_work(PRESETS[measure.model], measure.batch_size, measure.context)
    floor = step_floor(work, rates)
    yield f"Measured: {figure.value:.3f} ms ({figure.detail}, `{figure.file}`)."
    yield from _floor_table(floor, figure.value / 1e3)
    yield floor.verdict(limit_ms / 1e3)
    if rates.copy is not None:
        num_bytes = work.weight_bytes + work.kv_bytes
        shares = [num_bytes / (ms / 1e3) / rates.copy.per_s for ms in (figure.value, limit_ms)]
        yield (
            f"\nThe step moves {num_bytes / 1e9:.2f} GB: measured, at {_percent(shares[0])} of what a copy reaches "
            f"({_rate(rates.copy, 'B')}, {rates.copy.source}); the target needs {_percent(shares[1])}."
        )


def _floor_table(floor: Floor, measured_s: float) -> list[str]:
    rows = []
    for part in floor.parts:
        rate = "not known" if part.rate is None else f"{_rate(part.rate, part.unit)}: {part.rate.source}"
        rows.append(
            [
                part.name,
                _amount(part, measured_s),
                rate,
                "–" if part.rate is None else _time(part.seconds, measured_s),
                "–" if part.rate is None else _percent(part.seconds / measured_s),
                "–" if part.joules is None else significant(part.joules),
            ]
        )
    total = [_time(floor.in_turn_s, measured_s), _percent(floor.in_turn_s / measured_s)]
    rows.append(["in turn", "", "", *total, ""])
    header = ("part", "work", "best rate in any file", "time", "of the measured", "J")
    return table(header, rows, num_left=3)


def _time(seconds: float, scale_s: float) -> str:
    """In the unit that suits the figure it stands beside."""
    return f"{seconds:.2f} s" if scale_s >= 1 else f"{1e3 * seconds:.2f} ms"


def _amount(part: Part, scale_s: float) -> str:
    return (
        f"{part.amount / 1e12:,.1f} T{part.unit}"
        if scale_s >= 1
        else f"{part.amount / 1e9:,.1f} G{part.unit}"
    )


def _rate(rate: Rate, unit: str) -> str:
    return f"{rate.per_s / 1e12:,.{2 if unit == 'B' else 1}f} T{unit}/s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
