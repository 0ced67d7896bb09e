"""A start from a capture cache: take what the entry has, check what it computes, and otherwise compile everything.

An entry's files: ``layers/*.pt2`` (AOTInductor packages), ``triton/`` (Triton's own cache folder), ``flashinfer/*.so``,
``perf_table.json``, ``mask_offset.json`` and ``measured.json``.
"""

import json
import os
import secrets
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bullet_graph.captures.store import CaptureStore, Entry, Lookup, default_root
from bullet_graph.config import EngineConfig, SelfCheckChoice
from bullet_graph.errors import CacheError, CaptureCacheWarning, DeviceError, PartitionError, PerfTableError, io_errors
from bullet_graph.graphs.capture_plan import CapturePlan
from bullet_graph.graphs.compile_counts import CompileCounter, CompileCounts
from bullet_graph.graphs.compiled import CompiledPart, LayerPart, compile_ahead, compile_now, load_package
from bullet_graph.kernels.communicator import on_all_ranks
from bullet_graph.kernels.flashinfer_attention import ModuleSpec, load_module, needed_modules
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.launch import quick
from bullet_graph.partition import offsets
from bullet_graph.partition.calibrate import prove
from bullet_graph.partition.smctrl import identify_driver
from bullet_graph.perf.start_report import PhaseName
from bullet_graph.perf.table import PerfTable, read_table
from bullet_graph.runtime.fingerprint import fingerprint_of
from bullet_graph.runtime.resolve import Runtime
from bullet_graph.runtime.self_check import SelfCheck, SelfCheckPoint

if TYPE_CHECKING:
    from bullet_graph.runtime.build import BuiltRuntime, Start  # it imports this module

LAYERS = "layers"
TRITON = "triton"
PERF_TABLE = "perf_table.json"
MASK_OFFSET = "mask_offset.json"
MEASURED = "measured.json"

_GROUP_PREFIX = "__grp__"
"""Begins the names of Triton's files that list a kernel's other files, by absolute path."""

