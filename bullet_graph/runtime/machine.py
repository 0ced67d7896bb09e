"""Finds what an engine needs on this machine; :mod:`bullet_graph.runtime.diagnose` judges it."""

import importlib
import itertools
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed

from bullet_graph.config import EngineConfig
from bullet_graph.errors import BulletGraphError, PartitionError
from bullet_graph.partition import offsets
from bullet_graph.partition.backend import AUTO, OPENERS, NoneBackend, PartitionBackend, open_backend, verify
from bullet_graph.partition.masks import SMS_PER_TPC, partition_of, sm_ranges
from bullet_graph.partition.offsets import DriverId, TrustedOffset
from bullet_graph.partition.probe import SmidProbe
from bullet_graph.partition.smctrl import identify_driver
from bullet_graph.perf.energy import linked_by_nvlink
from bullet_graph.perf.provenance import Provenance, collect_provenance, installed_version
from bullet_graph.runtime.build import plan_ledger
from bullet_graph.runtime.memory import MemoryLedger
from bullet_graph.runtime.resolve import find_device, resolve
from bullet_graph.runtime.tensor_parallel import of_rank

_STEP_SMS = 8
"""Green contexts allow such steps."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that an engine would take, one of the ``num_gpus`` that this process may use."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    num_tpcs: int
    total_bytes: int
    free_bytes: int
    num_gpus: int


@dataclass(frozen=True, slots=True)
class GpuPair:
    """Two GPUs by their indices; ``has_nvlink`` None where NVML does not tell.

    ``has_peer_access``: one can read the other's memory.
    """

    gpus: tuple[int, int]
    has_nvlink: bool | None
    has_peer_access: bool


@dataclass(frozen=True, slots=True)
class SeveralGpus:
    """What tensor parallelism needs: the GPUs' names, all pairs of them, and NCCL's version, None without NCCL."""

    names: tuple[str, ...]
    pairs: tuple[GpuPair, ...]
    nccl: str | None


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A folder that outlives the process; writable if it is, or else the folder that it would be made in."""

    name: str
    path: str
    num_bytes: int
    is_writable: bool


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """One partition under one back end; ``decode_sms`` None is the whole GPU.

    ``seen_sms``, the SMs that decode work was seen on, such as "0-15", is None if the partition does not hold.
    """

    decode_sms: int | None
    seen_sms: str | None = None
    seconds: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class BackendCheck:
    """One back end; ``granularity_sms``, the step of a lane's size, is None if it cannot be opened."""

    name: str
    granularity_sms: int | None = None
    sizes: tuple[SizeCheck, ...] = ()
    problem: str | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Of the back end and its sizes."""
        found = (self.problem, *(size.problem for size in self.sizes))
        return tuple(problem for problem in found if problem is not None)


@dataclass(frozen=True, slots=True)
class PartitionChecks:
    """The checks of all back ends, the preferred first, and which an engine with these sizes would take, and why.

    ``choice`` is None if the engine would fail.
    """

    decode_sms: tuple[int, ...]
    backends: tuple[BackendCheck, ...]
    choice: str | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found; None for what is missing, and for GPU matters where the engine would run on the CPU.

    ``torch_cuda`` is the CUDA release that torch was built for. ``gpu_path_problem`` says why the modules for the GPU
    cannot be imported. ``several_gpus`` is None where there is one. FlashInfer and Triton need ``missing_compilers`` at
    first use; stream masks may be written at ``mask_offset`` under this driver.
    """

    platform: str
    provenance: Provenance
    cuda_python: str | None
    torch_cuda: str | None
    driver: DriverId | None
    driver_problem: str | None
    uses_gpu: bool
    gpu: Gpu | None
    gpu_problem: str | None
    several_gpus: SeveralGpus | None
    gpu_path_problem: str | None
    missing_compilers: tuple[str, ...]
    mask_offset: TrustedOffset | None
    mask_offset_problem: str | None
    partitions: PartitionChecks | None
    caches: tuple[CacheFolder, ...]
    ledger: MemoryLedger | None
    model_problem: str | None


