"""What a goodput sweep compares: the cells of policies × targets × workloads, as the command line names them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bullet_graph.cli.bench.sweep_file import CellKey
from bullet_graph.config import Policy
from bullet_graph.errors import ConfigError
from bullet_graph.slo import NO_TARGETS, Slo
from bullet_graph.workloads import Workload

SYSTEM = "bullet_graph"
"""What this engine is called in a sweep's file, with the policy behind it."""

_SHORT_NAMES = {"conv": "azure:conv", "code": "azure:code", "longdoc": "synthetic:longdoc"}
_FORM = re.compile(r"(?P<name>[^=@][^@]*?)(=(?P<count>[^=~@]*))?(~(?P<rate>[^=~@]*))?(@(?P<slo>[^@]*))?")
_FORM_SHOWN = (
    "NAME[=NUM_PROMPTS][~FIRST_RATE][@TARGETS], such as conv, conv=600 or 'code=400~10@ttft:500 tpot:8'"
)


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload of a sweep.

    Attributes:
        name: see :func:`~bullet_graph.workloads.load_workload`.
        num_prompts: its first so many requests; None is all.
        first_rate: where its searches begin, in requests a second; None is where all do.
        slo: its own targets, in the place of the sweep's; None is the sweep's.
    """

    name: str
    num_prompts: int | None = None
    first_rate: float | None = None
    slo: Slo | None = None

    @classmethod
    def parse(cls, text: str) -> "WorkloadSpec":
        """Read ``NAME[=NUM_PROMPTS][~FIRST_RATE][@TARGETS]``, such as ``conv=600`` or ``code~10@ttft:500 tpot:8``.

        Raises:
            ConfigError: the text has another form; it is shown.
        """
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"--workload {text!r}: write {_FORM_SHOWN}")
        name, count, rate, slo = match["name"], match["count"], match["rate"], match["slo"]
        if count is not None and not (count.isdecimal() and int(count) >= 1):
            raise ConfigError(f"--workload {text!r}: {count!r} is no number of prompts: write {_FORM_SHOWN}")
        if rate is not None and not (re.fullmatch(r"\d+(\.\d+)?", rate) and float(rate) > 0):
            raise ConfigError(f"--workload {text!r}: {rate!r} is no rate above 0: write {_FORM_SHOWN}")
        return cls(
            _SHORT_NAMES.get(name, name),
            None if count is None else int(count),
            None if rate is None else float(rate),
            None if slo is None else parse_targets(slo),
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One search of a sweep of this engine.

    Attributes:
        key: what it is called in the file.
        workload: the requests.
        slo: their targets.
        policy: how the engine serves.
        first_rate: where the search begins, in requests a second.
    """

    key: CellKey
    workload: Workload
    slo: Slo
    policy: Policy
    first_rate: float

    def __str__(self) -> str:
        """Its workload, number of prompts, first rate and targets, as ``--workload`` takes them."""
        return f"{self.key.workload}={self.key.num_prompts}~{self.first_rate:g}@{self.slo}"


def parse_targets(text: str) -> Slo:
    """Read targets such as ``ttft:500 tpot:15``.

    Raises:
        ConfigError: another form, or no targets.
    """
    slo = Slo.parse(text.replace(",", " ").split())
    if slo == NO_TARGETS:
        raise ConfigError(
            "a goodput needs targets, got none: write them as 'ttft:500 tpot:15' (milliseconds)"
        )
    return slo


def make_cells(
    specs: Sequence[WorkloadSpec],
    slos: Sequence[Slo],
    policies: Sequence[Policy],
    *,
    first_rate: float,
    load: Callable[[WorkloadSpec], Workload],
) -> list[Cell]:
    """The cells of a sweep: each workload with each of its targets under each policy, policies changing fastest.

    Args:
        specs: the workloads; one may come more than once, with other targets.
        slos: the targets of those that have none of their own.
        policies: what to compare.
        first_rate: of workloads that have none of their own.
        load: loads a workload.

    Raises:
        ConfigError: a workload has no targets, or two cells would have the same name and are not the same.
        WorkloadError: from ``load``.
    """
    cells: dict[CellKey, Cell] = {}
    for spec in specs:
        if spec.slo is None and not slos:
            raise ConfigError(
                f"the workload {spec.name} has no targets to meet: add --slo 'ttft:500 tpot:15', or write them behind "
                f"it, as --workload '{spec.name}@ttft:500 tpot:15'"
            )
        workload = load(spec)
        for slo in slos if spec.slo is None else (spec.slo,):
            for policy in policies:
                key = CellKey(f"{SYSTEM} {policy}", workload.name, len(workload.requests), str(slo))
                cell = Cell(key, workload, slo, policy, spec.first_rate or first_rate)
                if cells.setdefault(key, cell) != cell:
                    raise ConfigError(
                        f"--workload {spec.name}: two different ones are both called {workload.name} with "
                        f"{key.num_prompts} requests and {slo}: rename a file, or give one of them only"
                    )
    return list(cells.values())