_TABLE_COMPONENTS = ("gpu", "num_sms", "torch", "triton", "flashinfer", "model", "dtype")
"""The fingerprint's components that a performance table holds for: it outlives changes of our code."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a capture cache gave to a start; ``problems`` say why the cache, or a part of it, was not used."""

    entry_id: str | None = None
    self_check: tuple[SelfCheckPoint, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class CapturedStart:
    """Compiled code and tuning of one start.

    Without ``files``, an entry's folder, everything is compiled. With ``is_build`` the folder is empty, and what is
    compiled is kept there. ``entry`` is rejected where it computes something else than the model. ``use`` is what this
    start and its earlier attempts got.
    """

    files: Path | None = None
    is_build: bool = False
    entry: tuple[CaptureStore, Entry] | None = None
    self_check: SelfCheckChoice = "off"
    use: CacheUse = CacheUse()
    is_rejected: bool = field(default=False, init=False)

    def compiler(self, part: LayerPart) -> CompiledPart:
        """Compile a part of a layer, or load it; CacheError of a build, where it cannot be compiled ahead of time."""
        if self.files is None:
            return compile_now(part)
        package = self.files / LAYERS / f"{part.name}.pt2"
        try:
            if self.is_build:
                package.parent.mkdir(exist_ok=True)
                return compile_ahead(part, package)
            return load_package(package, part)
        # Whatever torch and foreign code may raise.
        except Exception as error:
            problem = f"{type(error).__name__}: {error!s:.300}"
            if self.is_build:
                raise CacheError(
                    f"{part.name} cannot be compiled ahead of time, which needs a C++ compiler and, on a GPU, CUDA's "
                    f"headers: {problem}"
                ) from error
            self._reject(f"{package.name} cannot be loaded ({problem})")
            return compile_now(part)

    def piecewise_rows(self, plan: CapturePlan) -> tuple[int, ...] | None:
        """The plan's rows of piecewise graphs that were worthwhile at the build; None: they have to be timed."""
        if self.files is None or self.is_build or not plan.piecewise_rows:
            return None
        try:
            rows = json.loads((self.files / MEASURED).read_bytes())["piecewise_rows"]
            if rows != [size for size in plan.piecewise_rows if size in rows]:
                raise ValueError(f"rows of the plan are required, found {rows!r:.100}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.tell(f"rows of piecewise graphs are timed anew: {MEASURED}: {error}")
            return None
        return tuple(rows)

    def load_attention(self, runtime: Runtime) -> None:
        """Load FlashInfer's modules, those that the entry has."""
        if self.files is None:
            return
        for module in needed_modules(Gpu.of(runtime.device), runtime.dtype, runtime.model):
            library = self.files / library_name(module)
            if not library.is_file():
                continue
            try:
                load_module(module, library)
            except RuntimeError as error:
                self.tell(f"{library.name} cannot be loaded, so FlashInfer compiles it: {error!s:.300}")

    def holds(self, check: SelfCheck | None) -> bool:
        """Self-check: whether the logits are those of the uncompiled model.

        Where they are not, the entry is rejected; a build raises CacheError.
        """
        if check is None or self.files is None or self.self_check == "off":
            return True
        points = check(sample=self.self_check == "sample")
        self.use = replace(self.use, self_check=points)
        missed = "; ".join(str(point) for point in points if not point.holds)
        if missed and self.is_build:
            raise CacheError(
                f"what was compiled here does not compute the model, so it is not kept: {missed}: please report this"
            )
        if missed:
            self._reject(f"the self-check does not hold: {missed}")
        return not missed

    def publish_kernels(self) -> None:
        """Give the user's own folder the Triton kernels it lacks: later steps need some that no start runs."""
        if self.files is not None and not self.is_rejected and (self.files / TRITON).is_dir():
            from triton import knobs  # noqa: PLC0415 - published for Linux only

            try:
                copy_kernels(self.files / TRITON, Path(knobs.cache.dir))
            except CacheError as error:
                self.tell(f"kernels that are needed later will be compiled then: {error}")

    def _reject(self, reason: str) -> None:
        self.is_rejected = True
        marked = "; `bullet-graph capture build` builds the entry anew"
        # A second rejection of an entry replaces the reason.
        if self.entry is not None and not self.entry[0].reject(self.entry[1], reason):
            marked = "; it could not be marked as rejected, so the next start will find the same"
        self.tell(f"captures are compiled anew: {reason}{marked}")

    def tell(self, problem: str) -> None:
        """Note why a part of the cache is not used, and warn."""
        self.use = replace(self.use, problems=(*self.use.problems, problem))
        warnings.warn(problem, CaptureCacheWarning, stacklevel=2)


# ---- entries ----


@contextmanager
def open_capture_entry(config: EngineConfig, runtime: Runtime, plan: dict[str, Any]) -> Iterator[CapturedStart]:
    """What the configured capture cache has for an engine; its Triton kernels are found during the block.

    Where nothing fits or files are damaged, a warning says why, and everything is compiled. For ``plan`` see
    :func:`~bullet_graph.runtime.build.entry_plan`.
    """
    store = configured_store(config)
    if store is None:
        yield CapturedStart()
        return
    with ExitStack() as held:
        try:
            store.require_trusted()
            lookup = store.find(fingerprint_of(runtime), plan)
            if lookup.hit is None:
                raise CacheError(f"{_why(store, lookup)}: build it with `bullet-graph capture build`")
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="bullet_graph_")))
            entry = held.enter_context(store.open(lookup.hit, copy_to=folder / "checked"))
            # Once more, since Triton may write into its folder, and its lists of files hold absolute paths.
            copy_kernels(entry.files / TRITON, folder / TRITON)
        except (CacheError, DeviceError) as error:
            captured = CapturedStart()
            captured.tell(f"everything is compiled: {error}")
            yield captured
            return
        use = CacheUse(entry.entry_id)
        captured = CapturedStart(entry.files, entry=(store, entry), self_check=config.self_check, use=use)
        if runtime.device.type == "cuda":
            try:
                restore_mask_offset(entry.files / MASK_OFFSET)
            except PartitionError as error:
                captured.tell(f"the SM-mask offset of entry {entry.entry_id} is not used: {error}")
        with library_caches(folder):
            yield captured
        captured.publish_kernels()


def cached_perf_table(store: CaptureStore | None, runtime: Runtime) -> PerfTable | None:
    """A table for this GPU and model from any entry of a store, whatever its plan and our code."""
    if store is None:
        return None
    here = fingerprint_of(runtime)
    for entry in store.entries()[0]:
        manifest = entry.manifest
        is_same = all(manifest.fingerprint.get(name) == here.get(name) for name in _TABLE_COMPONENTS)
        if is_same and any(file.path == PERF_TABLE for file in manifest.files):
            try:
                store.require_trusted()
                with store.open(entry) as opened:
                    return read_table(opened.files / PERF_TABLE)
            except (CacheError, PerfTableError):
                continue  # another entry may have one; without any, the engine says what is missing
    return None


def configured_store(config: EngineConfig) -> CaptureStore | None:
    """The capture cache that a configuration names; None where it names none."""
    if config.capture_cache is None:
        return None
    return CaptureStore(default_root() if config.capture_cache == "auto" else Path(config.capture_cache))


def _why(store: CaptureStore, lookup: Lookup) -> str:
    if lookup.damaged:
        return f"{store.root} has no entry for this engine, but {lookup.damaged[0].problem}"
    if lookup.nearest is None:
        return f"{store.root} has no entries"
    first, more = lookup.differences[:2], len(lookup.differences[2:])
    found = "; ".join(f"{d.component} is {d.here or 'unknown'} here, {d.cached or 'unknown'} there" for d in first)
    nearest = f"of the nearest, {lookup.nearest.entry_id}, {found}{f' and {more} more' if more else ''}"
    return f"{store.root} has no entry for this engine; {nearest}"


# ---- the start ----


