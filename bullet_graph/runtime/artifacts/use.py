"""What a start takes from a capture cache, and what a build adds to one on the way."""

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bullet_graph.captures.builder import Build
from bullet_graph.captures.entry import Entry, Rejection
from bullet_graph.captures.fingerprint import ArtifactKind
from bullet_graph.captures.store import CaptureStore
from bullet_graph.errors import CacheError, CaptureCacheWarning
from bullet_graph.graphs.aot import stored
from bullet_graph.graphs.capture_plan import CapturePlan
from bullet_graph.graphs.compiled import Half, HalfCompiler, compile_now
from bullet_graph.kernels.flashinfer_attention import ModuleSpec, load_module, needed_module
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.models.decoder import Decoder
from bullet_graph.runtime.artifacts.library_caches import LIBRARY_CACHES, TRITON, restore
from bullet_graph.runtime.artifacts.measured import restore_mask_offset, tuned_row_buckets
from bullet_graph.runtime.artifacts.source import ArtifactSource, path_of
from bullet_graph.runtime.resolve import Runtime
from bullet_graph.runtime.self_check import (
    SelfCheckPoint,
    SelfCheckStep,
    fitting_sizes,
    run_self_check,
    sampled_sizes,
)

COMPUTING_KINDS = (
    ArtifactKind.TORCH_COMPILE,
    ArtifactKind.TRITON,
    ArtifactKind.TUNING,
    ArtifactKind.CAPTURE,
)
"""What is built anew when the self-check does not hold: all that decides what a decode step computes."""

