"""What was measured or proven on a GPU, as artifacts: the performance table, the SM-mask offset, and tuning."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from bullet_graph.captures.builder import Build
from bullet_graph.captures.fingerprint import ArtifactKind, Fingerprint
from bullet_graph.captures.store import CaptureStore
from bullet_graph.config import EngineConfig
from bullet_graph.errors import CacheError, PerfTableError
from bullet_graph.graphs.report import CaptureReport
from bullet_graph.partition import offsets
from bullet_graph.partition.smctrl import identify_driver
from bullet_graph.perf.table import PerfTable, read_table
from bullet_graph.runtime.artifacts.source import ArtifactSource, data_of
from bullet_graph.runtime.performance import ROOFLINE, table_file
from bullet_graph.runtime.resolve import Runtime

PERF_TABLE = "perf_table.json"
MASK_OFFSET = "mask_offset.json"
ROW_BUCKETS = "row_buckets.json"
CAPTURE = "capture.json"


def add_perf_table(build: Build, config: EngineConfig, runtime: Runtime) -> None:
    """Keep the table that an engine of this configuration predicts from, if there is one."""
    if PERF_TABLE in build or config.perf_table == ROOFLINE:
        return
    start_s = time.perf_counter()
    file = table_file(config, runtime)
    if file is not None:
        read_table(file)
        seconds = time.perf_counter() - start_s
        build.add_file(PERF_TABLE, ArtifactKind.PERF_TABLE, file, path=PERF_TABLE, build_seconds=seconds)


def cached_perf_table(store: CaptureStore, here: Fingerprint) -> PerfTable | None:
    """A table that holds here, out of any entry that has one, whatever plan it was built for."""
    lookup = store.find(here, None)
    holding = [lookup.hit] if lookup.hit is not None else []
    holding += [miss.entry for miss in lookup.mismatches if ArtifactKind.PERF_TABLE not in miss.stale]
    for entry in holding:
        if any(artifact.name == PERF_TABLE for artifact in entry.manifest.artifacts):
            try:
                with store.open(entry) as opened:
                    return read_table(opened.path(PERF_TABLE))
            except (CacheError, PerfTableError):
                continue  # another entry may have it; without any, the engine says what is missing
    return None


def add_mask_offset(build: Build) -> None:
    """Keep the offset of SM masks that was proven for this driver, if one was, or is known."""
    if MASK_OFFSET in build:
        return
    driver = identify_driver()
    trusted = offsets.find(driver)
    if trusted is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        file = offsets.remember(driver, trusted.offset, Path(folder) / MASK_OFFSET)
        build.add_file(MASK_OFFSET, ArtifactKind.MASK_OFFSET, file, path=MASK_OFFSET, build_seconds=0.0)


def restore_mask_offset(source: ArtifactSource, calibrations: Path | None = None) -> None:
    """Remember a cache's offset on this machine, where nothing is known of its driver.

    The back end verifies the offset before it is used, as any other.

    Args:
        calibrations: the user's file; None takes the usual one.

    Raises:
        PartitionError: a file of offsets cannot be read or written.
    """
    if data_of(source, ArtifactKind.MASK_OFFSET, MASK_OFFSET) is None:
        return
    driver = identify_driver()
    proven = offsets.remembered(driver, source.path(MASK_OFFSET))
    if proven is not None and offsets.find(driver, calibrations) is None:
        offsets.remember(driver, proven, calibrations)


def add_tuning(build: Build, row_buckets: tuple[int, ...], *, build_seconds: float) -> None:
    """Keep which rows of short forwards are worthwhile."""
    _add_json(build, ROW_BUCKETS, ArtifactKind.TUNING, list(row_buckets), build_seconds)


def tuned_row_buckets(source: ArtifactSource, candidates: tuple[int, ...]) -> tuple[int, ...] | None:
    """The rows that were found worthwhile; None where none were recorded.

    Args:
        candidates: of the plan.

    Raises:
        CacheError: what was recorded is not a rising choice of them.
    """
    data = data_of(source, ArtifactKind.TUNING, ROW_BUCKETS)
    if data is None:
        return None
    try:
        chosen = json.loads(data)
    except ValueError as error:
        raise CacheError(f"{ROW_BUCKETS} cannot be read: {error}") from error
    if not isinstance(chosen, list) or chosen != [rows for rows in candidates if rows in chosen]:
        raise CacheError(
            f"{ROW_BUCKETS} must list some of {list(candidates)} in order, found {chosen!r:.100}"
        )
    return tuple(chosen)


def add_capture(build: Build, capture: CaptureReport | None, plan: dict[str, Any]) -> None:
    """Keep what was captured, and what it cost."""
    if capture is None:
        return
    costs = {
        "num_graphs": capture.num_graphs,
        "compile_seconds": capture.compile_seconds,
        "capture_seconds": capture.capture_seconds,
        "num_bytes": capture.num_bytes,
    }
    _add_json(build, CAPTURE, ArtifactKind.CAPTURE, {"plan": plan, **costs}, capture.capture_seconds)


def _add_json(build: Build, name: str, kind: ArtifactKind, value: Any, build_seconds: float) -> None:
    if name not in build:
        data = (json.dumps(value, indent=1) + "\n").encode()
        build.add_bytes(name, kind, data, path=name, build_seconds=build_seconds)