def look_around(asked: EngineConfig) -> Machine:
    """Look for everything that an engine would need; it reports problems, raises nothing and leaves nothing open.

    The memory of ``asked.model`` is planned unless that is "". All partition back ends are checked for "auto", and a
    few sizes that suit the GPU where ``decode_sms`` is empty.

    On a GPU this takes seconds: it makes the device's primary context, imports FlashInfer and probes the partitions.
    """
    driver, driver_problem = _attempt(identify_driver, PartitionError)
    mask_offset, mask_offset_problem = None, None
    if driver is not None:
        mask_offset, mask_offset_problem = _attempt(partial(offsets.find, driver), PartitionError)
    device = find_device("cpu" if asked.device == "cpu" else "auto")
    uses_gpu, gpu, gpu_problem = device.type == "cuda", None, None
    if uses_gpu:
        # RuntimeError: a GPU that is lost, or that another process has for itself.
        gpu, gpu_problem = _attempt(partial(_find_gpu, device), RuntimeError)
    several_gpus = _find_several_gpus(gpu.num_gpus) if gpu is not None and gpu.num_gpus > 1 else None
    gpu_path_problem = _gpu_path_problem() if uses_gpu else None
    ledger, model_problem, partitions = None, None, None
    if asked.model and gpu_problem is None and gpu_path_problem is None:
        ledger, model_problem = _attempt(
            lambda: plan_ledger(asked, of_rank(asked, resolve(asked), 0)), BulletGraphError
        )
    # Last: a driver that fails under a probe may take the context with it.
    if gpu is not None:
        partitions = check_partitions(
            asked.partition_backend, asked.decode_sms, num_sms=gpu.num_sms, device=device.index
        )
    return Machine(
        platform=platform.platform(),
        provenance=collect_provenance("cpu" if gpu is None else device),
        cuda_python=installed_version("cuda-bindings"),
        torch_cuda=torch.version.cuda,
        driver=driver,
        driver_problem=driver_problem,
        uses_gpu=uses_gpu,
        gpu=gpu,
        gpu_problem=gpu_problem,
        several_gpus=several_gpus,
        gpu_path_problem=gpu_path_problem,
        missing_compilers=_missing_compilers() if uses_gpu else (),
        mask_offset=mask_offset,
        mask_offset_problem=mask_offset_problem,
        partitions=partitions,
        caches=tuple(look_at_cache(name, path) for name, path in cache_folders().items()),
        ledger=ledger,
        model_problem=model_problem,
    )


def _attempt(call: Callable[[], T], error: type[Exception]) -> tuple[T | None, str | None]:
    try:
        return call(), None
    except error as problem:
        return None, str(problem)


def _find_gpu(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    num_sms = properties.multi_processor_count
    return Gpu(
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        num_sms=num_sms,
        num_tpcs=num_sms // SMS_PER_TPC,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        num_gpus=torch.cuda.device_count(),
    )


def _find_several_gpus(count: int) -> SeveralGpus:
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    pairs = []
    for one, other in itertools.combinations(range(count), 2):
        has_nvlink = linked_by_nvlink(str(properties[one].uuid), str(properties[other].uuid))
        has_access = all(itertools.starmap(torch.cuda.can_device_access_peer, ((one, other), (other, one))))
        pairs.append(GpuPair((one, other), has_nvlink, has_access))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    return SeveralGpus(tuple(each.name for each in properties), tuple(pairs), nccl)


def _gpu_path_problem() -> str | None:
    # An engine imports the last two only where it loads FlashInfer's modules, and where no cache has them.
    for module in ("bullet_graph.runtime.cuda", "tvm_ffi", "flashinfer.jit.attention"):
        try:
            importlib.import_module(module)
        except Exception as error:
            # Libraries of kernels fail in ways of their own: a missing symbol, a version check, a missing file.
            return f"{type(error).__name__}: {error}"
    return None


def _missing_compilers() -> tuple[str, ...]:
    """FlashInfer needs nvcc, where it looks for it, and ninja; Triton needs a C compiler."""
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    names = {
        "nvcc": ("nvcc", os.path.join(toolkit, "bin", "nvcc")),
        "ninja": ("ninja",),
        "a C compiler": (os.environ.get("CC", "cc"), "gcc", "clang"),
    }
    return tuple(name for name, commands in names.items() if not any(map(shutil.which, commands)))


def cache_folders() -> dict[str, Path]:
    """Ours and those of the libraries that compile kernels, by owner; nothing is made."""
    # Imported here because it imports all of Inductor, which takes seconds.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # noqa: PLC0415

    # The libraries' own variables decide, but to ask the libraries would make the folders, or import FlashInfer.
    return {
        "bullet_graph": offsets.cache_file().parent,
        "FlashInfer": Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home())) / ".cache" / "flashinfer",
        "Inductor": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()),
        "Triton": Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")),
    }


