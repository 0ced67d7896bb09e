"""Measures a performance table on this machine's GPU: sustained, interleaved, and resumable."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bullet_graph.config import EngineConfig
from bullet_graph.errors import ConfigError, DeviceError, PerfTableError
from bullet_graph.kernels.communicator import ALONE
from bullet_graph.models.progress import progress_bar
from bullet_graph.perf.energy import DeviceMonitor, DeviceReport, open_probe
from bullet_graph.perf.profile_plan import ProfileLimits, ProfilePlan, plan_profile
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.perf.roofline import Roofline
from bullet_graph.perf.table import PerfTable, ProfilePoint, TableKey, read_table, require_match, write_table
from bullet_graph.runtime.build import plan_ledger
from bullet_graph.runtime.memory import MemoryLedger
from bullet_graph.runtime.performance import table_key
from bullet_graph.runtime.ranks import Ranks
from bullet_graph.runtime.resolve import Runtime, resolve
from bullet_graph.runtime.tensor_parallel import agreed, of_rank, other_ranks

if TYPE_CHECKING:
    from bullet_graph.runtime.bursts import Workbench

PROFILED_SMS = (16, 24, 32, 48, 64, 80, 96)
"""Default sizes of the decode lane to measure, in SMs, up to three quarters of the GPU."""
_MOST_OF_GPU = 0.75
_MAX_MODEL_LEN = 16384
"""Longest sequence measured, in tokens; a longer limit would only take memory."""
_MEMORY_UTILIZATION = 0.85
"""Less than an engine takes: each lane's stream keeps its own activations."""
_HEAT_S = 3.0
_LEAST_BURST_S = 0.1