HALVES = "halves"


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a capture cache has brought to a start.

    Attributes:
        entry_id: of the entry that was used; None: none was.
        self_check: what was compared, by batch size.
        problems: why the cache, or a part of it, was not used, in words.
    """

    entry_id: str | None = None
    self_check: tuple[SelfCheckPoint, ...] = ()
    problems: tuple[str, ...] = ()


NO_CACHE = CacheUse()


class Captures:
    """Artifacts for one start.

    Args:
        source: where they are taken from; None: there are none, and everything is compiled.
        build: where what has to be compiled is added; None: nowhere.
        entry: behind the source, and its store, to be marked where it computes something else than the model.
        self_check: batch sizes to compare: off, sample or all.
        problems: known already.

    Attributes:
        keeps_traced: of a build: some half could not be compiled ahead of time, so that starts need what
            Inductor's own caches have of it.
    """

    def __init__(
        self,
        source: ArtifactSource | None = None,
        *,
        build: Build | None = None,
        entry: tuple[CaptureStore, Entry] | None = None,
        self_check: str = "off",
        problems: Sequence[str] = (),
    ) -> None:
        self._source, self._build, self._entry, self._canary = source, build, entry, self_check
        self._points: tuple[SelfCheckPoint, ...] = ()
        self._problems = list(problems)
        self._is_rejected = False
        self.keeps_traced = False

    @property
    def use(self) -> CacheUse:
        """What has come of it so far."""
        used = None if self._entry is None else self._entry[1].entry_id
        return CacheUse(used, self._points, tuple(self._problems))

    def compiler_for(self, name: str) -> HalfCompiler:
        """The compiler of the halves that bear this name."""
        return compile_now if self._source is None else stored(self, f"{HALVES}/{name}")

    def row_buckets(self, plan: CapturePlan) -> tuple[int, ...] | None:
        """Rows of short forwards that were found worthwhile before; None: they have to be timed."""
        if self._source is None or self._build is not None:
            return None
        try:
            return tuned_row_buckets(self._source, plan.piecewise_rows)
        except CacheError as error:
            self._tell(f"rows of short forwards are timed anew: {error}")
            return None

    # ---- of compiled halves: see graphs.aot.HalfStore ----

    def find(self, name: str) -> Path | None:
        """Where what is there under this name lies."""
        assert self._source is not None
        return path_of(self._source, ArtifactKind.TORCH_COMPILE, name)

    def save(self, name: str, ahead: Callable[[], tuple[Half, bytes]], now: Callable[[], Half]) -> Half:
        """Compile what is not there; a build keeps it."""
        if self._build is None:
            self._tell(f"{name} is not in the cache of captures: torch traces it")
            return now()
        start_s = time.perf_counter()
        try:
            half, data = ahead()
        # Torch says in many ways that it cannot; what it cannot compile at all fails below as well.
        except Exception as error:
            self._tell(
                f"{name} cannot be compiled ahead of time, so each start will trace it: {error!s:.300}"
            )
            self.keeps_traced = True
            return now()
        seconds = time.perf_counter() - start_s
        self._build.add_bytes(name, ArtifactKind.TORCH_COMPILE, data, path=name, build_seconds=seconds)
        return half

    def refuse(self, name: str, problem: str) -> None:
        """Say that what is there cannot be loaded."""
        if self._build is not None:
            raise CacheError(
                f"{name} was built before, but cannot be loaded ({problem}): remove what is left of the build with "
                "`bullet-graph capture prune` and begin anew"
            )
        self._reject(f"{name} cannot be loaded ({problem})")

    # ---- the self_check ----

    def holds(
        self, decoder: Decoder, logits_of: Callable[[SelfCheckStep], Tensor], batch_sizes: Sequence[int]
    ) -> bool:
        """Whether the logits are those of the uncompiled model; where not, the entry is rejected.

        Args:
            logits_of: see :func:`~bullet_graph.runtime.self_check.run_self_check`.
            batch_sizes: that can be compared, rising.
        """
        if self._source is None or self._canary == "off":
            return True
        sizes = fitting_sizes(decoder, batch_sizes)
        self._points = run_self_check(
            decoder, logits_of, sampled_sizes(sizes) if self._canary == "sample" else sizes
        )
        missed = [point for point in self._points if not point.holds]
        if missed:
            self._reject(f"the self-check does not hold: {'; '.join(map(str, missed))}")
        return not missed

    def without(self) -> "Captures":
        """For a start that compiles everything, and knows what happened to this one."""
        fallback = Captures(problems=self._problems)
        fallback._points = self._points
        return fallback

    # ---- the libraries' own folders ----

    def restore_libraries(self, runtime: Runtime, folder: Path) -> None:
        """Copy what Inductor and Triton kept into a folder of this start, and remember the mask offset."""
        if self._source is None:
            return
        for cache in LIBRARY_CACHES:
            restore(self._source, cache, folder / cache.name)
        if runtime.device.type == "cuda" and self._build is None:
            restore_mask_offset(self._source)

    def publish_kernels(self) -> None:
        """Give the user's own folder the Triton kernels that it lacks: those that no start runs are loaded later."""
        if self._source is None or self._build is not None or self._is_rejected:
            return
        if self._source.of_kind(ArtifactKind.TRITON):
            from triton import knobs  # noqa: PLC0415 - published for Linux only

            try:
                restore(self._source, TRITON, Path(knobs.cache.dir))
            except CacheError as error:
                self._tell(f"kernels that are needed later will be compiled then: {error}")

    def load_attention(self, runtime: Runtime) -> None:
        """Load FlashInfer's module, if it is there."""
        if self._source is None:
            return
        module = needed_module(Gpu.of(runtime.device), runtime.dtype, runtime.model.head_dim)
        artifact = flashinfer_artifact(module)
        if all(there.name != artifact for there in self._source.of_kind(ArtifactKind.FLASHINFER)):
            return
        library = self._source.path(artifact)
        try:
            load_module(module, library)
        except RuntimeError as error:
            self._tell(f"{artifact} cannot be loaded, so FlashInfer compiles it: {error!s:.300}")

    def _reject(self, reason: str) -> None:
        if self._build is not None:
            raise CacheError(
                f"what was compiled here does not compute the model, so it is not kept: {reason}: please report this"
            )
        self._is_rejected = True
        marked = "; `bullet-graph capture build` builds the part anew"
        if self._entry is not None:
            store, entry = self._entry
            # Twice is as good as once: the first reason may be a half, the second the self_check.
            if not store.reject(entry, Rejection(reason, COMPUTING_KINDS)):
                marked = "; it could not be marked as rejected, so the next start will find the same"
        self._tell(f"captures are compiled anew: {reason}{marked}")

    def _tell(self, problem: str) -> None:
        self._problems.append(problem)
        warn(problem)


def warn(problem: str) -> None:
    """Tell that a cache of captures is not used, or not all of it."""
    warnings.warn(problem, CaptureCacheWarning, stacklevel=3)


def flashinfer_artifact(module: ModuleSpec) -> str:
    """Name and path of a module's artifact."""
    return f"flashinfer/{module.name}.so"


def forget_kernels() -> None:
    """Drop the Triton kernels of this package that the process has loaded, so that none of a bad cache is left."""
    if "triton" not in sys.modules:
        return
    from triton.runtime.jit import JITFunction  # noqa: PLC0415 - published for Linux only

    for name, module in list(sys.modules.items()):
        if name.startswith("bullet_graph.kernels."):
            for function in vars(module).values():
                if isinstance(function, JITFunction):
                    function.device_caches.clear()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
