"""Builds a capture cache: a start that keeps what it compiles, measures and chooses."""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bullet_graph.captures.builder import Build, open_build
from bullet_graph.captures.entry import Entry
from bullet_graph.captures.fingerprint import ArtifactKind, Fingerprint
from bullet_graph.captures.store import CaptureStore
from bullet_graph.config import EngineConfig
from bullet_graph.errors import CacheError
from bullet_graph.graphs.compile_counts import NOTHING_COMPILED, CompileCounter, CompileCounts
from bullet_graph.kernels.flashinfer_attention import needed_module
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.perf.start_report import StartClock
from bullet_graph.runtime.artifacts.exercise import exercise
from bullet_graph.runtime.artifacts.library_caches import INDUCTOR, TRITON, caches_below, collect
from bullet_graph.runtime.artifacts.measured import (
    add_capture,
    add_mask_offset,
    add_perf_table,
    add_tuning,
    cached_perf_table,
)
from bullet_graph.runtime.artifacts.use import Captures, flashinfer_artifact
from bullet_graph.runtime.build import BuiltRuntime, artifact_plan, build_executor
from bullet_graph.runtime.capture_plan import max_forward_rows
from bullet_graph.runtime.fingerprint import fingerprint_of
from bullet_graph.runtime.performance import find_performance
from bullet_graph.runtime.resolve import Runtime, resolve
from bullet_graph.runtime.self_check import SEED, STEPS, SelfCheckPoint


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did.

    Attributes:
        entry: in the store.
        was_there: it was finished before.
        resumed: artifacts that an interrupted build had finished.
        adopted: artifacts that were copied from other entries.
        compiles: what was compiled.
        seconds: of the whole build.
    """

    entry: Entry
    was_there: bool
    resumed: tuple[str, ...] = ()
    adopted: tuple[str, ...] = ()
    compiles: CompileCounts = NOTHING_COMPILED
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """How to build.

    Attributes:
        progress: show progress bars.
        tell: given a line where something has to wait, or is built again.
        on_part: called with the name of the part that begins, and how many there are.
    """

    progress: bool
    tell: Callable[[str], None]
    on_part: Callable[[str, int], None]


def build_captures(config: EngineConfig, store: CaptureStore, settings: BuildSettings) -> BuildReport:
    """Build what an engine of this configuration starts from, or go on with it.

    Args:
        config: its ``capture_cache`` and ``self_check`` are of no account: all batch sizes are compared.

    Raises:
        CacheError: the store cannot be written, or what was compiled does not compute the model.
        BulletGraphError: whatever else an engine of this configuration would raise.
    """
    start_s = time.perf_counter()
    # Nothing on the CPU is worth keeping but compiled halves.
    runtime = resolve(config)
    config = dataclasses.replace(
        config,
        capture_cache=None,
        self_check="all",
        ready="all",
        compile=config.compile or runtime.device.type == "cpu",
    )
    here = fingerprint_of(runtime)
    performance = find_performance(config, runtime, cached_table=lambda: cached_perf_table(store, here))
    plan = artifact_plan(config, runtime, performance)
    parts = _Parts(settings, runtime)
    with open_build(store, here, plan, tell=settings.tell) as build:
        if build.entry is not None:
            return BuildReport(build.entry, was_there=True)
        adopted = _adopt(store, build, here, plan)
        compiles = NOTHING_COMPILED
        if runtime.device.type == "cuda":
            parts.begin("measured")
            add_perf_table(build, config, runtime)
            add_mask_offset(build)
            parts.begin("flashinfer")
            with CompileCounter(gpu=True) as counter:
                _add_flashinfer(build, runtime)
            compiles += counter.counts
        built, points = _start(config, runtime, build, plan, parts)
        parts.begin("commit")
        entry = build.commit(
            self_check=_self_check_record(points),
            provenance=dataclasses.asdict(collect_provenance(runtime.device.type)),
        )
        return BuildReport(
            entry,
            was_there=False,
            resumed=build.resumed,
            adopted=adopted,
            compiles=compiles + built,
            seconds=time.perf_counter() - start_s,
        )


class _Parts:
    """Tells which part begins."""

    def __init__(self, settings: BuildSettings, runtime: Runtime) -> None:
        self._on_part = settings.on_part
        self._count = 5 if runtime.device.type == "cuda" else 3
        self.progress = settings.progress

    def begin(self, name: str) -> None:
        """The part of this name begins."""
        self._on_part(name, self._count)


def _start(
    config: EngineConfig, runtime: Runtime, build: Build, plan: dict[str, Any], parts: _Parts
) -> tuple[CompileCounts, tuple[SelfCheckPoint, ...]]:
    with tempfile.TemporaryDirectory(prefix="bullet_graph_") as name:
        folder = Path(name)
        captures = Captures(build, build=build, self_check="all")

        @contextmanager
        def recording(*_: Any) -> Iterator[Captures]:
            yield captures

        with caches_below(folder):
            captures.restore_libraries(runtime, folder)
            parts.begin("start")
            start_s = time.perf_counter()
            built = build_executor(
                config,
                runtime,
                progress=parts.progress,
                on_ledger=lambda _: None,
                clock=StartClock(),
                captures_for=recording,
            )
            try:
                parts.begin("kernels")
                with CompileCounter(gpu=runtime.device.type == "cuda") as counter:
                    exercise(
                        built.executor,
                        max_rows=max_forward_rows(config),
                        max_num_seqs=config.max_num_seqs,
                        max_model_len=runtime.max_model_len,
                        num_kv_blocks=built.memory.num_kv_blocks,
                    )
                row_buckets: tuple[int, ...] = getattr(built.executor, "row_buckets", ())
            finally:
                built.executor.shutdown()
            seconds = time.perf_counter() - start_s
            _add_start(build, built, folder, plan, row_buckets, seconds, traced=captures.keeps_traced)
    return built.compiles + counter.counts, captures.use.self_check


def _add_start(
    build: Build,
    built: BuiltRuntime,
    folder: Path,
    plan: dict[str, Any],
    row_buckets: tuple[int, ...],
    seconds: float,
    *,
    traced: bool,
) -> None:
    add_capture(build, built.capture, plan)
    if row_buckets:
        add_tuning(build, row_buckets, build_seconds=0.0)
    counted = sum(
        artifact.build_seconds
        for kind in (ArtifactKind.TORCH_COMPILE, ArtifactKind.CAPTURE)
        for artifact in build.of_kind(kind)
    )
    # What is neither compiling halves nor capturing is, with weights loaded already, compiling kernels.
    collect(build, TRITON, folder / TRITON.name, build_seconds=max(seconds - counted, 0.0))
    # A half's package holds all of it; one that each start traces takes what it can from Inductor's own caches.
    if traced:
        collect(build, INDUCTOR, folder / INDUCTOR.name, build_seconds=0.0)


def _adopt(store: CaptureStore, build: Build, here: Fingerprint, plan: dict[str, Any]) -> tuple[str, ...]:
    """Take over what other entries have that holds here as well."""
    adopted: list[str] = []
    for mismatch in store.find(here, plan).mismatches:
        held = {artifact.kind for artifact in mismatch.entry.manifest.artifacts}
        if mismatch.entry.rejection is None and held - mismatch.stale:
            try:
                with store.open(mismatch.entry) as opened:
                    adopted += build.adopt(opened)
            except CacheError:
                continue  # damaged, or of another shape: then it is built
    return tuple(adopted)


def _add_flashinfer(build: Build, runtime: Runtime) -> None:
    module = needed_module(Gpu.of(runtime.device), runtime.dtype, runtime.model.head_dim)
    artifact = flashinfer_artifact(module)
    if artifact not in build:
        start_s = time.perf_counter()
        library = module.build()
        seconds = time.perf_counter() - start_s
        build.add_file(artifact, ArtifactKind.FLASHINFER, library, path=artifact, build_seconds=seconds)


def _self_check_record(points: tuple[SelfCheckPoint, ...]) -> dict[str, Any] | None:
    if not points:
        return None
    return {
        "seed": SEED,
        "steps": STEPS,
        "tolerance": points[0].tolerance,
        "relative_error": {str(point.batch_size): point.relative_error for point in points},
    }
