"""Where the code of a captured function can be had again: cubins of this process, kept as files by their hash.

Triton's and Inductor's kernels hold their cubin beside the handle they launch. For all others (torch's own kernels,
cuBLAS, cublasLt's nvjet kernels) CUPTI shows each module's cubin when it is loaded; which module a function is of is
told by the names in it.
"""

import ctypes
import gc
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.graph_persistence.walk import name_of, siblings
from bullet_graph.errors import CacheError, DeviceError, PartitionError
from bullet_graph.partition.driver import CudaDriver

_RESOURCE_DOMAIN, _MODULE_LOADED = 3, 6
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class _ResourceData(ctypes.Structure):
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("handle", ctypes.c_void_p),
        ("descriptor", ctypes.c_void_p),
    )


class _ModuleData(ctypes.Structure):
    _fields_ = (
        ("module_id", ctypes.c_uint32),
        ("cubin_bytes", ctypes.c_size_t),
        ("cubin", ctypes.c_void_p),
    )


def loaded_library(stem: str) -> str:
    """The path of a shared library that this process has mapped.

    Raises:
        DeviceError: it has not.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(stem):
            return path
    raise DeviceError(f"this process has not loaded {stem}: import torch first")


class CuptiRecorder:
    """Copies every cubin that the driver loads; one subscriber a process, so not beside a profiler.

    Attributes:
        cubins: in the order of loading.

    Raises:
        DeviceError: CUPTI is missing or refuses.
    """

    def __init__(self) -> None:
        self.cubins: list[bytes] = []
        self._library = ctypes.CDLL(loaded_library("libcupti.so"))
        self._callback = _CALLBACK(self._loaded)
        self._subscriber = ctypes.c_void_p()
        self._call("cuptiSubscribe", ctypes.byref(self._subscriber), self._callback, None)
        self._call(
            "cuptiEnableCallback",
            ctypes.c_uint32(1),
            self._subscriber,
            ctypes.c_int(_RESOURCE_DOMAIN),
            ctypes.c_uint32(_MODULE_LOADED),
        )

    def close(self) -> None:
        """Stop copying."""
        self._call("cuptiUnsubscribe", self._subscriber)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise DeviceError(f"{name} had to succeed but returned CUPTI error {status}: end other profilers")

    def _loaded(self, _: Any, domain: int, number: int, address: int) -> None:
        if (domain, number) != (_RESOURCE_DOMAIN, _MODULE_LOADED):
            return
        module = _ModuleData.from_address(_ResourceData.from_address(address).descriptor)
        if module.cubin and module.cubin_bytes:
            self.cubins.append(ctypes.string_at(module.cubin, module.cubin_bytes))


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """A cubin in this process: its CUlibrary, and the CUkernel of each name."""

    library: Any
    kernels: dict[str, Any]


def load_image(driver: CudaDriver, cubin: bytes) -> LoadedImage:
    """Load a cubin and list what is in it.

    Raises:
        PartitionError: the driver refused.
    """
    library = driver.call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0)
    count = int(driver.call("cuLibraryGetKernelCount", library))
    kernels = driver.call("cuLibraryEnumerateKernels", count, library) if count else []
    names = [str(driver.call("cuKernelGetName", kernel).decode()) for kernel in kernels]
    return LoadedImage(library, dict(zip(names, kernels, strict=True)))


class ImageStore:
    """A folder of cubins, and which kernels those that CUPTI showed hold."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._index = folder, folder / "index.json"

    def add(self, cubin: bytes) -> str:
        """Keep a cubin; returns its SHA-256."""
        sha = hashlib.sha256(cubin).hexdigest()
        path = self._folder / f"{sha}.cubin"
        if not path.exists():
            path.write_bytes(cubin)
        return sha

    def read(self, sha: str) -> bytes:
        """A cubin's bytes.

        Raises:
            CacheError: it is missing or not what was kept.
        """
        path = self._folder / f"{sha}.cubin"
        cubin = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(cubin).hexdigest() != sha:
            raise CacheError(f"{path} must hold the cubin of that hash, but does not: save the graph again")
        return cubin

    def index(self, driver: CudaDriver, cubins: Iterable[bytes]) -> dict[str, Any]:
        """Keep these and note the kernels in each; returns figures."""
        names, refused, num_bytes = self.names(), 0, 0
        for cubin in cubins:
            sha = hashlib.sha256(cubin).hexdigest()
            if sha in names:
                continue
            try:
                image = load_image(driver, cubin)
            except PartitionError:
                refused += 1
                continue
            names[self.add(cubin)] = sorted(image.kernels)
            num_bytes += len(cubin)
            driver.call("cuLibraryUnload", image.library)
        self._index.write_text(json.dumps(names), encoding="utf-8")
        return {"images": len(names), "bytes": num_bytes, "refused_by_the_driver": refused}

    def names(self) -> dict[str, list[str]]:
        """The kernels of each image that was indexed."""
        if not self._index.exists():
            return {}
        found: dict[str, list[str]] = json.loads(self._index.read_text(encoding="utf-8"))
        return found


def triton_cubins() -> dict[int, bytes]:
    """The cubin of each CUfunction that live Triton and Inductor kernels launch."""
    found = {}
    for candidate in gc.get_objects():
        # By name: a test must not need Triton's own.
        if type(candidate).__name__ == "CompiledKernel":
            function, cubin = (vars(candidate).get(name) for name in ("function", "kernel"))
            if isinstance(function, int) and isinstance(cubin, bytes):
                found[function] = cubin
    return found


class Origins:
    """Finds each function's cubin, and counts where it came from.

    Attributes:
        counts: functions by origin.
        unknown: names of those without a cubin.
        triton: cubins that Triton's and Inductor's own objects hold.
    """

    def __init__(self, driver: CudaDriver, store: ImageStore) -> None:
        self._driver, self._store = driver, store
        self._triton = triton_cubins()
        self._indexed = {sha: frozenset(names) for sha, names in store.names().items()}
        self.counts: dict[str, int] = {}
        self.unknown: list[str] = []
        self.triton: set[str] = set()

    def image_of(self, function: Any) -> str:
        """SHA-256 of the function's cubin in the store, "" where there is none or several could be it."""
        if (cubin := self._triton.get(int(function))) is not None:
            sha = self._store.add(cubin)
            self.triton.add(sha)
            return self._counted("triton", sha)
        name = name_of(self._driver, function)
        try:
            module = frozenset(name_of(self._driver, one) for one in siblings(self._driver, function))
        except PartitionError:
            module = frozenset({name})
        exact = [sha for sha, names in self._indexed.items() if names == module]
        holding = exact or [sha for sha, names in self._indexed.items() if name in names]
        if len(holding) == 1:
            return self._counted("module as CUPTI showed it", holding[0])
        self.unknown.append(name)
        return self._counted("none" if not holding else f"ambiguous ({len(holding)} modules)", "")

    def _counted(self, origin: str, sha: str) -> str:
        self.counts[origin] = self.counts.get(origin, 0) + 1
        return sha