def start_with_captures(
    config: EngineConfig,
    runtime: Runtime,
    plan: dict[str, Any],
    build: Callable[[CapturedStart], "BuiltRuntime"],
    start: "Start",
) -> tuple["BuiltRuntime", CompileCounts, CacheUse]:
    """Start from a capture cache. Where that computes something else than the model, start again without it.

    All ranks of tensor parallelism do the same, as each needs what the others compute.
    Returns the result of ``build``, what was compiled on the way, and what the cache gave.
    """
    gpu, communicators = runtime.device.type == "cuda", start.communicators
    opener = open_capture_entry(config, runtime, plan) if start.captured is None else nullcontext(start.captured)

    def noted(phase: PhaseName) -> AbstractContextManager[None]:
        return nullcontext() if config.capture_cache is None else start.clock.phase(phase)

    with ExitStack() as undo:
        with ExitStack() as opened:
            with noted("capture cache"):
                captured = opened.enter_context(opener)
                found = captured.files is not None
                if config.capture_cache is not None and found != on_all_ranks(communicators, found, runtime.device):
                    captured = CapturedStart()
                    captured.tell("everything is compiled, as another rank has no entry: see its warning")
            counter = opened.enter_context(CompileCounter(gpu=gpu))
            started = build(captured)
            undo.callback(started.executor.shutdown)
            with noted("self-check"):
                holds = captured.holds(started.self_check)
                if captured.files is not None and holds != on_all_ranks(communicators, holds, runtime.device):
                    holds = False
                    captured.tell("captures are compiled anew: they do not compute the model on another rank")
        if holds:
            undo.pop_all()
            return started, counter.counts, captured.use
    # Its memory must be free before the same is allocated again.
    del started
    _forget_kernels()
    captured = CapturedStart(use=replace(captured.use, entry_id=None))
    with CompileCounter(gpu=gpu) as again:
        restarted = build(captured)
    return restarted, counter.counts + again.counts, captured.use


def _forget_kernels() -> None:
    """Drop this package's Triton kernels from the process, so that none of a rejected entry is left."""
    if "triton" not in sys.modules:
        return
    from triton.runtime.jit import JITFunction  # noqa: PLC0415 - published for Linux only

    quick.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("bullet_graph.kernels."):
            for function in vars(module).values():
                if isinstance(function, JITFunction):
                    function.device_caches.clear()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---- libraries ----


@contextmanager
def library_caches(folder: Path) -> Iterator[None]:
    """Have Inductor and Triton keep their caches below ``folder`` during the block."""
    paths = {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "TRITON_CACHE_DIR": folder / TRITON}
    before = {name: os.environ.get(name) for name in paths}
    try:
        for name, path in paths.items():
            path.mkdir(parents=True, exist_ok=True)
            os.environ[name] = str(path)
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def triton_hashed_meanwhile() -> Iterator[None]:
    """Have a thread compute what Triton's cache keys begin with during the block.

    Triton would hash itself at the first kernel of a process: 0.3 s, mostly without the interpreter's lock.
    """
    from triton.runtime.cache import triton_key  # noqa: PLC0415 - published for Linux only

    thread = threading.Thread(target=triton_key, name="bullet-graph-triton-key")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def copy_kernels(source: Path, target: Path) -> None:
    """Copy Triton's cache folder; files that exist stay. Each file appears whole, and after those that it lists."""
    with io_errors(f"cannot copy kernels to {target}"):
        for path in sorted(source.rglob("*"), key=lambda path: path.name.startswith(_GROUP_PREFIX)):
            relative = path.relative_to(source)
            goal = target / relative
            if any(part.startswith("tmp.") for part in relative.parts) or path.is_dir() or goal.exists():
                continue
            data = path.read_bytes()
            if path.name.startswith(_GROUP_PREFIX):
                data = _group_in(goal.parent, data)
            goal.parent.mkdir(parents=True, exist_ok=True)
            draft = goal.with_name(f"tmp.{secrets.token_hex(8)}")
            try:
                draft.write_bytes(data)
                # Shared libraries are mapped, and not executed by the kernel's own loader.
                draft.chmod(0o700 if goal.suffix == ".so" else 0o600)
                draft.replace(goal)
            finally:
                draft.unlink(missing_ok=True)


def _group_in(folder: Path, data: bytes) -> bytes:
    """A list of a kernel's files, all of them in this folder, whatever the list says."""
    try:
        group = json.loads(data)
        names = group["child_paths"].items()
        group["child_paths"] = {name: str(folder / os.path.basename(path)) for name, path in names}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"a list of Triton's files is damaged: {error}") from error
    return json.dumps(group).encode()


def library_name(module: ModuleSpec) -> str:
    """Path of FlashInfer's module in an entry."""
    return f"flashinfer/{module.name}.so"


def restore_mask_offset(file: Path, calibrations: Path | None = None) -> None:
    """Prove an entry's SM-mask offset on this machine and remember it, where none is known for its driver.

    A write at a wrong offset corrupts the driver's memory, and an entry may come from anywhere. ``calibrations`` is the
    user's file; None takes the usual one. Raises PartitionError where the offset does not hold here, or a file of
    offsets cannot be read or written.
    """
    if file.is_file():
        driver = identify_driver()
        proven = offsets.remembered(driver, file)
        if proven is not None and offsets.find(driver, calibrations) is None:
            prove(proven)
            offsets.remember(driver, proven, calibrations)