def look_at_cache(name: str, path: Path) -> CacheFolder:
    """Size and permissions of a folder that may not be there yet."""
    size = 0
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(OSError):  # another process cleans up, or the folder is somebody else's
                size += os.lstat(os.path.join(folder, file)).st_size
    there = next(parent for parent in (path, *path.absolute().parents) if os.path.exists(parent))
    return CacheFolder(name, str(path), size, os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK))


def default_decode_sms(num_sms: int) -> tuple[int, ...]:
    """About an eighth, a quarter and half of the GPU."""
    return tuple(sorted({num_sms // share // _STEP_SMS * _STEP_SMS for share in (8, 4, 2)} - {0}))


def check_partitions(name: str, decode_sms: Iterable[int], *, num_sms: int, device: int = 0) -> PartitionChecks:
    """Open each back end, prove the sizes one by one, and close it; their failures are reported, not raised.

    ``name`` is that of a back end, or "auto" for all of them. Without ``decode_sms``, :func:`default_decode_sms` are
    checked. Nothing else should run on the GPU meanwhile.
    """
    asked = tuple(dict.fromkeys(decode_sms))
    # "none" has the whole GPU only; it is checked for sizes only where it was asked for.
    sizes = asked if asked or name == NoneBackend.name else default_decode_sms(num_sms)
    backends = []
    for candidate in OPENERS if name == AUTO else (name,):
        wanted = () if name == AUTO and candidate == NoneBackend.name else sizes
        backends.append(_check_backend(candidate, (None, *wanted), device))
    try:
        partitions = [partition_of(size, num_sms=num_sms) for size in (None, *sizes)]
        chosen, why = open_backend(name, partitions, device=device)
        chosen.close()
    except PartitionError as error:
        return PartitionChecks(sizes, tuple(backends), None, str(error))
    return PartitionChecks(sizes, tuple(backends), chosen.name, why)


def _check_backend(name: str, sizes: Iterable[int | None], device: int) -> BackendCheck:
    granularity, checks = None, []
    try:
        with closing(SmidProbe(device)) as probe, closing(OPENERS[name](SmidProbe(device))) as backend:
            granularity = backend.granularity_sms
            checks = [_check_size(backend, size, probe) for size in sizes]
    except PartitionError as error:
        return BackendCheck(name, granularity, tuple(checks), str(error))
    return BackendCheck(name, granularity, tuple(checks))


def _check_size(backend: PartitionBackend, decode_sms: int | None, probe: SmidProbe) -> SizeCheck:
    start_s = time.perf_counter()
    try:
        verified = verify(backend, partition_of(decode_sms, num_sms=backend.num_sms), probe)
    except PartitionError as error:
        return SizeCheck(decode_sms, problem=str(error))
    return SizeCheck(decode_sms, sm_ranges(verified["decode"]), time.perf_counter() - start_s)
