"""Finds the cache entry that a start is for, and opens it, or tells why there is none."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bullet_graph.captures.entry import Lookup, OpenedEntry
from bullet_graph.captures.store import CaptureStore, default_root
from bullet_graph.config import EngineConfig
from bullet_graph.errors import CacheError, DeviceError
from bullet_graph.runtime.artifacts.library_caches import caches_below
from bullet_graph.runtime.artifacts.use import Captures, warn
from bullet_graph.runtime.fingerprint import fingerprint_of
from bullet_graph.runtime.resolve import Runtime


def store_of(config: EngineConfig) -> CaptureStore | None:
    """The store that the configuration names."""
    if config.capture_cache is None:
        return None
    return CaptureStore(default_root() if config.capture_cache == "auto" else Path(config.capture_cache))


CapturesOpener = Callable[[EngineConfig, Runtime, dict[str, Any]], AbstractContextManager[Captures]]
"""Gives a start its artifacts: :func:`open_captures`, or what a build does."""


@contextmanager
def open_captures(config: EngineConfig, runtime: Runtime, plan: dict[str, Any]) -> Iterator[Captures]:
    """What the configured cache has for an engine; while the block runs, Inductor and Triton work in a folder apart.

    Where it has nothing that fits, a warning tells why, and everything is compiled.

    Args:
        plan: see :func:`~bullet_graph.runtime.artifacts.plan.artifact_plan`.
    """
    store = store_of(config)
    if store is None:
        yield Captures()
        return
    with ExitStack() as held:
        try:
            opened = _open(store, runtime, plan)
        except (CacheError, DeviceError) as error:
            problem = f"everything is compiled: {error}"
            warn(problem)
            yield Captures(problems=[problem])
            return
        held.enter_context(opened)
        captures = Captures(opened, entry=(store, opened.entry), self_check=config.self_check)
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="bullet_graph_")))
        with caches_below(folder):
            captures.restore_libraries(runtime, folder)
            yield captures
        captures.publish_kernels()


def _open(store: CaptureStore, runtime: Runtime, plan: dict[str, Any]) -> OpenedEntry:
    lookup = store.find(fingerprint_of(runtime), plan)
    if lookup.hit is None:
        raise CacheError(f"{_why(store, lookup)}: build it with `bullet-graph capture build`")
    return store.open(lookup.hit)


def _why(store: CaptureStore, lookup: Lookup) -> str:
    if lookup.damaged:
        return f"{store.root} has no captures for this engine, but {lookup.damaged[0].problem}"
    if not lookup.mismatches:
        return f"{store.root} has no captures"
    nearest = lookup.mismatches[0]
    found = [
        f"{difference.component} is {difference.here or 'not known'} here, {difference.cached or 'not known'} there"
        for difference in nearest.differences
    ]
    more = f" and {len(found) - 2} more" if len(found) > 2 else ""
    return f"{store.root} has no captures for this engine; of the nearest, {nearest.entry.entry_id}, " + (
        f"{'; '.join(found[:2])}{more}"
    )