Repeats = dict[ProfilePoint, list[tuple[float, ...]]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a profile will measure, decided before anything is allocated."""

    config: EngineConfig
    runtime: Runtime
    ledger: MemoryLedger

    @property
    def limits(self) -> ProfileLimits:
        max_num_seqs, chunk_tokens = self.config.max_num_seqs, self.config.max_num_batched_tokens
        return ProfileLimits(max_num_seqs, chunk_tokens, self.runtime.max_model_len, self.ledger.kv_cache_tokens)


def prepare_profile(config: EngineConfig) -> Prepared:
    """Decide what the configuration leaves open: sizes of the decode lane, length limit, share of the memory.

    Raises as an engine with this configuration on a GPU.
    """
    if config.device == "cpu":
        raise ConfigError(
            "a profile measures how prefill and decode share a GPU, which a CPU does not need: leave out device=cpu. "
            "On a CPU, every policy but split works without a table"
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            f"a profile measures a GPU, but torch {torch.__version__} sees no CUDA device: check `nvidia-smi` and "
            "that torch is a CUDA build, or take a table that was measured on such a GPU"
        )
    config = dataclasses.replace(config, device="cuda", gpu_memory_utilization=_MEMORY_UTILIZATION)
    runtime = of_rank(config, resolve(config), 0)
    runtime = dataclasses.replace(runtime, max_model_len=min(runtime.max_model_len, _MAX_MODEL_LEN))
    if not config.decode_sms and config.partition_backend != "none":
        sizes = tuple(size for size in PROFILED_SMS if size <= _MOST_OF_GPU * runtime.gpu.num_sms)
        config = dataclasses.replace(config, decode_sms=sizes)
    return Prepared(config, runtime, plan_ledger(config, runtime))


@dataclass(frozen=True, slots=True)
class Pass:
    """One round over the points that no earlier run had done; ``burst_s`` is the measured part of a burst."""

    seconds: float
    burst_s: float
    num_points: int
    device: DeviceReport

    def __str__(self) -> str:
        return f"{self.num_points} bursts in {self.seconds:.0f} s" + "".join(
            f", {values.mean:,.0f} {unit} ({values.min:,.0f}–{values.max:,.0f})"
            for values, unit in ((self.device.sm_clock_mhz, "MHz"), (self.device.power_w, "W"))
            if values is not None
        )


@torch.inference_mode()
def profile_model(
    prepared: Prepared,
    *,
    file: Path,
    time_budget_s: float,
    restart: bool = False,
    progress: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> PerfTable:
    """Measure a table and write it to a file.

    Results are saved beside the file after each pass and on an interrupt. The next call continues from there, unless it
    is to ``restart``. ``time_budget_s`` is without loading and capturing; 0 takes the shortest plan.

    Raises ConfigError where the budget is too short, or saved results cannot be read or belong to another plan; and as
    :func:`~bullet_graph.runtime.bursts.open_workbench`.
    """
    # Imports the kernel libraries, which `prepare_profile` must report as missing in its own words.
    from bullet_graph.runtime.bursts import open_workbench  # noqa: PLC0415

    with _on_ranks(prepared) as (prepared, ranks):
        config, runtime = prepared.config, prepared.runtime
        key = table_key(runtime)
        plan = plan_profile(
            model=Roofline(runtime.gpu, runtime.model, dtype_bytes=runtime.dtype.itemsize),
            decode_sms=sorted(set(config.decode_sms)),
            limits=prepared.limits,
            time_budget_s=time_budget_s,
            seed=config.seed,
        )
        tell(
            f"{len(plan.points)} points, {len(plan.held_back)} of them held back, {plan.num_passes} bursts of "
            f"{plan.burst_s:g} s each: about {plan.guessed_s:.0f} s"
        )
        partial = file.with_name(f"{file.stem}.partial.json")
        measured: Repeats = {point: [] for point in plan.points}
        passes: list[dict[str, Any]] = []
        if partial.exists() and not restart:
            before, measured = _resume(partial, key, plan)
            passes += before.provenance.get("passes", ())
            tell(f"going on with {partial}: {sum(map(len, measured.values()))} bursts are done")
        provenance: dict[str, Any] = {
            **dataclasses.asdict(collect_provenance(runtime.device)),
            "passes": passes,
            "seed": config.seed,
            "load_format": config.load_format,
            "decode_sms": list(config.decode_sms),
            "time_budget_s": time_budget_s,
        }

        def table(*, complete: bool) -> PerfTable:
            return PerfTable(
                key=key,
                points={point: measured[point] for point in plan.grid if measured[point]},
                held_back={point: measured[point] for point in plan.held_back if measured[point]},
                provenance=provenance,
                complete=complete,
            )

        communicators = ALONE if ranks is None else ranks.communicators
        with open_workbench(prepared, progress=progress, communicators=communicators, ranks=ranks) as (bench, why):
            provenance["partition_backend"] = why
            tell(f"partitions: {why}")
            left = [point for point in plan.points if len(measured[point]) < plan.num_passes]
            tell(f"{bench.capture(left, progress=progress)} decode graphs captured")
            try:
                for done in _measure(bench, plan, measured, time_budget_s or plan.guessed_s, progress):
                    passes.append(dataclasses.asdict(done))
                    tell(str(done))
                    write_table(table(complete=False), partial)
            finally:
                # Above all after Ctrl-C: the results took minutes.
                write_table(table(complete=False), partial)
        finished = table(complete=True)
        write_table(finished, file)
        partial.unlink(missing_ok=True)
        return finished


@contextmanager
def _on_ranks(prepared: Prepared) -> Iterator[tuple[Prepared, Ranks | None]]:
    """Start the other ranks, if there are any, and end them after the block; they agree on the KV cache."""
    config, runtime = prepared.config, prepared.runtime
    if runtime.model.whole is None:
        yield prepared, None
        return
    whole = dataclasses.replace(runtime, model=runtime.model.whole)
    with other_ranks(config, whole, lambda other: ("profile", dataclasses.replace(prepared, runtime=other))) as ranks:
        ranks.connect(runtime.device)
        yield dataclasses.replace(prepared, ledger=agreed(ranks, prepared.ledger)), ranks


def _measure(
    bench: "Workbench", plan: ProfilePlan, measured: Repeats, time_budget_s: float, progress: bool
) -> Iterator[Pass]:
    """Measure all points in passes; bursts get shorter if they take longer than estimated."""
    num_points, burst_s = len(plan.points), plan.burst_s
    done, total = sum(map(len, measured.values())), plan.num_passes * num_points
    spent_s = time_budget_s * done / total
    if done < total:
        # A GPU that was idle does not keep its clocks under load.
        bench.measure(max(plan.grid, key=lambda point: (point.kind == "prefill", point.tokens)), _HEAT_S)
    with progress_bar(progress, total=total, initial=done, desc="Measuring", unit="burst") as advance:
        for number in range(plan.num_passes):
            todo = [point for point in plan.order(number) if len(measured[point]) <= number]
            if not todo:
                continue
            start_s = time.perf_counter()
            with DeviceMonitor(open_probe(bench.device, bench.num_ranks)) as monitor:
                for point in todo:
                    measured[point].append(bench.measure(point, burst_s))
                    advance(1)
            seconds = time.perf_counter() - start_s
            yield Pass(seconds, burst_s, len(todo), monitor.report)
            spent_s += seconds
            left = plan.num_passes - number - 1
            if left:
                too_long_s = seconds * num_points / len(todo) - (time_budget_s - spent_s) / left
                burst_s = min(burst_s, max(_LEAST_BURST_S, burst_s - too_long_s / num_points))


def _resume(partial: Path, key: TableKey, plan: ProfilePlan) -> tuple[PerfTable, Repeats]:
    try:
        before = read_table(partial)
        require_match(before, key)
    except PerfTableError as error:
        raise ConfigError(
            f"cannot go on with what an interrupted profile measured: {error}. --restart measures all anew"
        ) from error
    known = {**before.points, **before.held_back}
    if foreign := known.keys() - set(plan.points):
        raise ConfigError(
            f"{partial} holds {len(foreign)} points that are not in this plan: it was begun with other options. Give "
            "the same ones to go on, or --restart to measure all anew"
        )
    return before, {point: list(known.get(point, ())) for point in plan.points}
